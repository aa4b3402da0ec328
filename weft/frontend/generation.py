"""One job at the engine: submitted, timed, and closed whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from weft.backends.contract import Deltas, failure_of
from weft.errors import EngineFault, Overloaded, RequestTimeout, Unavailable
from weft.frontend.body import ClientGone
from weft.frontend.gate import Service
from weft.frontend.translate import Job
from weft.observe.metrics import Metrics
from weft.types import Delta, FinishReason

TakeOf = Callable[[int, Delta], Awaitable[None] | None]
"""Is given a delta and the index of its prompt. What it returns, if anything, is awaited before that prompt's next
delta is made: a slow reader gets larger deltas."""


class Stopwatch:
    """The times of one choice, from the request's arrival."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last_token: float | None = None
        self.ended = False

    def saw(self, delta: Delta) -> None:
        if num_tokens := len(delta.token_ids):
            now = time.perf_counter()
            if self._last_token is None:
                self._metrics.time_to_first_token.observe(now - self._arrived)
            else:
                self._metrics.inter_token_latency.observe((now - self._last_token) / num_tokens, num_tokens)
            self._last_token = now
        if delta.finish:
            self.end(delta.finish)

    def end(self, reason: FinishReason) -> None:
        if not self.ended:
            self.ended = True
            self._metrics.finished(reason, time.perf_counter() - self._arrived)


class Generation:
    """The deltas of every prompt of a job. Every prompt that was submitted is counted as ended exactly once."""

    def __init__(self, job: Job, service: Service, engine_id: str, arrived: float) -> None:
        self._job = job
        self._service = service
        self._engine_id = engine_id
        self._arrived = arrived
        self._stopwatches: list[Stopwatch] = []

    async def run(self, take: TakeOf) -> None:
        """Submit the job and give every delta to `take`. Raises what the engine refuses, and the first error that an
        answer ends with. Cancelling it aborts the job."""
        answers: list[Deltas] = []
        try:
            for index, prompt in enumerate(self._job.prompts):
                answers.append(await self._submit(prompt, index))
                self._stopwatches.append(Stopwatch(self._service.metrics, self._arrived))
            if len(answers) == 1:
                await self._follow(answers[0], 0, take)
            else:
                await self._follow_all(answers, take)
        finally:
            for answer in answers:
                await answer.aclose()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """However the work within ends, every prompt that was submitted is counted as ended."""
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
            for stopwatch in self._stopwatches:
                stopwatch.end(reason)

    async def _follow(self, answer: Deltas, index: int, take: TakeOf) -> None:
        stopwatch = self._stopwatches[index]

        def take_timed(delta: Delta) -> Awaitable[None] | None:
            stopwatch.saw(delta)
            if delta.finish and (failure := failure_of(delta)):
                raise failure
            return take(index, delta)

        await answer.follow(take_timed)
        if not stopwatch.ended:
            raise EngineFault("The engine ended an answer without a reason.")

    async def _follow_all(self, answers: list[Deltas], take: TakeOf) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, answer in enumerate(answers):
                    group.create_task(self._follow(answer, index, take))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _submit(self, prompt: list[int], index: int) -> Deltas:
        try:
            return await self._service.engine.submit(
                prompt,
                self._job.params,
                request_id=f"{self._engine_id}-{index}" if len(self._job.prompts) > 1 else self._engine_id,
                cache_salt=self._job.cache_salt,
            )
        except Overloaded:
            self._service.metrics.rejected()
            raise
