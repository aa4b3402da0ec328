"""The times and the tokens of one choice of an answer, from its request's arrival to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from weft.errors import RequestTimeout, Unavailable
from weft.frontend.body import ClientGone
from weft.frontend.limits import Account
from weft.observe.metrics import Metrics
from weft.types import Delta, FinishReason, Timings


class Stopwatch:
    """Tells the metrics of everything, and the account of what was generated when it has ended."""

    def __init__(self, metrics: Metrics, account: Account, arrived: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._account = account
        self._arrived = arrived
        self._first_token: float | None = None
        self._last_token = arrived
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.queue_seconds: float | None = None
        self.finish: FinishReason | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def first_token_seconds(self) -> float | None:
        return None if self._first_token is None else self._first_token - self._arrived

    def saw(self, delta: Delta) -> Delta:
        """The delta, the last one with the times of all."""
        if num_tokens := len(delta.token_ids):
            now = time.perf_counter()
            if self._first_token is None:
                self._first_token = now
                self.queue_seconds = delta.queue_seconds
                self._metrics.time_to_first_token.observe(now - self._arrived)
            else:
                self._metrics.inter_token_latency.observe((now - self._last_token) / num_tokens, num_tokens)
            self.num_tokens += num_tokens
            self._last_token = now
        if delta.finish:
            self.end(delta.finish)
            return replace(delta, timings=self._timings())
        return delta

    def end(self, reason: FinishReason) -> None:
        if self.ended:
            return
        self.finish = reason
        self._account.spend_tokens(self.num_tokens)
        metrics = self._metrics
        metrics.finished(reason, time.perf_counter() - self._arrived)
        metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.request_generation_tokens.observe(self.num_tokens)
        if (timings := self._timings()) is not None:
            metrics.request_queue_time.observe(timings.queue_seconds)
            metrics.request_prefill_time.observe(timings.first_token_seconds - timings.queue_seconds)
            metrics.request_decode_time.observe(timings.total_seconds - timings.first_token_seconds)

    def _timings(self) -> Timings | None:
        if self._first_token is None:
            return None
        return Timings(
            queue_seconds=self.queue_seconds or 0.0,
            first_token_seconds=self._first_token - self._arrived,
            total_seconds=self._last_token - self._arrived,
            tokens=self.num_tokens,
        )


@contextmanager
def all_ended(stopwatches: Sequence[Stopwatch]) -> Iterator[None]:
    """However the work within ends, everything that was submitted meanwhile is counted as ended."""
    reason = FinishReason.ABORT
    try:
        yield
    except RequestTimeout:
        reason = FinishReason.TIMEOUT
        raise
    except (ClientGone, Unavailable):
        raise
    except Exception:
        reason = FinishReason.ERROR
        raise
    finally:
        for stopwatch in stopwatches:
            stopwatch.end(reason)
