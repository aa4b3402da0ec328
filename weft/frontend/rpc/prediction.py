"""One prediction, from its request to its last response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

from weft.backends.contract import text_prompt
from weft.config import GrpcOptions
from weft.errors import InvalidRequest
from weft.frontend.gate import Seat
from weft.frontend.generation import Generation
from weft.frontend.guard import guarded, no_hang_up
from weft.frontend.job import Job
from weft.frontend.rpc.ai_service_pb2 import GenerationParameters, StreamPredictRequest, StreamPredictResponse
from weft.frontend.rpc.buffer import ChunkBuffer
from weft.frontend.service import Service
from weft.frontend.translate import LONG_PROMPT
from weft.types import Delta, SamplingParams

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
    def __init__(self, trace_id: str, seat: Seat, options: GrpcOptions, send: Send, arrived: float) -> None:
        self.num_tokens = 0
        self._begun = False
        self._trace_id = trace_id
        self._seat = seat
        self._send = send
        self._arrived = arrived
        self._first_token = arrived
        self._last_token = arrived
        self._num_responses = 0
        self._buffer = ChunkBuffer(options.grpc_buffer_size, options.grpc_flush_interval_ms / 1000)

    async def run(self, request: StreamPredictRequest) -> None:
        """Send the whole answer. Raises what is wrong with the request, and the error that the answer ends with,
        after the text that came before it."""
        service = await self._seat.choose(None if request.model_id in SERVED_MODEL else request.model_id)
        job = await job_of(request, service)
        # A client may send the same id twice; the engine must never see it twice.
        engine_id = f"rpc-{uuid.uuid4().hex}"
        self._seat.answer_id = self._trace_id
        generation = Generation(job, self._seat, engine_id, self._arrived)
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
            )
        )

    async def _generate(self, generation: Generation) -> None:
        try:
            with generation.counted():
                await guarded(
                    generation.run(self._take),
                    no_hang_up,
                    aborted=self._seat.aborted,
                    timeout_s=self._seat.service.options.request_timeout_s,
                )
        finally:
            self._buffer.end()

    def _take(self, _: int, delta: Delta) -> Awaitable[None] | None:
        if delta.token_ids or delta.text:
            self._last_token = time.perf_counter()
            if not self._begun:
                self._first_token = self._last_token
            self._begun = True
        # The tokens of text whose ids are not told are counted by the engine.
        self.num_tokens = max(self.num_tokens + len(delta.token_ids), delta.usage.completion_tokens)
        return self._buffer.put(delta.text) if delta.text else None

    async def _respond(self, response: StreamPredictResponse) -> None:
        response.trace_id = self._trace_id
        response.index = self._num_responses
        self._num_responses += 1
        await self._send(response)


async def job_of(request: StreamPredictRequest, service: Service) -> Job:
    """The request as the engine understands it; raises what is wrong with it."""
    model_name = service.model_name if request.model_id in SERVED_MODEL else request.model_id
    service.check_model(model_name)
    if not request.prompt:
        raise InvalidRequest("An empty prompt gives the model nothing to go on.", param="prompt")
    params = params_of(request.generation)
    if len(request.prompt) > LONG_PROMPT:
        prompt = await asyncio.to_thread(text_prompt, service.engine, request.prompt)
    else:
        prompt = text_prompt(service.engine, request.prompt)
    return Job(
        prompts=[prompt],
        params=params,
        priority=request.priority,
        adapter=service.adapter_for(model_name, request.adapter or None),
        model_name=model_name,
    )


def params_of(generation: GenerationParameters) -> SamplingParams:
    given = {ours: getattr(generation, theirs) for theirs, ours in PARAMETERS.items() if generation.HasField(theirs)}
    params = SamplingParams(**given)
    params.check()
    return params
