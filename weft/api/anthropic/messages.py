"""POST /v1/messages and POST /v1/messages/count_tokens"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from weft.api.anthropic.messages_schema import (
    AnyBlock,
    ClientTool,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    answer_block,
    anthropic_error,
    message_usage,
)
from weft.api.body import LONG_BODY_BYTES, off_loop, parse
from weft.api.error_responses import error_body
from weft.api.handler import Writer, named_event
from weft.api.openai.openai_schema import ChatRequest
from weft.api.translate import ParsedRequest, parse_chat
from weft.backends.contract import num_tokens, tokens_of, tokens_unknown
from weft.errors import InvalidRequest, WeftError
from weft.serving.admission import RequestContext
from weft.serving.output_reader import BlockKind, Change, Closed, CollectedOutput, Grown, Opened, OutputBlocks
from weft.serving.request import unique_id
from weft.types import FinishReason, GenerationRequest, Output, Usage

OWN_NAMES = {"enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}
"""The names here of fields of the chat request."""


def chat_request(request: MessagesRequest) -> ChatRequest:
    return ChatRequest.model_validate(
        {
            **_conversation(request),
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stream": request.stream,
            "seed": request.seed,
            "priority": request.priority,
            "cache_salt": request.cache_salt,
            "prompt_cache_key": request.metadata.user_id if request.metadata else None,
        }
    )


def counted_request(request: CountTokensRequest) -> ChatRequest:
    return ChatRequest.model_validate(_conversation(request))


def _conversation(request: CountTokensRequest) -> dict[str, Any]:
    """Return the fields that decide what the prompt is."""
    system = [{"role": "system", "content": _text(request.system)}] if request.system else []
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config
    return {
        "model": request.model,
        "messages": system + [message for turn in request.messages for message in _messages(turn)],
        "continue_final_message": _is_begun(request.messages[-1]),
        "tools": [_tool(tool) for tool in request.tools],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "include_reasoning": thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"),
        "response_format": None if output is None or output.format is None else _format(output.format.schema_),
        "reasoning_effort": output.effort if output is not None else None,
        "enable_thinking": None if thinking is None else thinking.type != "disabled",
    }


def _is_begun(last: Turn) -> bool:
    """Return whether the last message is the beginning of the answer."""
    if last.role != "assistant":
        return False
    if not _text(last.content) or any(isinstance(block, ToolUseBlock) for block in last.content):
        raise InvalidRequest(
            "The last message is the assistant's: it must be text, for the answer to go on with.", param="messages"
        )
    return True


def _messages(turn: Turn) -> Iterator[dict[str, Any]]:
    if turn.role == "assistant":
        yield _assistant(turn.content)
        return
    for is_result, blocks in groupby(turn.content, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_tool_message(block) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            yield {"role": turn.role, "content": _text(list(blocks))}


def _assistant(blocks: Sequence[AnyBlock]) -> dict[str, Any]:
    return {
        "role": "assistant",
        # Text that a call stands in the middle of is one text, joined as the model wrote it.
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        "reasoning_content": "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None,
        "tool_calls": [_call(block) for block in blocks if isinstance(block, ToolUseBlock)],
    }


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"type": "function", "id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _tool_message(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _text(blocks: Sequence[AnyBlock]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _tool(tool: ClientTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


_PING = named_event("ping", {"type": "ping"})
_STOP = named_event("message_stop", {"type": "message_stop"})


class MessagesWriter(Writer):
    def __init__(self, answer_id: str, chat: ParsedRequest, request: MessagesRequest) -> None:
        super().__init__(answer_id, request.model, stream=request.stream)
        self._blocks = OutputBlocks(chat.reader_options.reader())
        self._usage = Usage(prompt_tokens=num_tokens(chat.prompt))

    def opening(self) -> bytes:
        message = self._message(None, None, self._usage)
        return named_event("message_start", {"type": "message_start", "message": message})

    def chunks(self, index: int, output: Output) -> bytes:
        if output.usage.prompt_tokens:
            self._usage = output.usage
        changes = self._blocks.push(output)
        events = [_event(change) for change in changes]
        if output.finish:
            events.append(self._last_event(output.finish, output.stop_reason))
        return b"".join(events)

    def closing(self, usages: Sequence[Usage]) -> bytes:
        return _STOP

    def failure(self, error: WeftError) -> bytes:
        return named_event("error", anthropic_error(error.status, error_body(error).error.message))

    async def whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        [output] = outputs
        self._blocks.push(output.whole)
        stop_reason, stop_sequence = self._stop(output.finish, output.stop_reason)
        message = self._message(stop_reason, stop_sequence, output.usage)
        message.content.extend(answer_block(block, block.text) for block in self._blocks.all)
        return msgspec.json.encode(message)

    def _message(self, stop_reason: str | None, stop_sequence: str | None, usage: Usage) -> MessageAnswer:
        return MessageAnswer(
            id=self.answer_id,
            model=self.model_name,
            content=[],
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=message_usage(usage),
        )

    def _last_event(self, finish: FinishReason, matched: str | int | None) -> bytes:
        stop_reason, stop_sequence = self._stop(finish, matched)
        return named_event(
            "message_delta",
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                "usage": message_usage(self._usage),
            },
        )

    def _stop(self, finish: FinishReason, matched: str | int | None) -> tuple[str, str | None]:
        """Return why it ended, and the stop sequence that ended it."""
        if finish is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(matched, str):
            return "stop_sequence", matched
        called = any(block.kind is BlockKind.CALL for block in self._blocks.all)
        return "tool_use" if called else "end_turn", None


def _event(change: Change) -> bytes:
    index = change.block.index
    match change:
        case Opened(block):
            name = "content_block_start"
            start = named_event(name, {"type": name, "index": index, "content_block": answer_block(block, "")})
            return start + _PING if index == 0 else start
        case Grown(block, text):
            name = "content_block_delta"
            return named_event(name, {"type": name, "index": index, "delta": _delta(block.kind, text)})
        case Closed():
            name = "content_block_stop"
            return named_event(name, {"type": name, "index": index})


def _delta(kind: BlockKind, text: str) -> dict[str, str]:
    match kind:
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.THINKING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


async def messages_endpoint(body: bytes, context: RequestContext) -> tuple[list[GenerationRequest], MessagesWriter]:
    request = await parse(MessagesRequest, body, context)
    served = await context.choose(request.model)
    served.check_model(request.model)
    answer_id = f"msg_{uuid.uuid4().hex}"
    asked = await off_loop(len(body) > LONG_BODY_BYTES, chat_request, request)
    chat = await parse_chat(asked, served, context.fields, request_id=unique_id(answer_id), tenant=context.tenant)
    context.fields.rename("messages", OWN_NAMES)
    return chat.requests, MessagesWriter(answer_id, chat, request)


async def count_tokens(body: bytes, context: RequestContext) -> TokenCount:
    request = await parse(CountTokensRequest, body, context)
    served = await context.choose_text(request.model)
    served.check_model(request.model)
    if not served.engine.abilities.tokens:
        raise tokens_unknown(served.engine, "count_tokens")
    asked = await off_loop(len(body) > LONG_BODY_BYTES, counted_request, request)
    chat = await parse_chat(asked, served, context.fields)
    context.fields.rename("messages", OWN_NAMES)
    return TokenCount(len(tokens_of(chat.prompt)))
