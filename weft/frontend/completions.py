"""POST /v1/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec

from weft.frontend.answers import (
    SYSTEM_FINGERPRINT,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Output,
    usage_body,
)
from weft.frontend.body import parse
from weft.frontend.exchange import Order
from weft.frontend.gate import Service
from weft.frontend.logprobs import completion_logprobs
from weft.frontend.schemas import CompletionRequest
from weft.frontend.sse import ChunkFrame, ChunkHead
from weft.frontend.translate import completion_job
from weft.text.tokenizer import Tokenizer
from weft.types import Delta, Usage


async def completion_door(body: bytes, service: Service) -> Order:
    request = await parse(CompletionRequest, body)
    service.check_model(request.model)
    job = await completion_job(request, service.engine)
    answer_id = f"cmpl-{request.request_id or uuid.uuid4().hex}"
    writer = CompletionWriter(
        answer_id, service.model_name, service.engine.tokenizer, job.include_usage, len(job.prompts)
    )
    return Order(job, writer)


class CompletionWriter:
    """Writes one answer, with a choice for every prompt."""

    def __init__(
        self, answer_id: str, model_name: str, tokenizer: Tokenizer, include_usage: bool, num_prompts: int
    ) -> None:
        self.answer_id = answer_id
        self._tokenizer = tokenizer
        self._head = ChunkHead(
            id=answer_id,
            object="text_completion",
            created=int(time.time()),
            model=model_name,
            system_fingerprint=SYSTEM_FINGERPRINT,
        )
        self._frame = ChunkFrame(self._head, include_usage=include_usage)
        self._before_text = [self._frame.before + b'{"index":%d,"text":' % index for index in range(num_prompts)]
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._frame.after
        self._text_offsets = [0] * num_prompts

    def opening(self) -> bytes:
        return b""

    def chunks(self, index: int, delta: Delta) -> bytes:
        chunk = self._before_text[index] + msgspec.json.encode(delta.text)
        if not (delta.logprobs or delta.finish):
            return chunk + self._after_text if delta.text else b""
        logprobs: CompletionLogprobs | None = None
        if delta.logprobs:
            logprobs, self._text_offsets[index] = completion_logprobs(
                self._tokenizer, delta.token_ids, delta.logprobs, self._text_offsets[index]
            )
        chunk += b',"logprobs":' + msgspec.json.encode(logprobs)
        return chunk + b',"finish_reason":' + msgspec.json.encode(delta.finish) + b"}" + self._frame.after

    def usage_chunk(self, usages: Sequence[Usage]) -> bytes:
        return self._frame.usage_chunk(usage_body(usages))

    def whole(self, outputs: Sequence[Output]) -> bytes:
        return msgspec.json.encode(
            Completion(
                id=self.answer_id,
                created=self._head.created,
                model=self._head.model,
                choices=[self._choice(index, output) for index, output in enumerate(outputs)],
                usage=usage_body(output.usage for output in outputs),
                system_fingerprint=SYSTEM_FINGERPRINT,
            )
        )

    def _choice(self, index: int, output: Output) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None
        if output.logprobs:
            logprobs, _ = completion_logprobs(self._tokenizer, output.token_ids, output.logprobs, 0)
        return CompletionChoice(index=index, text=output.text, logprobs=logprobs, finish_reason=output.finish)
