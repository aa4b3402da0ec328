"""The one place where a parsed request becomes prompts in tokens and sampling parameters."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from weft.backends.contract import Engine
from weft.errors import InvalidRequest
from weft.frontend.schemas import ChatRequest, CompletionRequest, GenerationRequest, Message
from weft.types import SamplingParams, check_token_ids

LONG_PROMPT = 2000
"""Characters, or token ids. Above this prompts are encoded in a thread: the streams of others go on meanwhile."""


class Job(Struct, frozen=True, kw_only=True):
    """What the engine is asked for: each prompt gives one choice of the answer."""

    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str
    stream: bool
    include_usage: bool


async def chat_job(request: ChatRequest, engine: Engine) -> Job:
    logprobs = request.top_logprobs or 0 if request.logprobs else None
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    params = _params(request, max_tokens=_chat_max_tokens(request), logprobs=logprobs, engine=engine)
    # The template is rendered by another process, and its answer waited for.
    chat = await asyncio.to_thread(
        engine.encode_chat,
        [template_message(message) for message in request.messages],
        add_generation_prompt=request.add_generation_prompt,
        template_variables=request.chat_template_kwargs,
    )
    return _job(request, [chat.token_ids], params)


async def completion_job(request: CompletionRequest, engine: Engine) -> Job:
    params = _params(request, max_tokens=request.max_tokens, logprobs=request.logprobs, engine=engine)
    if sum(map(len, request.prompt)) > LONG_PROMPT:
        prompts = await asyncio.to_thread(_encode_prompts, request.prompt, engine)
    else:
        prompts = _encode_prompts(request.prompt, engine)
    if not all(prompts):
        raise InvalidRequest("An empty prompt gives the model nothing to go on.", param="prompt")
    return _job(request, prompts, params)


def _encode_prompts(prompts: list[str | list[int]], engine: Engine) -> list[list[int]]:
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, list):
            check_token_ids(prompt, engine.model.logits_width, "prompt")
            encoded.append(prompt)
        else:
            encoded.append(engine.tokenizer.encode(prompt))
    return encoded


def _job(request: GenerationRequest, prompts: list[list[int]], params: SamplingParams) -> Job:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    return Job(
        prompts=prompts,
        params=params,
        cache_salt=request.cache_salt,
        stream=request.stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def _params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, engine: Engine
) -> SamplingParams:
    params = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias={_token_id(key): bias for key, bias in request.logit_bias.items()},
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=request.stop,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
    )
    params.check()
    params.check_token_ids(engine.model.logits_width)
    return params


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same.", param="max_tokens"
        )
    return old if new is None else new


def template_message(message: Message) -> dict[str, Any]:
    # Chat templates know the developer by the older name.
    fields: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
    }
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise InvalidRequest(f"logit_bias has the key {key!r:.40}; keys are token ids.", param="logit_bias")
    return int(key)
