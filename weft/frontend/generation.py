"""One job at the engine: submitted, timed, and closed whatever happens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from weft.backends.contract import Deltas, failure_of
from weft.errors import EngineFault, Overloaded
from weft.frontend.gate import Service
from weft.frontend.merge import merged
from weft.frontend.translate import Job
from weft.observe.metrics import Metrics
from weft.types import Delta, FinishReason


class Stopwatch:
    """The times of one choice, from the request's arrival."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last_token: float | None = None
        self.ended = False

    def saw(self, delta: Delta) -> None:
        now = time.perf_counter()
        if num_tokens := len(delta.token_ids):
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

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Raises what the engine refuses, and the error that an answer ended with. Closing it aborts the job."""
        generations: list[Deltas] = []
        try:
            for index, prompt in enumerate(self._job.prompts):
                generations.append(await self._submit(prompt, index))
                self._stopwatches.append(Stopwatch(self._service.metrics, self._arrived))
            all_deltas = merged(generations)
            try:
                async for index, delta in all_deltas:
                    self._stopwatches[index].saw(delta)
                    if failure := failure_of(delta):
                        raise failure
                    yield index, delta
            finally:
                await all_deltas.aclose()
            if not all(stopwatch.ended for stopwatch in self._stopwatches):
                raise EngineFault("The engine ended an answer without a reason.")
        finally:
            for generation in generations:
                await generation.aclose()

    def end(self, reason: FinishReason) -> None:
        """Count what has not ended by itself."""
        for stopwatch in self._stopwatches:
            stopwatch.end(reason)

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
