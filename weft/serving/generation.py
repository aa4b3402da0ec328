"""One job at the engine: submitted, timed, and closed whatever happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from weft import logs
from weft.backends.contract import Conversation, Prompt, Stream, Terms, failure_of, num_tokens
from weft.errors import EngineFault, Overloaded
from weft.observe.traces import RequestOutcome
from weft.serving.admission import RequestContext
from weft.serving.guard import side_by_side
from weft.serving.request import Choice, Job
from weft.serving.timing import RequestTimer, all_ended
from weft.types import Output

log = logging.getLogger(__name__)

TakeOf = Callable[[int, Output], Awaitable[None] | None]
"""Is given a delta and the index of its choice. What it returns, if anything, is awaited before that choice's next
delta is made: a slow reader gets larger deltas."""


class Generation:
    """The deltas of every choice of a job. Every one that was submitted is counted as ended exactly once."""

    def __init__(self, job: Job, seat: RequestContext, engine_id: str, arrived: float) -> None:
        self._job = job
        self._seat = seat
        self._service = seat.service
        self._engine_id = engine_id
        self._arrived = arrived
        self._stopwatches: list[RequestTimer] = []
        seat.choices = self._stopwatches

    async def run(self, take: TakeOf) -> None:
        """Submit the job and give every delta to `take`. Raises what the engine refuses, and the first error that an
        answer ends with. Cancelling it aborts the job."""
        answers: dict[int, Stream] = {}
        try:
            await self._submit_all(answers)
            if len(answers) == 1:
                await self._follow(answers[0], 0, take)
            else:
                await side_by_side(self._follow(answer, index, take) for index, answer in answers.items())
        finally:
            for answer in answers.values():
                await answer.aclose()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """However the work within ends, every choice that was submitted is counted as ended."""
        try:
            with all_ended(self._stopwatches):
                yield
        finally:
            if self._stopwatches:
                self._report()

    async def _follow(self, answer: Stream, index: int, take: TakeOf) -> None:
        stopwatch = self._stopwatches[index]

        def take_timed(delta: Output) -> Awaitable[None] | None:
            delta = stopwatch.saw(delta)
            if delta.finish and (failure := failure_of(delta)):
                raise failure
            return take(index, delta)

        await answer.follow(take_timed)
        if not stopwatch.ended:
            raise EngineFault("The engine ended an answer without a reason.")

    def _stopwatch(self, choice: Choice) -> RequestTimer:
        return RequestTimer(
            self._service.metrics,
            self._seat.account,
            self._arrived,
            num_tokens(choice.prompt),
            self._job.model_name,
            is_sibling=choice.leader is not None,
        )

    async def _submit_all(self, answers: dict[int, Stream]) -> None:
        """All choices at once, in their order: an engine elsewhere returns only when it begins to answer. `answers` has
        those that were submitted, whatever is raised."""
        choices = self._job.choices()

        async def submit(index: int) -> None:
            answers[index] = await self._submit(choices[index], index)

        try:
            if len(choices) == 1:
                await submit(0)
            else:
                await side_by_side(map(submit, range(len(choices))))
        finally:
            self._stopwatches += [self._stopwatch(choices[index]) for index in sorted(answers)]

    async def _submit(self, choice: Choice, index: int) -> Stream:
        try:
            answer = await self._service.engine.submit(
                choice.prompt,
                choice.params,
                Terms(
                    request_id=self._id_of(index),
                    cache_salt=self._job.cache_salt,
                    priority=self._job.priority,
                    tenant=self._seat.tenant,
                    adapter=self._job.adapter,
                ),
                sibling_of="" if choice.leader is None else self._id_of(choice.leader),
                markers=self._job.markers,
            )
        except Overloaded:
            self._service.metrics.rejected()
            raise
        if choice.leader is None:
            self._seat.account.spend_tokens(num_tokens(choice.prompt))
        return answer

    def _report(self) -> None:
        """To the log, and to whoever follows traces."""
        outcome = self._outcome()
        fields: dict[str, object] = {
            "answer_id": self._seat.answer_id,
            "model": outcome.model,
            "choices": outcome.choices,
            "prompt_tokens": outcome.prompt_tokens,
            "tokens": outcome.completion_tokens,
            "queue_s": outcome.queue_seconds,
            "first_token_s": outcome.first_token_seconds,
            "seconds": outcome.seconds,
            "finish": outcome.finish,
        }
        if self._job.adapter:
            fields["adapter"] = self._job.adapter
        if self._service.options.log_prompts:
            fields["prompts"] = [self._shown(prompt) for prompt in self._job.prompts]
        logs.event(log, logging.INFO, "generated", fields)
        if self._service.traces is not None:
            self._service.traces.record(outcome)

    def _shown(self, prompt: Prompt) -> object:
        match prompt:
            case str():
                return prompt
            case Conversation():
                return prompt.messages
            case _:
                return self._service.engine.tokenizer.decode(prompt, skip_special_tokens=False)

    def _outcome(self) -> RequestOutcome:
        watches = self._stopwatches
        queued = [watch.queue_seconds for watch in watches if watch.queue_seconds is not None]
        firsts = [watch.first_token_seconds for watch in watches if watch.first_token_seconds is not None]
        return RequestOutcome(
            model=self._job.model_name,
            request_id=self._seat.request_id,
            tenant=self._seat.tenant,
            choices=len(watches),
            prompt_tokens=sum(watch.num_prompt_tokens for watch in watches[:: self._job.n]),
            completion_tokens=sum(watch.num_tokens for watch in watches),
            queue_seconds=min(queued, default=None),
            first_token_seconds=min(firsts, default=None),
            seconds=time.perf_counter() - self._arrived,
            finish=",".join(sorted({watch.finish for watch in watches if watch.finish is not None})),
        )

    def _id_of(self, index: int) -> str:
        return f"{self._engine_id}-{index}"
