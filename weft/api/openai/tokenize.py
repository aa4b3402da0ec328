"""POST /tokenize and POST /detokenize: text to token ids as the model sees it, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from weft.api.body import parse, read_body
from weft.api.error_responses import JsonResponse
from weft.api.openai.openai_answers import Detokenized, Tokenized
from weft.api.openai.openai_schema import DetokenizeRequest, TokenizeRequest
from weft.api.translate import template_message, template_tools
from weft.errors import InvalidRequest
from weft.serving.admission import Admission, RequestContext
from weft.serving.guard import ClientGone
from weft.types import check_token_ids

Asked = Callable[[bytes, RequestContext], Awaitable[Struct]]


class TokenizeHandler(Response):
    """A response that reads its own body, and is answered in one piece without the engine."""

    def __init__(self, gate: Admission, asked: Asked) -> None:
        super().__init__()
        self._gate = gate
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._gate.admit(receive) as seat:
            try:
                body = await read_body(scope, receive, self._gate.config.server.max_body_mb << 20)
                answer = await self._asked(body, seat)
            except ClientGone:
                return
        response = JsonResponse(answer)
        await response(scope, receive, send)


async def tokenize(body: bytes, seat: RequestContext) -> Tokenized:
    request = await parse(TokenizeRequest, body, seat.config.limits)
    service = await seat.choose(request.model)
    service.check_model(request.model or service.model_name)
    engine = service.engine
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Give either a prompt or messages.", param="prompt")

    def encoded() -> list[int]:
        if request.prompt is not None:
            return engine.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        return engine.encode_chat(
            [template_message(message) for message in request.messages or ()],
            tools=template_tools(request.tools) or None,
            add_generation_prompt=request.add_generation_prompt,
            template_variables=request.chat_template_kwargs,
        ).token_ids

    tokens = await asyncio.to_thread(encoded)
    return Tokenized(
        count=len(tokens),
        max_model_len=engine.model.max_model_len,
        tokens=tokens,
        token_strs=[engine.tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None,
    )


async def detokenize(body: bytes, seat: RequestContext) -> Detokenized:
    request = await parse(DetokenizeRequest, body, seat.config.limits)
    service = await seat.choose(request.model)
    service.check_model(request.model or service.model_name)
    tokenizer = service.engine.tokenizer
    check_token_ids(request.tokens, service.engine.model.logits_width, "tokens")
    text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
    return Detokenized(prompt=text)
