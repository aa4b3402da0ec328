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
from weft.serving.admission import Admission, ClientGone, RequestContext
from weft.types import check_token_ids

Asked = Callable[[bytes, RequestContext], Awaitable[Struct]]


class TokenizeHandler(Response):
    """A response that reads its own body, and is answered in one piece without the engine."""

    def __init__(self, admission: Admission, asked: Asked) -> None:
        super().__init__()
        self._admission = admission
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._admission.admit(receive) as context:
            try:
                body = await read_body(scope, receive, self._admission.config.server.max_body_mb << 20)
                answer = await self._asked(body, context)
            except ClientGone:
                return
        response = JsonResponse(answer)
        await response(scope, receive, send)


async def tokenize(body: bytes, context: RequestContext) -> Tokenized:
    request = await parse(TokenizeRequest, body, context.config.limits)
    served = await context.choose(request.model)
    served.check_model(request.model or served.model_name)
    engine = served.engine
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Give either a prompt or messages.", param="prompt")

    def encoded() -> list[int]:
        if request.prompt is not None:
            return engine.text.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        return engine.text.encode_chat(
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
        token_strs=[engine.text.tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None,
    )


async def detokenize(body: bytes, context: RequestContext) -> Detokenized:
    request = await parse(DetokenizeRequest, body, context.config.limits)
    served = await context.choose(request.model)
    served.check_model(request.model or served.model_name)
    tokenizer = served.engine.text.tokenizer
    check_token_ids(request.tokens, served.engine.model.logits_width, "tokens")
    text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
    return Detokenized(prompt=text)
