"""One prediction, from its request to its last response."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from weft.api.body import off_loop
from weft.api.field_rules import RULES
from weft.api.grpc.ai_service_pb2 import (
    ClientTensor,
    GenerationParameters,
    PromptSegment,
    StreamPredictRequest,
    StreamPredictResponse,
)
from weft.api.translate import LONG_PROMPT, given_tokens, within_context
from weft.backends.contract import max_encoded_tokens, text_prompt, tokens_unknown
from weft.errors import ContextTooLong, InvalidRequest
from weft.options import GrpcOptions
from weft.payloads import MAX_DIMENSIONS, PromptEmbeds, check_count
from weft.serving.admission import RequestContext
from weft.serving.generation import Generation
from weft.serving.request import FieldReport, PromptPart, check_embeds_taken, mixed_prompt, requests_like
from weft.serving.served_model import ServedModel
from weft.types import GenerationRequest, Output, Prompt, Sample, SamplingDefaults, SamplingParams, check_cache_salt

GAP_WEIGHT = 0.25
"""The weight of the newest gap between two chunks in the usual one."""
PATIENCE_GAPS = 2.5
"""A chunk of a slow answer waits for so many usual gaps, in which two more come."""


class ChunkBuffer:
    """The first chunk leaves at once. Later ones leave together: when `size` of them are held, when the oldest has
    waited for `interval_s`, or at the end. Where chunks come more slowly than that, the oldest waits for the next two
    all the same, but no longer than `slowest_s`. One task puts, and one iterates over the texts to send.
    """

    def __init__(self, size: int, interval_s: float, slowest_s: float) -> None:
        self._size = size
        self._interval_s = interval_s
        self._slowest_s = slowest_s
        self._last_put: float | None = None
        self._usual_gap_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._held: list[str] = []
        self._due = 0.0
        """When the oldest held chunk must leave, by the event loop's clock."""
        self._begun = False
        self._ended = False
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._drained: asyncio.Future[None] = self._loop.create_future()

    def put(self, chunk: str) -> asyncio.Future[None] | None:
        """Return what to await before the next chunk where the buffer is full: a slow reader holds up nothing but its
        own answer."""
        now = self._loop.time()
        if self._last_put is not None:
            gap = now - self._last_put
            self._usual_gap_s += GAP_WEIGHT * (gap - self._usual_gap_s) if self._usual_gap_s else gap
        self._last_put = now
        if not self._held:
            self._due = now + max(self._interval_s, min(self._slowest_s, PATIENCE_GAPS * self._usual_gap_s))
        self._held.append(chunk)
        self._some.set()
        if len(self._held) < self._size:
            return None
        self._enough.set()
        self._drained = self._loop.create_future()
        return self._drained

    def end(self) -> None:
        """Take note that no more chunks will come."""
        self._ended = True
        self._some.set()
        self._enough.set()

    def __aiter__(self) -> ChunkBuffer:
        return self

    async def __anext__(self) -> str:
        await self._some.wait()
        if self._begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._due):
                    await self._enough.wait()
        if not self._held:
            raise StopAsyncIteration
        self._begun = True
        text = "".join(self._held)
        self._held.clear()
        if not self._drained.done():
            self._drained.set_result(None)
        if not self._ended:
            self._some.clear()
            self._enough.clear()
        return text


Send = Callable[[StreamPredictResponse], Awaitable[None]]

SERVED_MODEL = frozenset({"", "default"})
"""Names that stand for whatever model is served."""

PARAMETERS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
}


class Prediction:
    def __init__(
        self, trace_id: str, context: RequestContext, options: GrpcOptions, send: Send, arrived: float
    ) -> None:
        self.num_tokens = 0
        self._num_prompt_tokens = 0
        self._begun = False
        self._trace_id = trace_id
        self._context = context
        self._send = send
        self._arrived = arrived
        self._first_token = arrived
        self._last_token = arrived
        self._num_responses = 0
        self._buffer = ChunkBuffer(
            options.grpc_buffer_size, options.grpc_flush_interval_ms / 1000, options.grpc_slowest_flush_ms / 1000
        )

    async def run(self, request: StreamPredictRequest) -> None:
        """Send the whole answer. Raises what is wrong with the request, and the error that the answer ends with,
        after the text that came before it."""
        served = await self._context.choose(None if request.model_id in SERVED_MODEL else request.model_id)
        model_name = served.model_name if request.model_id in SERVED_MODEL else request.model_id
        report = self._context.fields
        requests = await parse_prediction(request, served, model_name, report, tenant=self._context.tenant)
        self._context.answer_id = self._trace_id
        generation = Generation(requests, self._context, self._arrived, model_name)
        served.metrics.left_aside(report.without_effect)
        generating = asyncio.create_task(self._generate(generation))
        try:
            async for text in self._buffer:
                await self._respond(StreamPredictResponse(chunk=text))
            await generating
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)
        await self._respond(
            StreamPredictResponse(
                end_of_stream=True,
                ttft_ms=1000 * (self._first_token - self._arrived),
                tokens_per_sec=self.num_tokens / (self._last_token - self._arrived) if self.num_tokens else 0,
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=self.num_tokens,
                fields_without_effect=report.names,
            )
        )

    async def _generate(self, generation: Generation) -> None:
        try:
            with generation.counted():
                await self._context.guard(generation.run(self._take))
        finally:
            self._buffer.end()

    def _take(self, _: int, output: Output) -> Awaitable[None] | None:
        if output.token_ids or output.text:
            self._last_token = time.perf_counter()
            if not self._begun:
                self._first_token = self._last_token
            self._begun = True
        # The tokens of text whose ids are not told are counted by the engine.
        self.num_tokens = max(self.num_tokens + len(output.token_ids), output.usage.completion_tokens)
        self._num_prompt_tokens = max(self._num_prompt_tokens, output.usage.prompt_tokens)
        return self._buffer.put(output.text) if output.text else None

    async def _respond(self, response: StreamPredictResponse) -> None:
        response.trace_id = self._trace_id
        response.index = self._num_responses
        self._num_responses += 1
        await self._send(response)


async def parse_prediction(
    request: StreamPredictRequest, served: ServedModel, model_name: str, report: FieldReport, *, tenant: str
) -> list[GenerationRequest]:
    """Turn a prediction into the request to the engine; raises what is wrong with it. The report tells what of it
    changes nothing."""
    served.check_model(model_name)
    for field, _ in request.metadata.ListFields():
        if (rule := RULES["grpc.metadata"].get(field.name)) is not None:
            report.ignore("grpc", f"metadata.{field.name}", rule.why)
    if not request.prompt and not request.segments:
        raise InvalidRequest("An empty prompt gives the model nothing to go on.", param="prompt")
    check_cache_salt(request.cache_salt)
    task = Sample(params=params_of(request.generation, served.engine.text.sampling_defaults))
    prompt: Prompt
    if request.segments:
        if request.prompt:
            raise InvalidRequest("segments: there is a prompt already.", param="segments")
        prompt = await asyncio.to_thread(_prompt_of, request.segments, served)
    else:
        prompt = await off_loop(len(request.prompt) > LONG_PROMPT, text_prompt, served.engine, request.prompt)
    common = GenerationRequest(
        prompt=prompt,
        task=task,
        # A client may send the same id twice; the engine must never see it twice.
        request_id=f"rpc-{uuid.uuid4().hex}",
        cache_salt=request.cache_salt,
        session=request.worker_hint,
        priority=request.priority,
        tenant=tenant,
        adapter=served.adapter_for(model_name, request.adapter or None),
    )
    requests = [within_context(one, task.params, served, report) for one in requests_like(common, [prompt])]
    report.rename("grpc", {"max_tokens": "generation.max_new_tokens"})
    return requests


def _prompt_of(segments: Sequence[PromptSegment], served: ServedModel) -> Prompt:
    engine = served.engine
    if not engine.abilities.tokens:
        raise tokens_unknown(engine, "A prompt in segments", "segments")
    parts: list[PromptPart] = []
    most = left = max_encoded_tokens(engine)
    """Tokens that may still come: the segments are bounded together, as one text is."""
    for number, segment in enumerate(segments):
        field = f"segments[{number}]"
        match segment.WhichOneof("form"):
            case "text":
                ids = engine.text.tokenizer.encode(segment.text, add_special_tokens=False, max_tokens=left)
                left -= len(ids)
                parts.append(ids)
            case "token_ids":
                left -= len(segment.token_ids.ids)
                if left >= 0:
                    parts.append(given_tokens([*segment.token_ids.ids], engine, field))
            case "prompt_embeds":
                check_embeds_taken(engine, served.limits, field := f"{field}.prompt_embeds")
                parts.append((field, PromptEmbeds(**tensor_parts(segment.prompt_embeds, field))))
            case _:
                raise InvalidRequest(f"{field}: it is empty.", param=field)
        if left < 0:
            raise ContextTooLong(
                f"The segments up to {field} have more than {most} tokens.",
                hint="Shorten the prompt, or serve with a larger --max-model-len.",
                param=field,
            )
    if any(isinstance(part, tuple) for part in parts):
        return mixed_prompt(parts, engine)
    return [token for part in parts for token in part if isinstance(token, int)]


def tensor_parts(tensor: ClientTensor, field: str) -> dict[str, Any]:
    """Return the fields of a `payloads.Tensor`, not checked."""
    check_count(f"{field}.shape", "dimensions", len(tensor.shape), MAX_DIMENSIONS)
    return {
        "data": memoryview(tensor.data),
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "sha256": tensor.sha256,
    }


def params_of(generation: GenerationParameters, usual: SamplingDefaults) -> SamplingParams:
    given = {ours: getattr(generation, theirs) for theirs, ours in PARAMETERS.items() if generation.HasField(theirs)}
    params = replace(usual.params(), **given)
    params.check()
    return params
