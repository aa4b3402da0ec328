"""POST /tokenize and POST /detokenize: text to token ids as the model sees it, and back; GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Response
from msgspec import Struct
from pydantic import Field
from starlette.types import Receive, Scope, Send

from weft.api.body import Fields, parse, read_body
from weft.api.error_responses import JsonResponse
from weft.api.handler import fields_header
from weft.api.openai.openai_schema import Items, Message, Name, Tool
from weft.api.translate import offered, template_message, template_tools
from weft.backends.contract import max_encoded_tokens
from weft.errors import InvalidRequest
from weft.serving.admission import Admission, ClientGone, RequestContext
from weft.types import check_token_ids


class TokenizeRequest(Fields):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = Field(True, description="Of a prompt; a chat template brings its own.")
    tools: Items[Tool] = Field([])
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the model's chat template.")
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """POST /detokenize"""

    model: Name | None = None
    tokens: Items[int]


class Tokenized(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    prompt: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """The fields of a tokenizer_config.json."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class TokenizeHandler(Response):
    """A response that reads its own body and is answered in one piece, by the text side of the model alone."""

    def __init__(self, admission: Admission, answer: Callable[[bytes, RequestContext], Awaitable[Struct]]) -> None:
        super().__init__()
        self._admission = admission
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._admission.admit(receive) as context:
            try:
                limit_bytes = self._admission.config.server.max_body_mb << 20
                body = await read_body(scope, receive, limit_bytes, context.hold_body)
                answer = await self._answer(body, context)
            except ClientGone:
                return
        response = JsonResponse(answer, headers=fields_header(context))
        await response(scope, receive, send)


async def tokenize(body: bytes, context: RequestContext) -> Tokenized:
    return await tokenize_request(await parse(TokenizeRequest, body, context), context)


async def tokenize_request(request: TokenizeRequest, context: RequestContext) -> Tokenized:
    served = await context.choose_text(request.model)
    served.check_model(request.model or served.model_name)
    engine = served.engine
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Give either a prompt or messages.", param="prompt")

    most = max_encoded_tokens(engine)

    def tokenized() -> Tokenized:
        tokenizer = engine.text.tokenizer
        if request.prompt is not None:
            tokens = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens, max_tokens=most)
        else:
            tokens = engine.text.encode_chat(
                [template_message(message) for message in request.messages or ()],
                tools=template_tools(map(offered, request.tools)) or None,
                add_generation_prompt=request.add_generation_prompt,
                template_variables=request.chat_template_kwargs,
                max_tokens=most,
            ).token_ids
        return Tokenized(
            count=len(tokens),
            max_model_len=engine.model.max_model_len,
            tokens=tokens,
            token_strs=[*map(tokenizer.token_text, tokens)] if request.return_token_strs else None,
        )

    return await asyncio.to_thread(tokenized)


async def detokenize(body: bytes, context: RequestContext) -> Detokenized:
    request = await parse(DetokenizeRequest, body, context)
    served = await context.choose_text(request.model)
    served.check_model(request.model or served.model_name)
    engine = served.engine
    tokenizer = engine.text.tokenizer

    def detokenized() -> str:
        check_token_ids(request.tokens, engine.model.logits_width, "tokens")
        return tokenizer.decode(request.tokens, skip_special_tokens=False)

    return Detokenized(prompt=await asyncio.to_thread(detokenized))


async def tokenizer_info(model: str | None, context: RequestContext) -> TokenizerInfo:
    """Tell of the tokenizer of a model; None: the default one."""
    served = await context.choose_text(model)
    served.check_model(model or served.model_name)
    engine = served.engine
    tokenizer = engine.text.tokenizer
    return TokenizerInfo(
        model_max_length=engine.model.max_model_len,
        vocab_size=tokenizer.vocab_size,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=engine.text.styles.template or None,
    )
