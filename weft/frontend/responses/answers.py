"""What Weft answers at /v1/responses, as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from weft.frontend.blocks import Block, Kind


class OutputTextPart(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningPart(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputTextPart]


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningPart]


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int
    """What the reasoning's text is in tokens, without its marks."""


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ResponseAnswer(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: str
    store: bool
    background: bool = False
    metadata: dict[str, str]
    user: str | None


class DeletedResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


def part_of(block: Block, text: str) -> OutputTextPart | ReasoningPart:
    """The one part that a block of text or of reasoning has."""
    return OutputTextPart(text) if block.kind is Kind.TEXT else ReasoningPart(text)


def output_item(block: Block, item_id: str, status: str) -> OutputItem:
    """As far as the block has come; what is in progress has nothing yet."""
    begun = status == "in_progress"
    match block.kind:
        case Kind.TEXT:
            return OutputMessage(id=item_id, status=status, content=[] if begun else [OutputTextPart(block.text)])
        case Kind.THINKING:
            return OutputReasoning(id=item_id, status=status, content=[] if begun else [ReasoningPart(block.text)])
        case Kind.CALL:
            return OutputCall(
                id=item_id,
                status=status,
                call_id=block.call_id,
                name=block.name,
                arguments="" if begun else block.text,
            )
