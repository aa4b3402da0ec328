"""The times and the tokens of one request, from its arrival to its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import ParsedOutput, num_tokens
from weft.observe.metrics import Metrics
from weft.serving.rate_limits import Reservation
from weft.text.parsers.pieces import CallStarted
from weft.types import (
    Conversation,
    Embed,
    FinishReason,
    GenerateImage,
    GenerationRequest,
    ModelInfo,
    Output,
    Prompt,
    Sample,
    Task,
    Timings,
    Usage,
)

DEFAULT_ANSWER_TOKENS = 1024
"""Tokens that are reserved for an answer without max_tokens: few answers fill the context that they may fill."""
CHARS_PER_TOKEN = 4
"""An estimate, for text whose tokens are counted elsewhere."""


class Cost(Struct, frozen=True):
    """The tokens that a request takes at most."""

    prompt: int
    """0 where another request pays for the same prompt."""
    answer: int
    advance: int
    """Tokens that are used when the request is submitted: a prompt is computed whether its client waits or not, and so
    is an image. Tokens of an answer are used as they come."""

    @property
    def total(self) -> int:
        return self.prompt + self.answer


FREE = Cost(0, 0, 0)

PhaseName = Literal["wait", "queue", "prefill", "decode", "tool", "encode", "denoise"]
Phase = tuple[PhaseName, float]
"""A part of a request's time, and its seconds. `wait` is the time before the first token of a request that has none:
its first token tells how much of it was in the queue."""

PHASES: dict[type[Task], tuple[PhaseName, PhaseName]] = {
    Sample: ("prefill", "decode"),
    GenerateImage: ("encode", "denoise"),
    Embed: ("encode", "encode"),
}
"""The phases before and after the first token, or the first denoise step, by the kind of task."""


def cost_of(request: GenerationRequest, model: ModelInfo, *, is_sibling: bool) -> Cost:
    prompt = _num_prompt_tokens(request) or _estimated_tokens(request.prompt)
    paid = 0 if is_sibling else prompt
    match request.task:
        case Sample(params=params):
            answer = params.max_tokens or DEFAULT_ANSWER_TOKENS
            if model.max_model_len:
                answer = min(answer, max(1, model.max_model_len - prompt))
            return Cost(paid, answer, paid)
        case GenerateImage(params=image) if model.images is not None:
            answer = image.steps * image.passes_per_step * model.images.num_tokens
            return Cost(paid, answer, paid + answer)
        case _:
            return Cost(paid, 0, paid)


class Timeline(Struct, frozen=True, kw_only=True):
    """One request on its way through the engine, without a word of what it says."""

    id: str
    answer_id: str
    tenant: str
    model: str
    kind: Literal["text", "image", "embedding"]
    state: str
    """`open`, or the reasons why its choices ended, joined."""
    began: float
    """Seconds since 1970."""
    phases: list[Phase]
    choices: int
    prompt_tokens: int
    tokens: int
    steps: tuple[int, int] | None
    """Denoise steps that are done, of all its images, and those that were asked for."""


class EndedRequests:
    """The timelines of the last requests that ended, and how many have ended in all."""

    def __init__(self, most: int) -> None:
        self.timelines: deque[Timeline] = deque(maxlen=most)
        self.count = 0

    def add(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)
        self.count += 1


KINDS: dict[type[Task], Literal["text", "image", "embedding"]] = {
    Sample: "text", GenerateImage: "image", Embed: "embedding"
}  # fmt: skip


def timeline_of(
    timers: Sequence[RequestTimer], *, request_id: str, answer_id: str, tenant: str, model: str, age_s: float
) -> Timeline:
    """Return the timeline of a call with these requests, of which there is one at least: its phases are those of the
    one that has come furthest."""
    now, task = time.perf_counter(), timers[0].task
    phases = timers[0].phases(now)
    if len(timers) > 1:
        phases = max((timer.phases(now) for timer in timers), key=lambda own: sum(seconds for _, seconds in own))
    ends = {timer.finish for timer in timers}
    steps = None
    if isinstance(task, GenerateImage):
        steps = (sum(timer.denoise_step for timer in timers), task.params.steps * len(timers))
    return Timeline(
        id=request_id,
        answer_id=answer_id,
        tenant=tenant,
        model=model,
        kind=KINDS[type(task)],
        state="open" if None in ends else ",".join(sorted(map(str, ends))),
        began=round(time.time() - age_s, 3),
        phases=[(name, round(seconds, 4)) for name, seconds in phases],
        choices=len(timers),
        prompt_tokens=sum(timer.num_prompt_tokens for timer in timers if not timer.is_sibling),
        tokens=sum(timer.num_tokens for timer in timers),
        steps=steps,
    )


class RequestTimer:
    """The timer tells the metrics of everything, and the reservation of what was computed."""

    def __init__(
        self,
        metrics: Metrics,
        reservation: Reservation | None,
        cost: Cost,
        arrived: float,
        request: GenerationRequest,
        model_name: str,
        *,
        is_sibling: bool,
    ) -> None:
        """Begin when the request was submitted, and the advance of its cost was used. `reservation`: None where tokens
        are not limited. `is_sibling`: another request pays for the same prompt."""
        self.task = request.task
        self.is_sibling = is_sibling
        self.num_prompt_tokens = _num_prompt_tokens(request)
        """0 where the engine will tell."""
        self.num_tokens = 0
        """Tokens that were sampled so far."""
        self.image_tokens = 0
        """What the steps of an image counted as."""
        self.queue_seconds: float | None = None
        self.finish: FinishReason | None = None
        self._metrics = metrics
        self._model_name = model_name
        self._reservation = reservation
        self._cost = cost
        self._arrived = arrived
        self._is_sampled = isinstance(request.task, Sample)
        self.denoise_step = 0
        """Steps of an image that are done."""
        self._first_token: float | None = None
        """When the first token came, or the first step of an image was done."""
        self._last_token = arrived
        self._call_marker = request.task.call_marker if isinstance(request.task, Sample) else ""
        self._text_end = ""
        """The end of the text so far, in which a call's marker may begin."""
        self._call_began: float | None = None
        self._ended_at = arrived
        self._num_told = 0
        """How many of its tokens came with their ids: all or none."""
        self._counted_at = arrived
        """When tokens that came as text were counted last."""
        self._estimated = 0
        """Tokens of text that the engine has not counted yet."""

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def first_token_seconds(self) -> float | None:
        return None if self._first_token is None else self._first_token - self._arrived

    def phases(self, now: float) -> list[Phase]:
        """Return what the request did so far, each with its seconds; the last one goes on while the request is open."""
        before, during = PHASES[type(self.task)]
        end = now if not self.ended else self._last_token if self._first_token is not None else self._ended_at
        if self._first_token is None:
            waited = end - self._arrived
            if self.queue_seconds is None:
                return [("wait", waited)]
            queued = min(waited, self.queue_seconds)
            return [("queue", queued), (before, waited - queued)]
        until_first = self._first_token - self._arrived
        queued = min(until_first, self.queue_seconds or 0.0)
        found: list[Phase] = [("queue", queued), (before, until_first - queued)]
        call = self._call_began
        found.append((during, (end if call is None else max(call, self._first_token)) - self._first_token))
        return found if call is None else [*found, ("tool", end - max(call, self._first_token))]

    def saw(self, output: Output) -> Output:
        """Count an output, and return it, the last one with the times of all."""
        if output.queue_seconds is not None:
            self.queue_seconds = output.queue_seconds
        if self._call_began is None and self._begins_call(output):
            self._call_began = time.perf_counter()
        if output.denoise_step:
            self._saw_step(output.denoise_step)
        if num_tokens := len(output.token_ids):
            now = time.perf_counter()
            if self._first_token is None:
                self._first_token = now
                self._metrics.time_to_first_token.observe(now - self._arrived)
            else:
                self._metrics.inter_token_latency.observe((now - self._last_token) / num_tokens, num_tokens)
            self.num_tokens += num_tokens
            self._num_told += num_tokens
            self._last_token = now
            if self._reservation is not None:
                self._reservation.use(num_tokens)
        elif self._is_sampled and self._num_told == 0:
            self._saw_text(output)
        if output.finish:
            if not self._is_sampled:
                self._saw_result(output)
            self.end(output.finish)
            return replace(output, timings=self.timings)
        return output

    def _begins_call(self, output: Output) -> bool:
        if isinstance(output, ParsedOutput):
            return any(isinstance(piece, CallStarted) for piece in output.pieces)
        if not self._call_marker or not output.text:
            return False
        text = self._text_end + output.text
        self._text_end = text[-len(self._call_marker) :]
        return self._call_marker in text

    def _saw_step(self, step: int) -> None:
        self._last_token = time.perf_counter()
        if not self.denoise_step:
            self._first_token = self._last_token
        self.denoise_step = step

    def _saw_text(self, output: Output) -> None:
        """Count the text of tokens whose ids are not told by the engine's usage, now or at the end."""
        now = time.perf_counter()
        if output.text or (isinstance(output, ParsedOutput) and output.pieces):
            self._last_token = now
            self._estimated += 1 + len(output.text) // CHARS_PER_TOKEN
            if self._first_token is None:
                self._first_token = self._counted_at = now
                self._metrics.time_to_first_token.observe(now - self._arrived)
        if not self.num_prompt_tokens and output.usage.prompt_tokens:
            self.num_prompt_tokens = output.usage.prompt_tokens
            if not self.is_sibling:
                self._use(self.num_prompt_tokens - self._cost.prompt)
        if (new := output.usage.completion_tokens - self.num_tokens) > 0:
            # Before the first token is no time between tokens.
            intervals = new if self.num_tokens else new - 1
            if intervals and self._first_token is not None:
                self._metrics.inter_token_latency.observe((now - self._counted_at) / intervals, intervals)
            self._counted_at = now
            self.num_tokens += new
            self._estimated = 0
            self._use(new)

    def _saw_result(self, output: Output) -> None:
        """Correct what a vector was taken to cost, or the steps of an image. A vector that failed costs nothing."""
        usage: Usage = output.usage
        if isinstance(self.task, GenerateImage):
            self.image_tokens = usage.completion_tokens
            self._use(usage.completion_tokens - self._cost.answer)
        elif output.embedding is not None:
            self.num_prompt_tokens = usage.prompt_tokens
            self._use(usage.prompt_tokens - self._cost.prompt)
        else:
            self._use(-self._cost.prompt)

    def _use(self, count: int) -> None:
        if self._reservation is not None:
            self._reservation.use(count)

    def end(self, reason: FinishReason) -> None:
        if self.ended:
            return
        self.finish = reason
        self._ended_at = time.perf_counter()
        self._use(self._estimated)
        metrics = self._metrics
        metrics.finished(self._model_name, reason, time.perf_counter() - self._arrived)
        metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.request_generation_tokens.observe(self.num_tokens)
        if (timings := self.timings) is not None:
            if timings.queue_seconds is not None:
                metrics.request_queue_time.observe(timings.queue_seconds)
                metrics.request_prefill_time.observe(timings.first_token_seconds - timings.queue_seconds)
            metrics.request_decode_time.observe(timings.total_seconds - timings.first_token_seconds)

    @property
    def timings(self) -> Timings | None:
        """The times of an answer that has a token."""
        if self._first_token is None or not self._is_sampled:
            return None
        return Timings(
            queue_seconds=self.queue_seconds,
            first_token_seconds=self._first_token - self._arrived,
            total_seconds=self._last_token - self._arrived,
            tokens=self.num_tokens,
        )


def _num_prompt_tokens(request: GenerationRequest) -> int:
    """Count what is computed before there is an answer, as far as is known on this side."""
    count = num_tokens(request.prompt)
    return count + len(request.task.params.negative_token_ids) if isinstance(request.task, GenerateImage) else count


def _estimated_tokens(prompt: Prompt) -> int:
    """Estimate how many tokens a prompt has that an engine elsewhere counts."""
    match prompt:
        case str():
            return 1 + len(prompt) // CHARS_PER_TOKEN
        case Conversation():
            return 1 + len(msgspec.json.encode(prompt.messages)) // CHARS_PER_TOKEN
        case _:
            return len(prompt)
