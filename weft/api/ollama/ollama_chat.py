"""POST /api/chat and POST /api/generate"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from weft.api.anthropic.messages_schema import call_arguments
from weft.api.body import LONG_BODY_BYTES, checked, off_loop, parse
from weft.api.error_responses import error_body
from weft.api.handler import NDJSON_HEADERS, Writer
from weft.api.ollama.ollama_schema import (
    LATEST,
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMadeCall,
    OllamaMessage,
    chat_fields,
    durations,
    max_tokens,
    now,
    sampling_fields,
)
from weft.api.openai.logprobs import MANY_FIGURES, chat_logprobs, num_figures
from weft.api.openai.openai_schema import ChatRequest, CompletionRequest
from weft.api.translate import ParsedRequest, parse_chat, parse_completion
from weft.backends.contract import max_encoded_tokens, tokens_unknown
from weft.errors import InvalidRequest, WeftError
from weft.serving.admission import RequestContext
from weft.serving.model_pool import ModelPool
from weft.serving.output_reader import BlockKind, Closed, CollectedOutput, Grown, OutputBlock, OutputBlocks
from weft.serving.request import FieldReport, unique_id
from weft.serving.served_model import ServedModel
from weft.text.fill_in_middle import fim_prompt
from weft.types import GenerationRequest, Output, TokenLogprob

OWN_NAMES = {"enable_thinking": "think", "reasoning_effort": "think", "max_tokens": "options.num_predict"}
"""The names here of fields of OpenAI's requests."""


async def ollama_chat_endpoint(
    body: bytes, context: RequestContext
) -> tuple[Sequence[GenerationRequest], OllamaWriter]:
    request = await parse(OllamaChatRequest, body, context)
    model, served, load_s = await chosen(context, request.model)
    answer_id = f"ollama-{uuid.uuid4().hex}"
    if not request.messages:
        return [], OllamaWriter(answer_id, request, None, served, load_s, is_chat=True)
    _check_logprobs(request, context.fields)
    fields = {
        **chat_fields(request),
        "model": model,
        "messages": [_message(message) for message in request.messages],
        "continue_final_message": _is_begun(request.messages[-1]),
        "tools": [tool.model_dump(exclude_none=True) for tool in request.tools],
    }
    asked = await off_loop(len(body) > LONG_BODY_BYTES, checked, ChatRequest, fields, context.config.limits)
    chat = await parse_chat(asked, served, context.fields, request_id=unique_id(answer_id), tenant=context.tenant)
    context.fields.rename("ollama", OWN_NAMES)
    return chat.requests, OllamaWriter(answer_id, request, chat, served, load_s, is_chat=True)


async def ollama_generate_endpoint(
    body: bytes, context: RequestContext
) -> tuple[Sequence[GenerationRequest], OllamaWriter]:
    request = await parse(OllamaGenerateRequest, body, context)
    model, served, load_s = await chosen(context, request.model)
    answer_id = f"ollama-{uuid.uuid4().hex}"
    if not (request.prompt or request.suffix):
        return [], OllamaWriter(answer_id, request, None, served, load_s)
    _check_logprobs(request, context.fields)
    ids: dict[str, Any] = {"request_id": unique_id(answer_id), "tenant": context.tenant}
    limits, is_long = context.config.limits, len(body) > LONG_BODY_BYTES
    if request.raw or request.suffix:
        _check_untemplated(request, context.fields)
        prompt: str | list[int] = request.prompt
        if request.suffix:
            prompt = await asyncio.to_thread(_between, request, served)
        fields = _completion(request) | {"model": model, "prompt": prompt}
        completion = await off_loop(is_long, checked, CompletionRequest, fields, limits)
        is_open = max_tokens(request.options) is None
        parsed = await parse_completion(completion, served, context.fields, to_the_end=is_open, **ids)
    else:
        system = [{"role": "system", "content": request.system}] if request.system else []
        messages = [*system, {"role": "user", "content": request.prompt}]
        fields = chat_fields(request) | {"model": model, "messages": messages}
        chat = await off_loop(is_long, checked, ChatRequest, fields, limits)
        parsed = await parse_chat(chat, served, context.fields, **ids)
    context.fields.rename("ollama", OWN_NAMES)
    return parsed.requests, OllamaWriter(answer_id, request, parsed, served, load_s)


def _check_logprobs(request: OllamaFields, report: FieldReport) -> None:
    if request.top_logprobs and not request.logprobs:
        report.ignore("ollama", "top_logprobs", "it needs logprobs to be true")


def _check_untemplated(request: OllamaGenerateRequest, report: FieldReport) -> None:
    """Look for fields that only the chat template would write into the prompt. Raises InvalidRequest for what Ollama
    refuses too."""
    if request.system and request.raw:
        raise InvalidRequest("raw: the prompt is continued as it is, without a system message.", param="system")
    for field, is_asked in (("system", request.system), ("think", request.think)):
        if is_asked:
            report.ignore("ollama", field, "the chat template is not used")


async def chosen(context: RequestContext, asked: str) -> tuple[str, ServedModel, float]:
    """Return the name that a model has here, the model, and the seconds that it took to load it."""
    began = time.perf_counter()
    name = served_name(context.pool, asked)
    served = await context.choose(name)
    served.check_model(name)
    return name, served, time.perf_counter() - began


def served_name(pool: ModelPool, asked: str) -> str:
    """Return the name that a model has here: Ollama's clients put a tag behind every name."""
    is_known = any(asked == slot.name or slot.answers_to(asked) for slot in pool.slots)
    return asked if is_known else asked.removesuffix(LATEST)


def _message(message: OllamaMessage) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.thinking,
        "tool_calls": [_call(call) for call in message.tool_calls],
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }


def _call(call: OllamaCall) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _is_begun(last: OllamaMessage) -> bool:
    """Return whether the last message is the beginning of the answer."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _completion(request: OllamaGenerateRequest) -> dict[str, Any]:
    form = {"json": request.format} if isinstance(request.format, dict) else {"json_object": True}
    return sampling_fields(request) | {
        "structured_outputs": form if request.format else None,
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
    }


def _between(request: OllamaGenerateRequest, served: ServedModel) -> list[int]:
    engine = served.engine
    if not engine.abilities.tokens:
        raise tokens_unknown(engine, "suffix", "suffix")
    most = max_encoded_tokens(engine)
    return fim_prompt(engine.text.tokenizer, request.prompt, request.suffix, max_tokens=most, param="suffix")


class OllamaWriter(Writer):
    """Writes one answer, as lines of JSON where it is streamed."""

    stream_headers = NDJSON_HEADERS

    def __init__(
        self,
        answer_id: str,
        request: OllamaFields,
        parsed: ParsedRequest | None,
        served: ServedModel,
        load_s: float,
        *,
        is_chat: bool = False,
    ) -> None:
        """`parsed`: None where the model was to be loaded, and nothing else."""
        super().__init__(answer_id, request.model, stream=request.stream)
        self._is_chat = is_chat
        self._blocks = None if parsed is None else OutputBlocks(parsed.reader_options.reader())
        self._tokenizer = served.engine.text.tokenizer if request.logprobs else None
        self._load_s = load_s
        self._began = time.perf_counter()

    @property
    def waiting(self) -> bytes:
        return self._line("")

    def chunks(self, index: int, output: Output) -> bytes | Awaitable[bytes]:
        if output.logprobs and num_figures(output) > MANY_FIGURES:
            return asyncio.to_thread(self._chunks, output)
        return self._chunks(output)

    def _chunks(self, output: Output) -> bytes:
        assert self._blocks is not None
        lines = []
        figures = self._figures(output.token_ids, output.logprobs)
        for change in self._blocks.push(output):
            match change:
                case Grown(block, text) if block.kind is not BlockKind.CALL:
                    is_thought = block.kind is BlockKind.THINKING
                    lines.append(self._line("" if is_thought else text, text if is_thought else "", logprobs=figures))
                    figures = UNSET
                case Closed(block) if block.kind is BlockKind.CALL:
                    lines.append(self._line("", calls=[block], logprobs=figures))
                    figures = UNSET
        if output.finish:
            lines.append(self._line("", logprobs=figures, done_reason=str(output.finish), **self._counts(output)))
        elif figures is not UNSET:
            lines.append(self._line("", logprobs=figures))
        return b"".join(lines)

    def failure(self, error: WeftError) -> bytes:
        return msgspec.json.encode({"error": error_body(error).error.message}) + b"\n"

    async def whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        if self._blocks is None:
            return self._line("", done_reason="load")
        [output] = outputs
        return await off_loop(num_figures(output) > MANY_FIGURES, self._whole, self._blocks, output)

    def _whole(self, blocks: OutputBlocks, output: CollectedOutput) -> bytes:
        blocks.push(output.whole)
        return self._line(
            "".join(block.text for block in blocks.all if block.kind is BlockKind.TEXT),
            "".join(block.text for block in blocks.all if block.kind is BlockKind.THINKING),
            [block for block in blocks.all if block.kind is BlockKind.CALL],
            logprobs=self._figures(output.token_ids, output.logprobs),
            done_reason=str(output.finish),
            **self._counts(output),
        )

    def _line(self, text: str, thought: str = "", calls: Sequence[OutputBlock] = (), **fields: Any) -> bytes:
        """Write one line; it is the last one if it has a reason why the answer ended."""
        thinking = thought or UNSET
        if self._is_chat:
            made = [_made_call(block) for block in calls] or UNSET
            fields["message"] = OllamaAnswerMessage(content=text, thinking=thinking, tool_calls=made)
        else:
            fields |= {"response": text, "thinking": thinking}
        answer = OllamaAnswer(model=self.model_name, created_at=now(), done="done_reason" in fields, **fields)
        return msgspec.json.encode(answer) + b"\n"

    def _counts(self, output: Output | CollectedOutput) -> dict[str, Any]:
        return durations(output.usage, output.timings, self._load_s, time.perf_counter() - self._began)

    def _figures(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Any:
        if self._tokenizer is None or not logprobs:
            return UNSET
        return Raw(msgspec.json.encode(chat_logprobs(self._tokenizer, token_ids, logprobs).content))


def _made_call(block: OutputBlock) -> OllamaMadeCall:
    return OllamaMadeCall(block.call_id, OllamaCalledFunction(block.name, call_arguments(block.text)))
