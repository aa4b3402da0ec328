"""POST /v1/chat/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec

from weft.frontend.answers import (
    SYSTEM_FINGERPRINT,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Output,
    usage_body,
)
from weft.frontend.body import parse
from weft.frontend.exchange import Order
from weft.frontend.gate import Service
from weft.frontend.logprobs import chat_logprobs
from weft.frontend.schemas import ChatRequest
from weft.frontend.sse import ChunkFrame, ChunkHead
from weft.frontend.translate import chat_job
from weft.text.tokenizer import Tokenizer
from weft.types import Delta, TokenLogprob, Usage


async def chat_door(body: bytes, service: Service) -> Order:
    request = await parse(ChatRequest, body)
    service.check_model(request.model)
    job = await chat_job(request, service.engine)
    answer_id = f"chatcmpl-{request.request_id or uuid.uuid4().hex}"
    return Order(job, ChatWriter(answer_id, service.model_name, service.engine.tokenizer, job.include_usage))


class ChatWriter:
    """Writes one answer. A chat has one prompt, so the index of a delta is always 0."""

    def __init__(self, answer_id: str, model_name: str, tokenizer: Tokenizer, include_usage: bool) -> None:
        self.answer_id = answer_id
        self._tokenizer = tokenizer
        self._head = ChunkHead(
            id=answer_id,
            object="chat.completion.chunk",
            created=int(time.time()),
            model=model_name,
            system_fingerprint=SYSTEM_FINGERPRINT,
        )
        self._frame = ChunkFrame(self._head, include_usage=include_usage)
        self._before_delta = self._frame.before + b'{"index":0,"delta":'
        self._before_text = self._before_delta + b'{"content":'
        self._after_logprobs = b',"finish_reason":null}' + self._frame.after
        self._after_text = b'},"logprobs":null' + self._after_logprobs

    def opening(self) -> bytes:
        return self._before_delta + b'{"role":"assistant","content":"","refusal":null' + self._after_text

    def chunks(self, index: int, delta: Delta) -> bytes:
        chunks = b""
        if delta.logprobs:
            logprobs = msgspec.json.encode(self._logprobs(delta.token_ids, delta.logprobs))
            chunks = (
                self._before_text + msgspec.json.encode(delta.text) + b'},"logprobs":' + logprobs + self._after_logprobs
            )
        elif delta.text:
            chunks = self._before_text + msgspec.json.encode(delta.text) + self._after_text
        if delta.finish:
            chunks += self._before_delta + b'{},"logprobs":null,"finish_reason":"%b"}' % delta.finish.encode()
            chunks += self._frame.after
        return chunks

    def usage_chunk(self, usages: Sequence[Usage]) -> bytes:
        return self._frame.usage_chunk(usage_body(usages))

    def whole(self, outputs: Sequence[Output]) -> bytes:
        [output] = outputs
        choice = ChatChoice(
            index=0,
            message=ChatMessage(output.text),
            logprobs=self._logprobs(output.token_ids, output.logprobs) if output.logprobs else None,
            finish_reason=output.finish,
        )
        return msgspec.json.encode(
            ChatCompletion(
                id=self.answer_id,
                created=self._head.created,
                model=self._head.model,
                choices=[choice],
                usage=usage_body([output.usage]),
                system_fingerprint=SYSTEM_FINGERPRINT,
            )
        )

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
        return chat_logprobs(self._tokenizer, token_ids, logprobs)
