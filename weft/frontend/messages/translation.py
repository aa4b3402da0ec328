"""An Anthropic request as the chat request that asks for the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from weft.errors import InvalidRequest
from weft.frontend.messages.schemas import (
    AnyBlock,
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from weft.frontend.schemas import ChatRequest


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
        }
    )


def counted_request(request: CountTokensRequest) -> ChatRequest:
    return ChatRequest.model_validate(_conversation(request))


def _conversation(request: CountTokensRequest) -> dict[str, Any]:
    """The fields that decide what the prompt is."""
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
        "chat_template_kwargs": {"reasoning_effort": output.effort} if output and output.effort else {},
    }


def _is_begun(last: Turn) -> bool:
    """Whether the last message is the beginning of the answer."""
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
