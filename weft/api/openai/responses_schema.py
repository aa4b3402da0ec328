"""OpenAI's requests to /v1/responses, as far as Weft answers them."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from weft.api.body import Fields, client_tools
from weft.api.openai.openai_schema import (
    MODEL_S_OWN,
    SESSION,
    TOOL_NAME,
    Items,
    Metadata,
    Name,
    ReasoningEffort,
    ToolChoiceWord,
    ToolType,
)
from weft.errors import shown
from weft.serving.output_reader import BlockKind, OutputBlock
from weft.serving.request import FieldReport

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Fields):
    place: ClassVar[str] = "responses.input.content"

    type: Literal["input_text"]
    text: str


class PastText(Fields):
    """The part holds what an assistant said earlier."""

    place: ClassVar[str] = "responses.input.content"

    type: Literal["output_text"]
    text: str


def _part_type(value: Any) -> str:
    return str(value.get("type")) if isinstance(value, dict) else ""


AnyPart = Annotated[
    Annotated[InputText, Tag("input_text")] | Annotated[PastText, Tag("output_text")],
    Discriminator(
        _part_type,
        custom_error_type="part_type",
        custom_error_message="its type must be input_text or output_text; other parts are not supported.",
    ),
]


def _as_parts(value: object) -> object:
    """Return the parts of a content; a string is short for one part of text."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[Items[AnyPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[AnyPart])]


class InputMessage(Fields):
    place: ClassVar[str] = "responses.input"

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: ItemStatus | None = None


def offered_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function; one of a namespace is known by both."""
    return name if namespace is None else f"{namespace}__{name}"


class FunctionCall(Fields):
    """A call that the assistant made earlier."""

    place: ClassVar[str] = "responses.input"

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON, as a string.")
    namespace: Name | None = None
    id: str | None = None
    status: ItemStatus | None = None


class CustomCall(Fields):
    """A call of a custom tool that the assistant made earlier."""

    place: ClassVar[str] = "responses.input"

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: Name | None = None
    id: str | None = None
    status: ItemStatus | None = None


class CallOutput(Fields):
    place: ClassVar[str] = "responses.input"

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: ItemStatus | None = None


class PastThought(Fields):
    type: Literal["reasoning_text"]
    text: str


class PastSummary(Fields):
    type: Literal["summary_text"]
    text: str


class PastReasoning(Fields):
    """The item holds what the assistant thought, or a summary of it; templates may use it."""

    place: ClassVar[str] = "responses.input"

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[PastSummary] = Field([])
    content: Items[PastThought] = Field([])
    status: ItemStatus | None = None


def _item_type(value: Any) -> str:
    """Return an item's type; a message need not say what it is, and the outputs of all calls are of one."""
    kind = str(value.get("type", "message")) if isinstance(value, dict) else ""
    return "call_output" if kind in ("function_call_output", "custom_tool_call_output") else kind


AnyItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("call_output")]
    | Annotated[PastReasoning, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="it must be a message, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output or reasoning; other items are not supported.",
    ),
]


VENDOR_ITEMS = re.compile(
    r"(apply_patch|code_interpreter|computer|file_search|image_generation|local_shell|mcp|shell|tool_search|web_search)"
    r"_(call|call_output|output|list_tools|approval_request|approval_response)|compaction"
)
"""Types of items that come from tools which only a vendor runs."""


def _as_items(value: object, info: ValidationInfo) -> object:
    """Return the items of an input; a string is short for one message of the user. What a vendor's tools did is left
    aside."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    report: FieldReport = info.context or FieldReport()
    return [item for item in value if not _is_left_aside(item, report)]


VENDOR_INCLUDES = re.compile(
    r"(code_interpreter_call|computer_call_output|file_search_call|web_search_call)\.[a-z_.]{1,40}|"
    r"message\.input_image\.image_url|reasoning\.encrypted_content"
)
"""An answer never has these: nothing of it comes from a vendor's tools, and reasoning is in plain text."""


def _included(value: object, info: ValidationInfo) -> object:
    """Return what an answer is to include, without what it never has."""
    report: FieldReport = info.context or FieldReport()
    if not isinstance(value, list) or report.mode == "strict":
        return value
    kept = [item for item in value if not (isinstance(item, str) and VENDOR_INCLUDES.fullmatch(item))]
    if len(kept) < len(value):
        report.leave_aside("responses.include")
    return kept


def _is_left_aside(item: object, report: FieldReport) -> bool:
    kind = item.get("type") if isinstance(item, dict) else None
    if report.mode == "strict" or not isinstance(kind, str) or not VENDOR_ITEMS.fullmatch(kind):
        return False
    report.leave_aside(f"responses.input.{kind}")
    return True


class ToolFormat(Fields):
    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self) -> Self:
        if {self.definition is None, self.syntax is None} != {self.type == "text"}:
            raise ValueError("definition and syntax go with the type grammar, and with no other.")
        return self


class ResponsesTool(Fields):
    """A function, or a custom tool, which takes one text: the model is told of it as a function of that."""

    place: ClassVar[str] = "responses.tools"

    type: ToolType
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; a function's own.")
    strict: bool | None = Field(None, description="Calls fit the schema even when none is forced.")
    format: ToolFormat | None = Field(
        None, description="Of a custom tool: the model is told of a grammar; a regular expression is enforced."
    )
    namespace: Name | None = Field(None, description="Of a tool of type namespace that holds it.")

    @model_validator(mode="before")
    @classmethod
    def _is_a_clients(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in ("function", "custom"):
            raise ValueError(
                f"a tool of type {shown(value.get('type'))} is not supported; only functions and custom tools are."
            )
        return value

    @model_validator(mode="after")
    def _is_of_its_type(self) -> Self:
        if self.type == "function" and self.format is not None:
            raise PydanticCustomError("of_type", "it goes with the type custom.", {"field": "format"})
        if self.type == "custom" and (self.parameters is not None or self.strict is not None):
            raise PydanticCustomError("of_type", "it goes with the type function.", {"field": "parameters"})
        return self


def without_namespaces(value: object) -> object:
    """Return tools with the functions of namespaces in the places of these."""
    if not isinstance(value, list):
        return value
    flat: list[object] = []
    for tool in value:
        inside = tool.get("tools") if isinstance(tool, dict) and tool.get("type") == "namespace" else None
        if isinstance(inside, list):
            flat += [{**one, "namespace": tool.get("name")} if isinstance(one, dict) else one for one in inside]
        else:
            flat.append(tool)
    return flat


class ChosenTool(Fields):
    type: ToolType
    name: Name


class AllowedFunctions(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ChosenTool], Field(min_length=1)]


def _choice_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "word"
    return "allowed_tools" if value.get("type") == "allowed_tools" else "function"


ResponsesToolChoice = Annotated[
    Annotated[ToolChoiceWord, Tag("word")]
    | Annotated[ChosenTool, Tag("function")]
    | Annotated[AllowedFunctions, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]


class TextFormat(Fields):
    place: ClassVar[str] = "responses.text.format"

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Answers fit the schema whether or not this is set.")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("a schema goes with the type json_schema, and with no other.")
        return self


class TextOptions(Fields):
    place: ClassVar[str] = "responses.text"

    format: TextFormat | None = None


class ReasoningOptions(Fields):
    place: ClassVar[str] = "responses.reasoning"

    effort: ReasoningEffort | None = Field(
        None, description="For a model whose chat template reads it, or whose thinking can be switched; else a hint."
    )


class ResponsesRequest(Fields):
    """POST /v1/responses"""

    place: ClassVar[str] = "responses"

    model: Name
    input: Annotated[
        Items[AnyItem],
        Field(min_length=1),
        BeforeValidator(_as_items, json_schema_input_type=str | list[AnyItem]),
    ]
    instructions: str | None = Field(None, description="A message of the system before all others; of this turn alone.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Without it: up to the end of the context."
    )
    temperature: float | None = Field(None, description=MODEL_S_OWN)
    top_p: float | None = Field(None, description=MODEL_S_OWN)
    presence_penalty: float = Field(0.0, description="From -2 to 2.")
    frequency_penalty: float = Field(0.0, description="From -2 to 2.")
    stream: bool = False
    tools: Annotated[
        Items[ResponsesTool],
        BeforeValidator(client_tools("function", "custom"), json_schema_input_type=list[ResponsesTool]),
        BeforeValidator(without_namespaces, json_schema_input_type=list[ResponsesTool]),
    ] = Field([])
    tool_choice: ResponsesToolChoice = "auto"
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Limits calls of tools that the server runs, of which there are none: it always holds."
    )
    parallel_tool_calls: bool = Field(True, description="False: at most one call an answer.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: Name | None = Field(None, description="The conversation goes on from there.")
    store: bool = Field(True, description="Keep the answer for previous_response_id, a while and as there is room.")
    background: bool = Field(False, description="Answer at once, and generate it whether the client waits or not.")
    include: Annotated[Items[Literal["message.output_text.logprobs"]], BeforeValidator(_included)] = Field(
        [], description="Reasoning is given in plain text in any case, and can be sent back so."
    )
    top_logprobs: int | None = Field(
        None, description="So many likely tokens in the place of each one of the text, with its log probability."
    )
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: a prompt that is too long loses its beginning."
    )
    prompt_cache_key: Name | None = Field(None, description=f"{SESSION} Given back with the answer.")
    metadata: Metadata = Field({}, description="Given back with the answer.")
    user: Name | None = Field(None, description="Given back with the answer.")

    top_k: int | None = Field(None, description=f"Keep the k likeliest tokens; 0 or -1: all. {MODEL_S_OWN}")
    seed: int | None = None
    priority: int = Field(0, description="Of a key's waiting requests those of a lower number go first.")
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")


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
    namespace: str | UnsetType = UNSET


class OutputCustomCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningPart]


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int
    """Tokens of the reasoning's text, without its marks."""


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
    presence_penalty: float
    frequency_penalty: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_tool_calls: int | None
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: str
    store: bool
    background: bool = False
    metadata: dict[str, str]
    user: str | None
    service_tier: str = "default"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


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


def part_of(block: OutputBlock, text: str, logprobs: list[Any]) -> OutputTextPart | ReasoningPart:
    """Return the one part that a block of text or of reasoning has."""
    return OutputTextPart(text, logprobs=logprobs) if block.kind is BlockKind.TEXT else ReasoningPart(text)


def output_item(
    block: OutputBlock, item_id: str, status: str, tool: ResponsesTool | None, logprobs: list[Any]
) -> OutputItem:
    """Return a block as an item, as far as it has come; what is in progress has nothing yet. `tool`: the one called."""
    begun = status == "in_progress"
    match block.kind:
        case BlockKind.TEXT:
            content = [] if begun else [OutputTextPart(block.text, logprobs=logprobs)]
            return OutputMessage(id=item_id, status=status, content=content)
        case BlockKind.THINKING:
            return OutputReasoning(id=item_id, status=status, content=[] if begun else [ReasoningPart(block.text)])
        case BlockKind.CALL:
            called: dict[str, Any] = {
                "id": item_id,
                "status": status,
                "call_id": block.call_id,
                "name": block.name if tool is None else tool.name,
                "namespace": UNSET if tool is None or tool.namespace is None else tool.namespace,
            }
            text = "" if begun else block.text
            return OutputCustomCall(**called, input=text) if block.is_custom else OutputCall(**called, arguments=text)
