"""The routes of llama.cpp's server that are its own: completions in its shape, and what it tells of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from msgspec import Struct

from weft import __version__, logs
from weft.api.body import parse
from weft.api.error_responses import JsonResponse
from weft.api.handler import Handler, add_posts
from weft.api.llamacpp.llamacpp_completion import generation_settings, infill_endpoint, llama_completion_endpoint
from weft.api.llamacpp.llamacpp_schema import ApplyTemplateRequest, LlamaTokenizeRequest
from weft.api.openai.openai_schema import ChatRequest
from weft.api.openai.tokenize import TokenizeHandler, detokenize, tokenize_request
from weft.api.translate import offered, parse_chat, template_message, template_tools
from weft.backends.contract import max_encoded_tokens, tokens_of, tokens_unknown
from weft.errors import Unavailable
from weft.serving.admission import Admission, RequestContext
from weft.serving.served_model import ServedModel
from weft.types import Sample


class Templated(Struct, frozen=True):
    prompt: str


class InputTokens(Struct, frozen=True):
    input_tokens: int


class LlamaTokens(Struct, frozen=True):
    tokens: Sequence[int | dict[str, Any]]
    """Ids, or objects of an id and its piece of text."""


class LlamaText(Struct, frozen=True, kw_only=True):
    """A text by llama.cpp's name and by Weft's own."""

    content: str
    prompt: str


class LlamaSlot(Struct, frozen=True, kw_only=True):
    """A request that runs, or a place for one more."""

    id: int
    is_processing: bool
    n_ctx: int
    id_task: str = ""
    next_token: list[dict[str, Any]] = []


def add_llamacpp(app: FastAPI, admission: Admission) -> None:
    completion = partial(Handler, admission, llama_completion_endpoint)
    add_posts(
        app,
        {
            "/completion": completion,
            "/completions": completion,
            "/infill": partial(Handler, admission, infill_endpoint),
            "/apply-template": partial(TokenizeHandler, admission, apply_template),
            "/v1/chat/completions/input_tokens": partial(TokenizeHandler, admission, count_chat_tokens),
            "/tokenize": partial(TokenizeHandler, admission, llama_tokenize),
            "/detokenize": partial(TokenizeHandler, admission, llama_detokenize),
        },
    )

    @app.get("/props", include_in_schema=False)
    async def props(request: Request) -> Response:
        return JsonResponse(_props(_served(request, admission), admission))

    @app.get("/slots", include_in_schema=False)
    async def slots(request: Request) -> Response:
        all_slots = _slots(_served(request, admission), admission)
        if request.query_params.get("fail_on_no_slot") and not any(not slot.is_processing for slot in all_slots):
            raise Unavailable("All slots are in use.")
        return JsonResponse(all_slots)


async def apply_template(body: bytes, context: RequestContext) -> Templated:
    request = await parse(ApplyTemplateRequest, body, context)
    served = await context.choose_text(request.model)
    served.check_model(request.model or served.model_name)
    engine = served.engine

    def templated() -> str:
        return engine.text.encode_chat(
            [template_message(message) for message in request.messages],
            tools=template_tools(map(offered, request.tools)) or None,
            add_generation_prompt=request.add_generation_prompt,
            template_variables=request.chat_template_kwargs,
            max_tokens=max_encoded_tokens(engine),
        ).text

    return Templated(await asyncio.to_thread(templated))


async def count_chat_tokens(body: bytes, context: RequestContext) -> InputTokens:
    request = await parse(ChatRequest, body, context)
    served = await context.choose_text(request.model)
    served.check_model(request.model)
    if not served.engine.abilities.tokens:
        raise tokens_unknown(served.engine, "input_tokens")
    chat = await parse_chat(request, served, context.fields)
    return InputTokens(len(tokens_of(chat.prompt)))


async def llama_tokenize(body: bytes, context: RequestContext) -> Struct:
    """Tokenize `content` as llama.cpp does; a body without it is one of Weft's own."""
    request = await parse(LlamaTokenizeRequest, body, context)
    content = request.content
    if content is None:
        return await tokenize_request(request, context)
    served = await context.choose_text(request.model)
    served.check_model(request.model or served.model_name)
    most, tokenizer = max_encoded_tokens(served.engine), served.engine.text.tokenizer

    def tokenized() -> LlamaTokens:
        ids = tokenizer.encode(content, add_special_tokens=request.add_special, max_tokens=most)
        return LlamaTokens([{"id": i, "piece": tokenizer.token_text(i)} for i in ids] if request.with_pieces else ids)

    return await asyncio.to_thread(tokenized)


async def llama_detokenize(body: bytes, context: RequestContext) -> LlamaText:
    text = (await detokenize(body, context)).prompt
    return LlamaText(content=text, prompt=text)


def _served(request: Request, admission: Admission) -> ServedModel:
    """Return the model that is told of: the one in the query, or the default one. None is loaded for it."""
    admission.check_open()
    name = request.query_params.get("model", "")
    slot = admission.pool.find(name)
    if slot.served is None:
        raise Unavailable(f"The model {slot.name!r} is not loaded.")
    slot.served.check_model(name or slot.served.model_name)
    return slot.served


def _num_slots(served: ServedModel, admission: Admission) -> int:
    return admission.config.scheduler.num_seqs(on_cpu=served.engine.model.device == "cpu")


def _props(served: ServedModel, admission: Admission) -> dict[str, Any]:
    engine = served.engine
    text = engine.text
    usual = Sample(params=text.sampling_defaults.params())
    has_tokens = engine.abilities.tokens
    return {
        "default_generation_settings": {
            "id": 0,
            "is_processing": False,
            "n_ctx": engine.model.max_model_len,
            "params": generation_settings(usual, engine),
        },
        "total_slots": _num_slots(served, admission),
        "model_alias": served.model_name,
        # Where its files are is the operator's own matter.
        "model_path": served.model_name,
        "chat_template": text.styles.template,
        "bos_token": (text.tokenizer.bos_token or "") if has_tokens else "",
        "eos_token": (text.tokenizer.eos_token or "") if has_tokens else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"weft-{__version__}",
        "is_sleeping": False,
    }


def _slots(served: ServedModel, admission: Admission) -> list[LlamaSlot]:
    """List the requests of the client's own key that are inside, then the places for more."""
    num_ctx, tenant = served.engine.model.max_model_len, logs.tenant.get()
    inside = [context for context in admission.contexts() if context.chosen is served]
    own = [context for context in inside if context.tenant == tenant]
    busy = [
        LlamaSlot(
            id=number,
            is_processing=True,
            n_ctx=num_ctx,
            id_task=context.request_id,
            next_token=[{"has_next_token": True, "n_decoded": context.num_tokens}],
        )
        for number, context in enumerate(own)
    ]
    num_idle = max(0, _num_slots(served, admission) - len(inside))
    idle = [LlamaSlot(id=len(own) + number, is_processing=False, n_ctx=num_ctx) for number in range(num_idle)]
    return busy + idle
