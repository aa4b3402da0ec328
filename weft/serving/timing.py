"""The times and the tokens of one choice of an answer, from its request's arrival to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from weft.backends.contract import ParsedOutput
from weft.errors import RequestTimeout, Unavailable
from weft.observe.metrics import Metrics
from weft.serving.guard import ClientGone
from weft.serving.rate_limits import Account
from weft.types import FinishReason, Output, Timings


class RequestTimer:
    """Tells the metrics of everything, and the account of what was generated when it has ended."""

    def __init__(
        self,
        metrics: Metrics,
        account: Account,
        arrived: float,
        num_prompt_tokens: int,
        model_name: str,
        *,
        is_sibling: bool = False,
    ) -> None:
        """`num_prompt_tokens`: 0 where the engine will tell. `is_sibling`: another choice pays for the prompt."""
        self._metrics = metrics
        self._model_name = model_name
        self._is_sibling = is_sibling
        self._account = account
        self._arrived = arrived
        self._first_token: float | None = None
        self._last_token = arrived
        self._num_told = 0
        """Of its tokens, those whose ids were told: all or none."""
        self._counted_at = arrived
        """When tokens that came as text were counted last."""
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

    def saw(self, delta: Output) -> Output:
        """The delta, the last one with the times of all."""
        if delta.queue_seconds is not None:
            self.queue_seconds = delta.queue_seconds
        if num_tokens := len(delta.token_ids):
            now = time.perf_counter()
            if self._first_token is None:
                self._first_token = now
                self._metrics.time_to_first_token.observe(now - self._arrived)
            else:
                self._metrics.inter_token_latency.observe((now - self._last_token) / num_tokens, num_tokens)
            self.num_tokens += num_tokens
            self._num_told += num_tokens
            self._last_token = now
        elif self._num_told == 0:
            self._saw_text(delta)
        if delta.finish:
            self.end(delta.finish)
            return replace(delta, timings=self._timings())
        return delta

    def _saw_text(self, delta: Output) -> None:
        """Text of tokens whose ids are not told: the engine's usage counts them, now or at the end."""
        now = time.perf_counter()
        if delta.text or (isinstance(delta, ParsedOutput) and delta.pieces):
            self._last_token = now
            if self._first_token is None:
                self._first_token = self._counted_at = now
                self._metrics.time_to_first_token.observe(now - self._arrived)
        if not self.num_prompt_tokens and delta.usage.prompt_tokens:
            self.num_prompt_tokens = delta.usage.prompt_tokens
            if not self._is_sibling:
                self._account.spend_tokens(self.num_prompt_tokens)
        if (new := delta.usage.completion_tokens - self.num_tokens) > 0:
            # Before the first token is no time between tokens.
            intervals = new if self.num_tokens else new - 1
            if intervals and self._first_token is not None:
                self._metrics.inter_token_latency.observe((now - self._counted_at) / intervals, intervals)
            self._counted_at = now
            self.num_tokens += new

    def end(self, reason: FinishReason) -> None:
        if self.ended:
            return
        self.finish = reason
        self._account.spend_tokens(self.num_tokens)
        metrics = self._metrics
        metrics.finished(self._model_name, reason, time.perf_counter() - self._arrived)
        metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.request_generation_tokens.observe(self.num_tokens)
        if (timings := self._timings()) is not None:
            if timings.queue_seconds is not None:
                metrics.request_queue_time.observe(timings.queue_seconds)
                metrics.request_prefill_time.observe(timings.first_token_seconds - timings.queue_seconds)
            metrics.request_decode_time.observe(timings.total_seconds - timings.first_token_seconds)

    def _timings(self) -> Timings | None:
        if self._first_token is None:
            return None
        return Timings(
            queue_seconds=self.queue_seconds,
            first_token_seconds=self._first_token - self._arrived,
            total_seconds=self._last_token - self._arrived,
            tokens=self.num_tokens,
        )


@contextmanager
def all_ended(stopwatches: Sequence[RequestTimer]) -> Iterator[None]:
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
