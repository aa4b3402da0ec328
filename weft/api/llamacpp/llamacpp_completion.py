"""POST /completion and POST /infill"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from weft.api.body import LONG_BODY_BYTES, checked, off_loop, parse
from weft.api.error_responses import error_body
from weft.api.handler import Writer
from weft.api.llamacpp.llamacpp_schema import (
    InfillRequest,
    LlamaAnswer,
    LlamaCompletionRequest,
    LlamaPrompt,
    LlamaSampling,
    completion_fields,
    llama_timings,
    num_predict,
)
from weft.api.openai.logprobs import LOWEST, MANY_FIGURES, num_figures
from weft.api.openai.openai_answers import encoded_list
from weft.api.openai.openai_schema import CompletionRequest
from weft.api.translate import ParsedRequest, parse_completion
from weft.backends.contract import Engine, max_encoded_tokens, num_tokens, tokens_of, tokens_unknown
from weft.errors import InvalidRequest, WeftError
from weft.serving.admission import RequestContext
from weft.serving.output_reader import CollectedOutput
from weft.serving.request import unique_id
from weft.serving.served_model import ServedModel
from weft.text.fill_in_middle import fim_prompt
from weft.text.tokenizer import Tokenizer
from weft.types import FinishReason, GenerationRequest, Output, Sample, TokenLogprob, Usage

MAX_BIAS_CHARS = 4096
"""Characters of all texts of a logit_bias."""
NO_SLOT = -1
"""The scheduler gives requests no slots of their own."""


async def llama_completion_endpoint(
    body: bytes, context: RequestContext
) -> tuple[Sequence[GenerationRequest], LlamaWriter]:
    request = await parse(LlamaCompletionRequest, body, context)
    served = await _chosen(context, request)
    prompts = request.prompt
    if any(isinstance(prompt, list) and not _is_ids(prompt) for prompt in prompts):
        prompts = await asyncio.to_thread(_joined, prompts, served.engine)
    return await _completion(request, prompts, served, context, is_long=len(body) > LONG_BODY_BYTES)


async def infill_endpoint(body: bytes, context: RequestContext) -> tuple[Sequence[GenerationRequest], LlamaWriter]:
    request = await parse(InfillRequest, body, context)
    served = await _chosen(context, request)
    engine = served.engine
    if not engine.abilities.tokens:
        raise tokens_unknown(engine, "/infill")

    def prompt() -> list[int]:
        return fim_prompt(
            engine.text.tokenizer,
            request.input_prefix,
            request.input_suffix,
            begun=request.prompt,
            files=[(file.filename, file.text) for file in request.input_extra],
            max_tokens=max_encoded_tokens(engine),
            param="input_suffix",
        )

    prompts: list[LlamaPrompt] = [await asyncio.to_thread(prompt)]
    return await _completion(request, prompts, served, context, is_long=len(body) > LONG_BODY_BYTES)


async def _chosen(context: RequestContext, request: LlamaSampling) -> ServedModel:
    served = await context.choose(request.model)
    served.check_model(request.model or served.model_name)
    return served


async def _completion(
    request: LlamaSampling,
    prompts: Sequence[LlamaPrompt],
    served: ServedModel,
    context: RequestContext,
    *,
    is_long: bool,
) -> tuple[Sequence[GenerationRequest], LlamaWriter]:
    answer_id = f"llama-{uuid.uuid4().hex}"
    fields = {
        **completion_fields(request),
        "model": request.model or served.model_name,
        "prompt": prompts[0] if len(prompts) == 1 else prompts,
        "logit_bias": await off_loop(bool(request.logit_bias), _biases, request, served.engine),
    }
    asked = await off_loop(is_long, checked, CompletionRequest, fields, context.config.limits)
    ids: dict[str, Any] = {"request_id": unique_id(answer_id), "tenant": context.tenant}
    completion = await parse_completion(asked, served, context.fields, to_the_end=num_predict(request) < 0, **ids)
    context.fields.rename("llamacpp", {"max_tokens": "n_predict"})
    return completion.requests, LlamaWriter(answer_id, request, completion, served)


def _is_ids(prompt: list[Any]) -> bool:
    return all(type(item) is int for item in prompt)


def _joined(prompts: Sequence[LlamaPrompt], engine: Engine) -> list[LlamaPrompt]:
    """Return the prompts, those of ids and texts as ids alone."""
    if not engine.abilities.tokens:
        raise tokens_unknown(engine, "Token ids beside text", "prompt")
    most, encode = max_encoded_tokens(engine), engine.text.tokenizer.encode
    joined: list[LlamaPrompt] = []
    for prompt in prompts:
        engine.text.tokenizer.check_chars(sum(len(part) for part in prompt if isinstance(part, str)), most)
        ids: list[int] = []
        for number, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
            # What frames a text comes where it begins, and nowhere else.
            ids += [part] if isinstance(part, int) else encode(part, add_special_tokens=not number, max_tokens=most)
        joined.append(ids)
    return joined


def _biases(request: LlamaSampling, engine: Engine) -> dict[str, float]:
    if sum(len(key) for key, _ in request.logit_bias if isinstance(key, str)) > MAX_BIAS_CHARS:
        raise InvalidRequest(f"logit_bias has texts of more than {MAX_BIAS_CHARS} characters.", param="logit_bias")
    biases: dict[str, float] = {}
    for key, bias in request.logit_bias:
        ids: Sequence[int | str] = [key]
        if isinstance(key, str) and not key.isdigit():
            ids = engine.text.tokenizer.encode(key, add_special_tokens=False, max_tokens=MAX_BIAS_CHARS)
        biases |= {str(token_id): bias for token_id in ids}
    return biases


class LlamaWriter(Writer):
    """Writes one answer, or a list of them where there are several prompts."""

    def __init__(self, answer_id: str, request: LlamaSampling, completion: ParsedRequest, served: ServedModel) -> None:
        super().__init__(answer_id, request.model or served.model_name, stream=request.stream)
        self._request = request
        self._requests = completion.requests
        self._engine = served.engine
        self._is_shown = num_predict(request) != 0
        """False: the one token that the engine must make is not shown."""
        self._num_tokens = [0 for _ in completion.requests]
        self._has_new_line = [False for _ in completion.requests]

    def chunks(self, index: int, output: Output) -> bytes | Awaitable[bytes]:
        if output.finish or num_figures(output) > MANY_FIGURES:
            return asyncio.to_thread(self._chunk, index, output)
        return self._chunk(index, output) if output.text or output.token_ids else b""

    def _chunk(self, index: int, output: Output) -> bytes:
        self._num_tokens[index] += len(output.token_ids)
        so_far = Usage(
            prompt_tokens=num_tokens(self._requests[index].prompt), completion_tokens=self._num_tokens[index]
        )
        figures = self._figures(output.token_ids, output.logprobs)
        usage = output.usage if output.finish else so_far
        answer = self._answer(index, output, usage, completion_probabilities=figures)
        return b"data: " + msgspec.json.encode(answer) + b"\n\n"

    def failure(self, error: WeftError) -> bytes:
        return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"

    async def whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        return await asyncio.to_thread(self._whole, outputs)

    def _whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        answers = [
            self._answer(
                index, output, output.usage, completion_probabilities=self._figures(output.token_ids, output.logprobs)
            )
            for index, output in enumerate(outputs)
        ]
        return msgspec.json.encode(answers[0] if len(answers) == 1 else answers)

    def _answer(self, index: int, output: Output | CollectedOutput, usage: Usage, **figures: Any) -> LlamaAnswer:
        text = output.text if self._is_shown else ""
        self._has_new_line[index] |= "\n" in text
        fields: dict[str, Any] = figures
        if output.finish:
            stop_type, word = _stop(output.finish, output.stop_reason)
            request = self._requests[index]
            fields |= {
                "model": self.model_name,
                "generation_settings": self._settings(request),
                "prompt": self._prompt(request),
                "has_new_line": self._has_new_line[index],
                "truncated": False,
                "stop_type": stop_type,
                "stopping_word": word,
                "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
                "timings": llama_timings(usage, output.timings),
            }
        return LlamaAnswer(
            index=index,
            content=text,
            tokens=[*output.token_ids] if self._shows_tokens and self._is_shown else [],
            id_slot=NO_SLOT,
            stop=bool(output.finish),
            tokens_predicted=usage.completion_tokens if self._is_shown else 0,
            tokens_evaluated=usage.prompt_tokens,
            **fields,
        )

    @property
    def _shows_tokens(self) -> bool:
        return self._request.return_tokens or self._request.stream

    def _prompt(self, request: GenerationRequest) -> str:
        if isinstance(request.prompt, str):
            return request.prompt
        return self._engine.text.tokenizer.decode(tokens_of(request.prompt), skip_special_tokens=False)

    def _settings(self, request: GenerationRequest) -> dict[str, Any]:
        assert isinstance(request.task, Sample)
        return generation_settings(request.task, self._engine) | {"stream": self._request.stream}

    def _figures(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Any:
        if not logprobs or not self._is_shown:
            return UNSET
        tokenizer = self._engine.text.tokenizer
        entries = (
            _entry(tokenizer, token_id, figure.logprob)
            | {"top_logprobs": [_entry(tokenizer, *top) for top in figure.top]}
            for token_id, figure in zip(token_ids, logprobs, strict=True)
        )
        return encoded_list(entries)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "id": token_id,
        "token": tokenizer.token_text(token_id),
        "bytes": [*tokenizer.token_bytes(token_id)],
        "logprob": max(logprob, LOWEST),
    }


def generation_settings(task: Sample, engine: Engine) -> dict[str, Any]:
    """Return the settings of an answer by llama.cpp's names."""
    params = task.params
    return {
        "n_ctx": engine.model.max_model_len,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
    }


def _stop(finish: FinishReason, matched: str | int | None) -> tuple[str, str]:
    """Return why an answer ended, and the text that ended it."""
    if finish is FinishReason.LENGTH:
        return "limit", ""
    return ("word", matched) if isinstance(matched, str) else ("eos", "")
