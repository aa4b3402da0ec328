"""Anthropic's requests, as far as Weft answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic_core
from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Field, model_validator

from weft.api.body import Fields, client_tools
from weft.api.openai.openai_schema import MODEL_S_OWN, SESSION, TOOL_NAME, Items, Name, ReasoningEffort
from weft.errors import shown
from weft.serving.output_reader import BlockKind, OutputBlock
from weft.types import Usage


def _blocks_of(*types: str) -> Callable[[object], object]:
    """Return what checks a content's blocks by their type. A string is short for one block of text."""

    def checked(value: object) -> object:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        for index, block in enumerate(value if isinstance(value, list) else ()):
            if isinstance(block, dict) and block.get("type") not in types:
                raise ValueError(
                    f"block {index} is of type {shown(block.get('type'))}; supported here: {', '.join(types)}."
                )
        return value

    return checked


class TextBlock(Fields):
    place: ClassVar[str] = "messages.messages.content"

    type: Literal["text"]
    text: str


Texts = Annotated[Items[TextBlock], BeforeValidator(_blocks_of("text"), json_schema_input_type=str | list[TextBlock])]


class ToolUseBlock(Fields):
    """A call that the assistant made earlier."""

    place: ClassVar[str] = "messages.messages.content"

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Fields):
    place: ClassVar[str] = "messages.messages.content"

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field([])
    is_error: bool = Field(False, description="The model is told so, in words before the content.")


class ThinkingBlock(Fields):
    """The block holds what the assistant thought; templates may use it."""

    place: ClassVar[str] = "messages.messages.content"

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Fields):
    """Thoughts that only their vendor can read; they are left out."""

    place: ClassVar[str] = "messages.messages.content"

    type: Literal["redacted_thinking"]


AnyBlock = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]
_BLOCKS_OF_ROLE: dict[str, tuple[type[Fields], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
}


class Turn(Fields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Items[AnyBlock],
        BeforeValidator(
            _blocks_of("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
            json_schema_input_type=str | list[AnyBlock],
        ),
    ]

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if not self.content and self.role != "assistant":
            raise ValueError("it needs content.")
        for block in self.content:
            if not isinstance(block, _BLOCKS_OF_ROLE[self.role]):
                raise ValueError(f"a block of type {block.type} has no place in a message of the {self.role}.")
        return self


class ClientTool(Fields):
    place: ClassVar[str] = "messages.tools"

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Calls fit the schema even when none is forced.")

    @model_validator(mode="before")
    @classmethod
    def _is_no_server_tool(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in (None, "custom"):
            raise ValueError(f"a tool of type {shown(value['type'])} would be run by the server, which runs none.")
        return value


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = Field(False, description="At most one call an answer.")

    @model_validator(mode="after")
    def _names_its_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name goes with the type tool, and with no other.")
        return self


class Thinking(Fields):
    place: ClassVar[str] = "messages.thinking"

    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = Field(None, description="What is not omitted is shown in full.")


class JsonFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    place: ClassVar[str] = "messages.output_config"

    effort: ReasoningEffort | None = Field(
        None, description="For a model whose chat template reads it, or whose thinking can be switched; else a hint."
    )
    format: JsonFormat | None = None


class CountTokensRequest(Fields):
    """POST /v1/messages/count_tokens"""

    place: ClassVar[str] = "messages"

    model: Name
    messages: Annotated[Items[Turn], Field(min_length=1)]
    system: Texts = Field([])
    tools: Annotated[
        Items[ClientTool], BeforeValidator(client_tools("custom"), json_schema_input_type=list[ClientTool])
    ] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: int
    stop_sequences: Items[str] = Field([])
    temperature: float | None = Field(None, description=MODEL_S_OWN)
    top_p: float | None = Field(None, description=MODEL_S_OWN)
    top_k: int | None = Field(None, description=f"Keep the k likeliest tokens; 0 or -1: all. {MODEL_S_OWN}")
    stream: bool = False
    metadata: dict[str, Any] | None = Field(None, description=f"`user_id` names a session. {SESSION}")

    seed: int | None = None
    priority: int = Field(0, description="Of a key's waiting requests those of a lower number go first.")
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")


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
    """The usage of a message. All of its input is input_tokens and both counts of the cache."""

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


def answer_block(block: OutputBlock, text: str) -> AnswerBlock:
    """Return the block with this text, as far as it is known."""
    match block.kind:
        case BlockKind.TEXT:
            return TextAnswer(text)
        case BlockKind.THINKING:
            return ThinkingAnswer(text)
        case BlockKind.CALL:
            return ToolUseAnswer(block.call_id, block.name, call_arguments(text))


def call_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut off, what there is. Parsers take for a call only what has an
    object's braces; what is in them may be no JSON all the same, and is given as it was written."""
    try:
        value: dict[str, Any] = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {"arguments": arguments}
    return value


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(Struct, frozen=True):
    type: str
    message: str


class AnthropicError(Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | UnsetType = UNSET


def anthropic_error(status: int, message: str, request_id: str | UnsetType = UNSET) -> AnthropicError:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return AnthropicError(error=AnthropicErrorDetail(kind, message), request_id=request_id)
