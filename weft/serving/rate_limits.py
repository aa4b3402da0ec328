"""What one tenant may ask for in a minute, and at the same time: the same accounts for every endpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from weft.errors import Overloaded
from weft.options import LimitOptions

MINUTE_S = 60.0
ROUNDING = 1e-6
"""A bucket that lacks no more than this is full enough: a client that waits as long as it was told comes in."""


class RateLimited(Overloaded):
    """This client has had its share; others are still served."""

    kind = "rate_limit_exceeded"


class Bucket:
    """The bucket holds what may be spent: a minute's worth at most, filled evenly. An advance is a debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_second = per_minute / MINUTE_S
        self._size = float(per_minute)
        self._level = self._size
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Return how long it takes until the bucket holds so much; 0 when it does."""
        self._level = min(self._size, self._level + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        missing = amount - self._level
        return missing / self._per_second if missing > ROUNDING else 0.0

    def spend(self, amount: float) -> None:
        self._level -= amount


class Account:
    """One tenant's open requests, and its requests and tokens of this minute."""

    def __init__(self, options: LimitOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        now = clock()
        self._requests = _bucket(options.max_requests_per_minute_per_key, now)
        self._tokens = _bucket(options.max_tokens_per_minute_per_key, now)
        self._loads = _bucket(options.max_model_loads_per_minute_per_key, now)
        self._num_open = 0

    def enter(self) -> None:
        """Count a request in, or raise RateLimited. A request that entered must leave."""
        now = self._clock()
        most = self._options.max_concurrent_per_key
        if most and self._num_open >= most:
            raise _refusal(f"This key has {self._num_open} requests open already", 1, "--max-concurrent-per-key")
        if self._tokens is not None and (wait := self._tokens.seconds_until(1, now)):
            raise _refusal("This key has used its tokens for now", wait, "--max-tokens-per-minute-per-key")
        if self._requests is not None:
            if wait := self._requests.seconds_until(1, now):
                raise _refusal("This key has sent its requests for now", wait, "--max-requests-per-minute-per-key")
            self._requests.spend(1)
        self._num_open += 1

    def leave(self) -> None:
        self._num_open -= 1

    def spend_load(self) -> None:
        """Count a model that is loaded for a request, or raise RateLimited."""
        if self._loads is not None:
            if wait := self._loads.seconds_until(1, self._clock()):
                flag = "--max-model-loads-per-minute-per-key"
                raise _refusal("This key has had its models loaded for now", wait, flag)
            self._loads.spend(1)

    def spend_tokens(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens.spend(count)


class Accounts:
    """The accounts of all tenants. The operator names these, so there are never more than keys."""

    def __init__(self, options: LimitOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._by_tenant: dict[str, Account] = {}

    def of(self, tenant: str) -> Account:
        account = self._by_tenant.get(tenant)
        if account is None:
            account = self._by_tenant[tenant] = Account(self._options, self._clock)
        return account


def _bucket(per_minute: int, now: float) -> Bucket | None:
    return Bucket(per_minute, now) if per_minute else None


def _refusal(what: str, wait_s: float, flag: str) -> RateLimited:
    seconds = math.ceil(wait_s)
    return RateLimited(f"{what} ({flag}).", retry_after_s=seconds, hint=f"Try again in {seconds} s.")
