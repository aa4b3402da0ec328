"""What Weft answers, as Anthropic's clients read it."""

from __future__ import annotations

from typing import Any

import pydantic_core
from msgspec import Struct

from weft.frontend.blocks import Block, Kind
from weft.types import Usage


class TextAnswer(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingAnswer(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseAnswer(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageUsage(Struct, frozen=True, kw_only=True):
    """All input is the sum of the three."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageAnswer(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    input_tokens: int


def message_usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
    )


def answer_block(block: Block, text: str) -> AnswerBlock:
    """The block with this text, as far as it is known."""
    match block.kind:
        case Kind.TEXT:
            return TextAnswer(text)
        case Kind.THINKING:
            return ThinkingAnswer(text)
        case Kind.CALL:
            return ToolUseAnswer(block.call_id, block.name, _input(text))


def _input(arguments: str) -> dict[str, Any]:
    """Of a call that was cut off, what there is. Parsers take for a call only what has an object's braces; what is in
    them may be no JSON all the same, and is given as it was written."""
    try:
        value: dict[str, Any] = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {"arguments": arguments}
    return value
