"""OpenAI's requests to /v1/responses, as far as Weft answers them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Struct
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from weft.api.openai.openai_schema import MODEL_S_OWN, TOOL_NAME, Fields, Items, Metadata, Name, NotYet
from weft.errors import shown
from weft.serving.output_reader import BlockKind, OutputBlock

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Fields):
    type: Literal["input_text"]
    text: str


class PastText(Fields):
    """What an assistant said earlier."""

    not_yet: ClassVar[NotYet] = {"annotations": [[]], "logprobs": [[]]}

    type: Literal["output_text"]
    text: str


def _part_type(value: Any) -> str:
    return str(value.get("type")) if isinstance(value, dict) else ""


AnyPart = Annotated[
    Annotated[InputText, Tag("input_text")] | Annotated[PastText, Tag("output_text")],
    Discriminator(
        _part_type,
        custom_error_type="part_type",
        custom_error_message="its type must be input_text or output_text; other parts are not supported yet.",
    ),
]


def _as_parts(value: object) -> object:
    """Return the parts of a content; a string is short for one part of text."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[Items[AnyPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[AnyPart])]


class InputMessage(Fields):
    not_yet: ClassVar[NotYet] = {"phase": []}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCall(Fields):
    """A call that the assistant made earlier."""

    not_yet: ClassVar[NotYet] = {"async": [False], "caller": [{"type": "direct"}], "namespace": []}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON, as a string.")
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutput(Fields):
    not_yet: ClassVar[NotYet] = {"caller": [{"type": "direct"}], "name": [], "namespace": []}

    type: Literal["function_call_output"]
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
    """What the assistant thought, or a summary of it; templates may use it."""

    not_yet: ClassVar[NotYet] = {"encrypted_content": []}

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[PastSummary] = Field([])
    content: Items[PastThought] = Field([])
    status: ItemStatus | None = None


def _item_type(value: Any) -> str:
    """Return an item's type; a message need not say what it is."""
    return str(value.get("type", "message")) if isinstance(value, dict) else ""


AnyItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[PastReasoning, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="it must be a message, function_call, function_call_output or reasoning; "
        "other items are not supported yet.",
    ),
]


def _as_items(value: object) -> object:
    """Return the items of an input; a string is short for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(Fields):
    not_yet: ClassVar[NotYet] = {
        "allowed_callers": [["direct"]],
        "async": [False],
        "defer_loading": [False],
        "output_schema": [],
    }

    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field({"type": "object", "properties": {}}, description="A JSON schema.")
    strict: bool | None = Field(None, description="Calls fit the schema even when none is forced.")

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") != "function":
            raise ValueError(f"a tool of type {shown(value.get('type'))} is not supported; only functions are.")
        return value


class ChosenFunction(Fields):
    type: Literal["function"]
    name: Name


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Answers fit the schema whether or not this is set.")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("a schema goes with the type json_schema, and with no other.")
        return self


class TextOptions(Fields):
    not_yet: ClassVar[NotYet] = {"verbosity": ["medium"]}

    format: TextFormat | None = None


class ReasoningOptions(Fields):
    not_yet: ClassVar[NotYet] = {
        "context": ["auto"],
        "generate_summary": ["auto"],
        "mode": ["standard"],
        "summary": ["auto"],
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Only for a model whose chat template reads reasoning_effort."
    )


class ResponsesStreamOptions(Fields):
    not_yet: ClassVar[NotYet] = {"include_obfuscation": [False]}


class ResponsesRequest(Fields):
    """POST /v1/responses"""

    not_yet: ClassVar[NotYet] = {
        "access_programs": [],
        "context_management": [[]],
        "conversation": [],
        "image": [],
        "max_tool_calls": [],
        "moderation": [],
        "prompt": [],
        "prompt_cache_options": [],
        "prompt_cache_retention": ["in_memory", "in-memory"],
        "service_tier": ["auto", "default"],
        "top_logprobs": [0],
    }

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
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    tools: Items[FunctionTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = Field(True, description="False: at most one call an answer.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: Name | None = Field(None, description="The conversation goes on from there.")
    store: bool = Field(True, description="Keep the answer for previous_response_id, a while and as there is room.")
    background: bool = Field(False, description="Answer at once, and generate it whether the client waits or not.")
    include: Items[Literal["reasoning.encrypted_content"]] = Field(
        [], description="Reasoning is given in plain text, and can be sent back so."
    )
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto: a prompt that is too long loses its beginning."
    )
    metadata: Metadata = Field({}, description="Given back with the answer.")
    user: Name | None = Field(None, description="Accepted, and without meaning here.")
    prompt_cache_key: str | None = Field(None, description="Accepted, and without meaning here.")
    safety_identifier: str | None = Field(None, description="Accepted, and without meaning here.")

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


def part_of(block: OutputBlock, text: str) -> OutputTextPart | ReasoningPart:
    """Return the one part that a block of text or of reasoning has."""
    return OutputTextPart(text) if block.kind is BlockKind.TEXT else ReasoningPart(text)


def output_item(block: OutputBlock, item_id: str, status: str) -> OutputItem:
    """Return a block as an item, as far as it has come; what is in progress has nothing yet."""
    begun = status == "in_progress"
    match block.kind:
        case BlockKind.TEXT:
            return OutputMessage(id=item_id, status=status, content=[] if begun else [OutputTextPart(block.text)])
        case BlockKind.THINKING:
            return OutputReasoning(id=item_id, status=status, content=[] if begun else [ReasoningPart(block.text)])
        case BlockKind.CALL:
            return OutputCall(
                id=item_id,
                status=status,
                call_id=block.call_id,
                name=block.name,
                arguments="" if begun else block.text,
            )
