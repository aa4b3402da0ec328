"""The life of one call's requests at the engine: submitted, timed, and closed whatever happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from weft import logs
from weft.backends.contract import Stream, failure_of
from weft.errors import EngineFault, Overloaded, RequestTimeout, Unavailable
from weft.observe.traces import RequestOutcome, RequestSpan
from weft.payloads import PromptEmbeds
from weft.serving.admission import ClientGone, RequestContext
from weft.serving.rate_limits import Reservation
from weft.serving.timing import FREE, Cost, RequestTimer, cost_of
from weft.types import (
    LOWEST_PRIORITY,
    Conversation,
    Embed,
    FinishReason,
    GenerateImage,
    GenerationRequest,
    MixedPrompt,
    Output,
    Prompt,
    Sample,
)

log = logging.getLogger(__name__)

MAX_QUEUED_EMBEDS = 256
"""Inputs of one call for embeddings that are in the engine's queue together: the rest must not fill it."""

TakeOf = Callable[[int, Output], Awaitable[None] | None]
"""Takes an output and the index of its request. What it returns, if anything, is awaited before that request's next
output is made: a slow reader gets larger outputs."""


class Generation:
    """The outputs of every request of a call. Every one that was submitted is counted as ended exactly once."""

    def __init__(
        self, requests: Sequence[GenerationRequest], context: RequestContext, arrived: float, model_name: str
    ) -> None:
        """`model_name`: as the client called it, which is one of the operator's names. Raises InvalidRequest for a
        priority that the client's key may not have."""
        self._context = context
        self._served = context.served
        self._span: RequestSpan | None = None
        if self._served.traces is not None and not isinstance(requests[0].task, Embed):
            self._span = self._served.traces.begin(arrived)
        self._requests = [self._of_tenant(request) for request in requests]
        self._arrived = arrived
        self._model_name = model_name
        self._timers: dict[int, RequestTimer] = {}
        self._costs: list[Cost] = []
        self._reservation: Reservation | None = None
        """None: tokens are not limited."""
        context.timers = self._timers

    def _of_tenant(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with what its tenant may have. Raises InvalidRequest."""
        context, able, priority = self._context, self._served.engine.abilities, request.priority
        if able.priority and context.is_batch:
            priority = LOWEST_PRIORITY
        elif able.priority:
            priority = context.keys.priority_of(context.tenant, priority, has_shares=able.fair_shares)
        session, shares = context.session or request.session, context.config.server.share_prefix_cache
        trace = None if self._span is None else self._span.trace
        return replace(request, priority=priority, session=session, shares_cache=shares, trace=trace)

    async def run(self, take: TakeOf) -> None:
        """Submit the requests and give every output to `take`. Raises RateLimited, what the engine refuses, and the
        first error that a request ends with. Cancelling it aborts them all."""
        self._reserve()
        streams: dict[int, Stream] = {}
        indexes = range(len(self._requests))
        try:
            if isinstance(self._requests[0].task, Embed):
                capacity = asyncio.Semaphore(MAX_QUEUED_EMBEDS)
                await side_by_side(self._run_within(capacity, index, streams, take) for index in indexes)
            elif len(self._requests) == 1:
                await self._submit(0, streams)
                await self._follow(0, streams[0], take)
            else:
                # All at once and in their order: an engine elsewhere returns only when it begins to answer.
                await side_by_side(self._submit(index, streams) for index in indexes)
                await side_by_side(self._follow(index, streams[index], take) for index in indexes)
        finally:
            for stream in streams.values():
                await stream.aclose()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """However the work within ends, every request that was submitted is counted as ended and reported, and
        the call is paid for."""
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
            for timer in self._timers.values():
                timer.end(reason)
            if self._reservation is not None:
                self._reservation.settle()
            if self._timers:
                self._report()

    async def _run_within(
        self, capacity: asyncio.Semaphore, index: int, streams: dict[int, Stream], take: TakeOf
    ) -> None:
        async with capacity:
            await self._submit(index, streams)
            await self._follow(index, streams[index], take)
            await streams.pop(index).aclose()

    async def _submit(self, index: int, streams: dict[int, Stream]) -> None:
        """Submit one request, and put its stream among the others, which are closed whatever is raised."""
        request, cost, reservation = self._requests[index], FREE, self._reservation
        if reservation is not None:
            cost = self._costs[index]
            # Before it is submitted: an engine elsewhere has computed the prompt when it returns.
            reservation.use(cost.advance)
        try:
            streams[index] = await self._served.engine.submit(request)
        except Exception as error:
            if reservation is not None:
                reservation.use(-cost.advance)
            if isinstance(error, Overloaded):
                self._served.metrics.rejected()
            raise
        self._timers[index] = RequestTimer(
            self._served.metrics,
            reservation,
            cost,
            self._arrived,
            request,
            self._model_name,
            is_sibling=self._shares_prompt(index),
        )

    def _shares_prompt(self, index: int) -> bool:
        """Return whether another request of the call pays for the same prompt."""
        request = self._requests[index]
        return bool(request.sibling_of) or (index > 0 and isinstance(request.task, GenerateImage))

    def _reserve(self) -> None:
        """Take what the call may cost from its key's tokens. Raises RateLimited."""
        if not self._context.account.limits_tokens:
            return
        model = self._served.engine.model
        self._costs = [
            cost_of(request, model, is_sibling=self._shares_prompt(index))
            for index, request in enumerate(self._requests)
        ]
        try:
            self._reservation = self._context.account.reserve(sum(cost.total for cost in self._costs))
        except Overloaded:
            self._served.metrics.rejected()
            raise

    async def _follow(self, index: int, stream: Stream, take: TakeOf) -> None:
        timer = self._timers[index]

        def take_timed(output: Output) -> Awaitable[None] | None:
            output = timer.saw(output)
            if output.finish and (failure := failure_of(output)):
                raise failure
            return take(index, output)

        await stream.follow(take_timed)
        if not timer.ended:
            what = "an image" if isinstance(timer.task, GenerateImage) else "an answer"
            raise EngineFault(f"The engine ended {what} without a reason.")

    def _report(self) -> None:
        """Write to the log and to the traces how the requests went; vectors have no trace."""
        match self._requests[0].task:
            case Sample():
                self._report_samples(self._outcome(self._model_name))
            case GenerateImage():
                image_model = self._served.engine.model.images
                assert image_model is not None
                self._report_images(self._outcome(image_model.name))
            case Embed():
                outcome = self._outcome(self._model_name)
                # Vectors are many and short: they have no line where they have none of a request.
                logs.note({"model": outcome.model, "prompt_tokens": outcome.prompt_tokens, "inputs": outcome.choices})

    def _report_samples(self, outcome: RequestOutcome) -> None:
        fields: dict[str, object] = {
            "model": outcome.model,
            "prompt_tokens": outcome.prompt_tokens,
            "tokens": outcome.completion_tokens,
            "ttft_s": outcome.first_token_seconds,
            "tok_per_s": self._tokens_per_second(),
            "finish": outcome.finish,
            "queue_s": outcome.queue_seconds,
            "choices": outcome.choices,
            "answer_id": self._context.answer_id,
            "seconds": outcome.seconds,
        }
        if adapter := self._requests[0].adapter:
            fields["adapter"] = adapter
        if self._served.options.log_prompts:
            fields["prompts"] = [self._shown(request.prompt) for request in self._requests if not request.sibling_of]
        self._log("generated", fields)
        self._trace(outcome)

    def _log(self, message: str, fields: dict[str, object]) -> None:
        """Add to the line of the call's request; an answer in the background, or a line of a batch, has its own."""
        if not logs.note(fields):
            logs.event(log, logging.INFO, message, fields)

    def _tokens_per_second(self) -> float | None:
        """Return the speed of all choices together behind their first tokens; None where there were none."""
        timings = [timer.timings for timer in self._timers.values() if timer.timings is not None]
        count = sum(each.tokens - 1 for each in timings)
        seconds = max((each.total_seconds - each.first_token_seconds for each in timings), default=0)
        return count / seconds if count > 0 and seconds > 0 else None

    def _report_images(self, outcome: RequestOutcome) -> None:
        first = self._requests[0]
        assert isinstance(first.task, GenerateImage)
        fields: dict[str, object] = {
            "model": outcome.model,
            "prompt_tokens": outcome.prompt_tokens,
            "images": outcome.choices,
            "steps": first.task.params.steps,
            "finish": outcome.finish,
            "answer_id": self._context.answer_id,
            "seconds": outcome.seconds,
        }
        if self._served.options.log_prompts:
            fields["prompt"] = first.task.params.prompt_text or self._shown(first.prompt)
        self._log("drew", fields)
        self._trace(outcome)

    def _trace(self, outcome: RequestOutcome) -> None:
        if self._served.traces is not None and self._span is not None:
            self._served.traces.record(outcome, self._span)

    def _shown(self, prompt: Prompt) -> object:
        match prompt:
            case str():
                return prompt
            case Conversation():
                return prompt.messages
            case MixedPrompt():
                return [*map(self._shown_part, prompt.parts())]
            case _:
                return self._shown_part(prompt)

    def _shown_part(self, part: list[int] | PromptEmbeds) -> str:
        if isinstance(part, PromptEmbeds):
            return f"({part.shape[0]} rows of prompt embeds)"
        return self._served.engine.text.tokenizer.decode(part, skip_special_tokens=False)

    def _outcome(self, model_name: str) -> RequestOutcome:
        timers = self._timers.values()
        sampled = [timer for timer in timers if isinstance(timer.task, Sample)]
        queued = [timer.queue_seconds for timer in sampled if timer.queue_seconds is not None]
        firsts = [timer.first_token_seconds for timer in sampled if timer.first_token_seconds is not None]
        return RequestOutcome(
            model=model_name,
            request_id=self._context.request_id,
            tenant=self._context.tenant,
            choices=len(timers),
            prompt_tokens=sum(timer.num_prompt_tokens for timer in timers if not timer.is_sibling),
            completion_tokens=sum(timer.num_tokens + timer.image_tokens for timer in timers),
            queue_seconds=min(queued, default=None),
            first_token_seconds=min(firsts, default=None),
            seconds=time.perf_counter() - self._arrived,
            finish=",".join(sorted({timer.finish for timer in timers if timer.finish is not None})),
        )


async def side_by_side(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of it at the same time. Raises the first error of any; the others are cancelled then."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
