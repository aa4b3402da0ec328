"""The limits of what one tenant may ask for in a minute and at the same time: every endpoint has the same accounts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from msgspec import Struct

from weft.errors import Overloaded, Unavailable
from weft.options import LimitOptions

MINUTE_S = 60.0
TOKENS_FLAG = "--max-tokens-per-minute-per-key"
ROUNDING = 1e-6
"""A bucket that lacks no more than this is full enough: a client that waits as long as it was told comes in."""


class RateLimited(Overloaded):
    """This client has had its share; others are still served."""

    kind = "rate_limit_exceeded"


class BodiesOfKey(RateLimited):
    """The bodies of this key's requests take all the memory that they may."""


class BodiesOfAll(Unavailable):
    """The bodies of all requests take all the memory that they may."""


class RateLimitState(Struct, frozen=True):
    """The rest that a tenant has of one limit."""

    unit: str
    """requests or tokens"""
    limit: int
    """A minute's worth."""
    remaining: int
    reset_s: float
    """Seconds until all of it is there again, if none is spent."""


class Bucket:
    """The bucket holds what may be spent: a minute's worth at most, filled evenly. An advance is a debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.size = per_minute
        self.level = float(per_minute)
        """As of the last time that `seconds_until` was asked."""
        self._per_second = per_minute / MINUTE_S
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Return how long it takes until the bucket holds so much; 0 when it does."""
        self.level = min(self.size, self.level + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        missing = amount - self.level
        return missing / self._per_second if missing > ROUNDING else 0.0

    @property
    def remaining(self) -> int:
        """The amount that may be spent, as of the same time."""
        return max(0, math.floor(self.level + ROUNDING))

    def state(self, unit: str, now: float) -> RateLimitState:
        reset_s = self.seconds_until(self.size, now)
        return RateLimitState(unit, self.size, self.remaining, reset_s)

    def spend(self, amount: float) -> None:
        self.level -= amount


class Reservation:
    """The tokens that a call took from its key's bucket before they are computed. What it uses beyond them is taken as
    it is used; what it did not use is given back when it is settled."""

    def __init__(self, bucket: Bucket, amount: int) -> None:
        bucket.spend(amount)
        self._bucket = bucket
        self._taken = amount
        self._used = 0

    def use(self, count: int) -> None:
        """Count tokens as used; a negative number corrects an estimate."""
        self._used += count
        if self._used > self._taken:
            self.settle()

    def settle(self) -> None:
        """Take no more and no less than was used."""
        self._bucket.spend(self._used - self._taken)
        self._taken = self._used


class Bodies(Struct):
    """The bytes of bodies that were received and are not parsed yet."""

    limit: int
    """0: none."""
    num_bytes: int = 0


class Account:
    """One tenant's open requests and their bodies, and its requests and tokens of this minute."""

    def __init__(self, options: LimitOptions, clock: Callable[[], float], bodies: Bodies, all_bodies: Bodies) -> None:
        self._options = options
        self._bodies = bodies
        self._all_bodies = all_bodies
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
            raise _refusal("This key has used or reserved its tokens for now", wait, TOKENS_FLAG)
        if self._requests is not None:
            if wait := self._requests.seconds_until(1, now):
                raise _refusal("This key has sent its requests for now", wait, "--max-requests-per-minute-per-key")
            self._requests.spend(1)
        self._num_open += 1

    def leave(self) -> None:
        self._num_open -= 1

    def hold_body(self, num_bytes: int) -> None:
        """Count bytes of a body that was received, or raise BodiesOfKey or BodiesOfAll."""
        for bodies, refusal, whose, flag in (
            (self._bodies, BodiesOfKey, "this key's requests", "--max-inflight-body-mb-per-key"),
            (self._all_bodies, BodiesOfAll, "all requests", "--max-inflight-body-mb"),
        ):
            if bodies.limit and bodies.num_bytes + num_bytes > bodies.limit:
                raise refusal(
                    f"The bodies of {whose} that are being read have more than {bodies.limit >> 20} MiB ({flag}).",
                    hint="Try again in 1 s.",
                )
        self._bodies.num_bytes += num_bytes
        self._all_bodies.num_bytes += num_bytes

    def release_body(self, num_bytes: int) -> None:
        self._bodies.num_bytes -= num_bytes
        self._all_bodies.num_bytes -= num_bytes

    def rate_limits(self) -> list[RateLimitState]:
        """Return what is left of the limits that there are."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return [bucket.state(unit, self._clock()) for unit, bucket in buckets.items() if bucket is not None]

    @property
    def limits_tokens(self) -> bool:
        return self._tokens is not None

    def reserve(self, count: int) -> Reservation:
        """Take tokens that a call will use at most, or raise RateLimited. One that would use more than a minute's worth
        takes a full bucket, or it could never begin."""
        assert self._tokens is not None, "tokens are limited"
        amount = min(count, self._tokens.size)
        if wait := self._tokens.seconds_until(amount, self._clock()):
            raise _refusal(
                f"This request may take {count} tokens, its prompt and max_tokens of every choice, and this key has "
                f"{self._tokens.remaining} left for now",
                wait,
                TOKENS_FLAG,
            )
        return Reservation(self._tokens, amount)

    def spend_load(self) -> None:
        """Count a model that is loaded for a request, or raise RateLimited."""
        if self._loads is not None:
            if wait := self._loads.seconds_until(1, self._clock()):
                flag = "--max-model-loads-per-minute-per-key"
                raise _refusal("This key has had its models loaded for now", wait, flag)
            self._loads.spend(1)


class Accounts:
    """The accounts of all tenants. The operator names these, so there are never more than keys."""

    def __init__(
        self, options: LimitOptions, clock: Callable[[], float] = time.monotonic, *, max_body_mb: int = 0
    ) -> None:
        """`max_body_mb`: a body of this size is taken while there is no other, whatever the limits are."""
        self._options = options
        self._clock = clock
        self._max_body_mb = max_body_mb
        self._all_bodies = self._bodies(options.max_inflight_body_mb)
        self._by_tenant: dict[str, Account] = {}

    def of(self, tenant: str) -> Account:
        account = self._by_tenant.get(tenant)
        if account is None:
            bodies = self._bodies(self._options.max_inflight_body_mb_per_key)
            account = self._by_tenant[tenant] = Account(self._options, self._clock, bodies, self._all_bodies)
        return account

    def _bodies(self, limit_mb: int) -> Bodies:
        return Bodies(max(limit_mb, self._max_body_mb) << 20 if limit_mb else 0)


def _bucket(per_minute: int, now: float) -> Bucket | None:
    return Bucket(per_minute, now) if per_minute else None


def _refusal(what: str, wait_s: float, flag: str) -> RateLimited:
    seconds = math.ceil(wait_s)
    return RateLimited(f"{what} ({flag}).", retry_after_s=seconds, hint=f"Try again in {seconds} s.")
