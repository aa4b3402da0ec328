"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence

import msgspec
from msgspec import UNSET

from weft.api.body import off_loop, parse
from weft.api.handler import DONE, Writer
from weft.api.openai.logprobs import MANY_FIGURES, chat_logprobs, num_figures, num_shown, prompt_logprobs
from weft.api.openai.openai_answers import (
    SYSTEM_FINGERPRINT,
    CalledCustom,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    MadeCall,
    UsageBody,
    timings_body,
    usage_body,
    with_items,
)
from weft.api.openai.openai_schema import ChatRequest, SamplingFields
from weft.api.translate import ParsedRequest, parse_chat
from weft.backends.contract import Engine, tokens_of
from weft.serving.admission import RequestContext
from weft.serving.output_reader import CollectedOutput
from weft.serving.request import unique_id
from weft.text.parsers.pieces import (
    CallArguments,
    CallStarted,
    Content,
    CustomCallInput,
    CustomCallStarted,
    ParsedAnswer,
    Piece,
    Reasoning,
    ToolCall,
    collect,
)
from weft.types import FinishReason, GenerationRequest, Output, Usage


async def chat_endpoint(body: bytes, context: RequestContext) -> tuple[list[GenerationRequest], ChatWriter]:
    request = await parse(ChatRequest, body, context)
    served = await context.choose(request.model)
    served.check_model(request.model)
    answer_id = f"chatcmpl-{request.request_id or uuid.uuid4().hex}"
    chat = await parse_chat(request, served, context.fields, request_id=unique_id(answer_id), tenant=context.tenant)
    return chat.requests, ChatWriter(answer_id, request, chat, served.engine)


class ChoicesWriter(Writer):
    """Writes one answer of a chat or a completion, with all its choices. Those of a chunk stand between bytes that are
    encoded once."""

    def __init__(
        self, answer_id: str, chunk_object: str, request: SamplingFields, parsed: ParsedRequest, engine: Engine
    ) -> None:
        """`chunk_object`: what a chunk calls itself."""
        super().__init__(answer_id, request.model, stream=request.stream)
        self._parsed = parsed
        self._engine = engine
        options = request.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._created = int(time.time())
        head = {"id": answer_id, "object": chunk_object, "created": self._created, "model": request.model}
        head["system_fingerprint"] = SYSTEM_FINGERPRINT
        self._before = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        self._usages = [Usage() for _ in parsed.requests]

    def closing(self, usages: Sequence[Usage]) -> bytes:
        if not self._include_usage:
            return DONE
        return self._before + self._after_with({"usage": self._usage_body(usages)}) + DONE

    def _after_with(self, fields: dict[str, object]) -> bytes:
        """Return what ends a chunk that has these fields besides its choices."""
        return b"]," + msgspec.json.encode(fields)[1:] + b"\n\n" if fields else self._after

    def _usage_body(self, usages: Sequence[Usage]) -> UsageBody:
        return usage_body(usages, self._parsed.n, self._parsed.truncated_tokens)


class ChatWriter(ChoicesWriter):
    """Writes one answer, with all its choices."""

    def __init__(self, answer_id: str, request: ChatRequest, chat: ParsedRequest, engine: Engine) -> None:
        super().__init__(answer_id, "chat.completion.chunk", request, chat, engine)
        self._request = request
        choices = range(len(chat.requests))
        self._readers = [chat.reader_options.reader() for _ in choices]
        self._has_called = [False for _ in choices]
        self._before_delta = [self._before + b'{"index":%d,"delta":' % index for index in choices]
        self._before_text = [before + b'{"content":' for before in self._before_delta]
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._after
        self._is_simple = chat.reader_options.is_plain and not (self._continuous_usage or request.return_token_ids)
        """An output of text alone is a chunk of text alone."""
        self._is_old = bool(request.functions)
        """A call is answered in the older form, as it was offered."""

    def opening(self) -> bytes:
        role = b'{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        fields: dict[str, object] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = self._prompt
        first, *others = self._before_delta
        return first + role + self._after_with(fields) + b"".join(b + role + self._after for b in others)

    def chunks(self, index: int, output: Output) -> bytes | Awaitable[bytes]:
        if self._is_simple and not (output.logprobs or output.finish or output.prompt_logprobs):
            return (
                self._before_text[index] + msgspec.json.encode(output.text) + self._after_text if output.text else b""
            )
        if (output.logprobs or output.prompt_logprobs) and num_figures(output) > MANY_FIGURES:
            return asyncio.to_thread(self._chunks, index, output)
        return self._chunks(index, output)

    def _chunks(self, index: int, output: Output) -> bytes:
        self._usages[index] = output.usage
        pieces = self._readers[index].read(output)
        self._has_called[index] |= any(isinstance(piece, CallStarted) for piece in pieces)
        bodies = [_delta_body(piece, is_old=self._is_old) for piece in pieces]
        logprobs = self._logprobs(output)
        if not bodies and (logprobs or (output.token_ids and self._request.return_token_ids)):
            bodies = [{"content": ""}]
        chunks = [
            self._chunk(index, body, None if number else output, None if number else logprobs)
            for number, body in enumerate(bodies)
        ]
        if output.finish:
            chunks.append(self._last_chunk(index, output))
        return b"".join(chunks)

    async def whole(self, outputs: Sequence[CollectedOutput]) -> list[bytes]:
        return await off_loop(sum(map(num_figures, outputs)) > MANY_FIGURES, self._whole, outputs)

    def _whole(self, outputs: Sequence[CollectedOutput]) -> list[bytes]:
        first = outputs[0]
        asked = self._request.return_token_ids
        answer = ChatCompletion(
            id=self.answer_id,
            created=self._created,
            model=self.model_name,
            choices=[],
            usage=self._usage_body([output.usage for output in outputs]),
            system_fingerprint=SYSTEM_FINGERPRINT,
            prompt_token_ids=self._prompt if asked else UNSET,
            prompt_logprobs=UNSET
            if first.prompt_logprobs is None
            else prompt_logprobs(self._engine.text.tokenizer, self._prompt, first.prompt_logprobs),
        )
        return with_items(answer, "choices", (self._choice(index, output) for index, output in enumerate(outputs)))

    def _chunk(
        self, index: int, body: dict[str, object], output: Output | None, logprobs: ChatLogprobs | None
    ) -> bytes:
        """Return a chunk of one piece; the first one that an output gives has the figures of its tokens."""
        choice: dict[str, object] = {"logprobs": logprobs, "finish_reason": None}
        if output is not None and self._request.return_token_ids:
            choice["token_ids"] = output.token_ids
        fields: dict[str, object] = {}
        if index == 0 and output is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._engine.text.tokenizer, self._prompt, output.prompt_logprobs
            )
        return self._written(index, body, choice, fields)

    def _last_chunk(self, index: int, output: Output) -> bytes:
        choice: dict[str, object] = {"logprobs": None, "finish_reason": self._finish(index, output.finish)}
        if output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self._request.return_timings and output.timings is not None:
            choice["timings"] = timings_body(output.timings)
        return self._written(index, {}, choice, {})

    def _written(
        self, index: int, body: dict[str, object], choice: dict[str, object], fields: dict[str, object]
    ) -> bytes:
        if self._continuous_usage:
            fields["usage"] = self._usage_body(self._usages)
        elif fields and self._include_usage:
            fields["usage"] = None
        rest = b"," + msgspec.json.encode(choice)[1:]
        return self._before_delta[index] + msgspec.json.encode(body) + rest + self._after_with(fields)

    def _choice(self, index: int, output: CollectedOutput) -> ChatChoice:
        answer = collect(self._readers[index].read(output.whole))
        self._has_called[index] = bool(answer.tool_calls)
        timed = self._request.return_timings and output.timings is not None
        return ChatChoice(
            index=index,
            message=_message(answer, is_old=self._is_old),
            logprobs=self._logprobs(output),
            finish_reason=self._finish(index, output.finish),
            stop_reason=UNSET if output.stop_reason is None else output.stop_reason,
            token_ids=output.token_ids if self._request.return_token_ids else UNSET,
            timings=timings_body(output.timings) if timed and output.timings else UNSET,
        )

    @property
    def _prompt(self) -> list[int]:
        return tokens_of(self._parsed.prompt)

    def _finish(self, index: int, finish: FinishReason | None) -> str:
        if finish is FinishReason.STOP and self._has_called[index] and not self._parsed.reader_options.is_named_call:
            return "function_call" if self._is_old else "tool_calls"
        return str(finish)

    def _logprobs(self, output: Output | CollectedOutput) -> ChatLogprobs | None:
        if not output.logprobs:
            return None
        tokenizer, as_ids = self._engine.text.tokenizer, self._request.return_tokens_as_token_ids
        skips = self._request.skip_special_tokens
        count = num_shown(tokenizer, output, skip_special_tokens=skips)
        return chat_logprobs(tokenizer, output.token_ids[:count], output.logprobs[:count], as_ids=as_ids)


def _delta_body(piece: Piece, *, is_old: bool) -> dict[str, object]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStarted(_, _, name) if is_old:
            return {"function_call": {"name": name, "arguments": ""}}
        case CallArguments(_, text) if is_old:
            return {"function_call": {"arguments": text}}
        case CustomCallStarted(index, call_id, name):
            custom = {"name": name, "input": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "custom", "custom": custom}]}
        case CustomCallInput(index, text):
            return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
        case CallStarted(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _made_call(call: ToolCall) -> MadeCall:
    if call.is_custom:
        return MadeCall(id=call.id, type="custom", custom=CalledCustom(call.name, call.arguments))
    return MadeCall(id=call.id, function=CalledFunction(call.name, call.arguments))


def _message(answer: ParsedAnswer, *, is_old: bool) -> ChatMessage:
    calls = [_made_call(call) for call in answer.tool_calls]
    reasoning = answer.reasoning or UNSET
    return ChatMessage(
        content=None if calls and not answer.content else answer.content,
        tool_calls=calls if calls and not is_old else UNSET,
        function_call=calls[0].function if calls and is_old else UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )
