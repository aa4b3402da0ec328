"""OpenAI's requests to generate, as far as Weft answers them, and Weft's own additions to them."""

from __future__ import annotations

import base64
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from weft.api.body import Fields, client_tools, honoured_fields
from weft.errors import InvalidRequest, shown
from weft.payloads import MAX_BYTES, MAX_DIMENSIONS
from weft.serving.request import FieldReport
from weft.types import MAX_LOGPROBS

MAX_PAIRS = 128

T = TypeVar("T")


def at_most(length: int, unit: str) -> BeforeValidator:
    """Refuse what is longer before it is looked at. The description tells types, not limits."""

    def checked(value: object) -> object:
        if isinstance(value, str | list | dict) and len(value) > length:
            raise ValueError(f"it has {len(value)} {unit}; at most {length}.")
        return value

    return BeforeValidator(checked)


Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused for the first of its items that is wrong: to tell of all would take longer than to read it."""
Pairs = Annotated[dict[str, T], at_most(MAX_PAIRS, "entries")]
Name = Annotated[str, at_most(1024, "characters")]
"""A name that errors or the answer repeat."""
Metadata = Pairs[Annotated[str, at_most(4096, "characters")]]
SESSION = "Of several replicas, requests of one session are sent to the same one while that costs little."


def content_text(value: object, info: ValidationInfo) -> str | list[str | EmbedsPart]:
    """Return a message's content: a string, which text parts are joined to, or its parts if there are other ones."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string or a list of parts.")
    report = info.context or FieldReport()
    parts = [_content_part(part, index, report) for index, part in enumerate(value)]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def predicted_text(value: object, info: ValidationInfo) -> str:
    text = content_text(value, info)
    if not isinstance(text, str):
        raise ValueError("its parts must be text.")
    return text


def prompts(value: object) -> list[PromptInput]:
    """Return one prompt or several, each a string or a list of token ids, with prompt embeds among them."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string, a list of strings, a list of token ids, or a list of such lists.")
    if all(isinstance(item, str) for item in value):
        return value
    if (one := _given_ids(value)) is not None:
        return [one]
    several = [_given_ids(item) if isinstance(item, list) and item else None for item in value]
    if None not in several:
        return [given for given in several if given is not None]
    raise ValueError("its elements must be all strings, all token ids, or all lists of token ids.")


def _given_ids(items: list[Any]) -> list[int] | tuple[list[int] | EmbedsPart, ...] | None:
    """Return a list of token ids as it is, and one with objects among them as its segments; None: it is neither."""
    if all(type(item) is int for item in items):
        return items
    if not all(type(item) is int or type(item) is dict for item in items):
        return None
    segments: list[list[int] | EmbedsPart] = []
    for index, item in enumerate(items):
        if type(item) is dict:
            segments.append(_embeds_part(item, index))
        elif segments and isinstance(segments[-1], list):
            segments[-1].append(item)
        else:
            segments.append([item])
    return tuple(segments)


def tensors(value: object) -> object:
    """Return one tensor as a list of one, and refuse the files that clients of vLLM send."""
    given = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) for item in given):
        raise ValueError(
            "it is a string, as vLLM's clients send a file of torch.save, which is a pickle and is not read. Send an "
            "object: data (base64 of the values row by row, little-endian), shape ([rows, hidden size]) and dtype."
        )
    return given


def stop_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("it must be a string or a list of strings.")


def _embeds_part(part: dict[str, Any], index: int) -> EmbedsPart:
    try:
        return EmbedsPart.model_validate(part)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, [*first["loc"], first.get("ctx", {}).get("field", "")])).strip(".")
        raise ValueError(f"part {index}: {field:.100}: {first['msg']}") from error


def _content_part(part: object, index: int, report: FieldReport) -> str | EmbedsPart:
    if not isinstance(part, dict):
        raise ValueError(f"part {index} must be an object with a type.")
    kind = part.get("type")
    if kind == "prompt_embeds":
        return _embeds_part(part, index)
    if kind not in ("text", "refusal"):
        raise ValueError(f"part {index} is of type {shown(kind)}; the model reads 'text' and 'prompt_embeds' alone.")
    text = honoured_fields(part, ("type", kind), "chat.messages.content", report).get(kind)
    if not isinstance(text, str):
        raise ValueError(f"part {index} has no text.")
    return text


SANE_ID = r"^[A-Za-z0-9._-]{1,128}$"


Base64 = Annotated[str, Field(description="base64 of the values row by row, little-endian.")]
PIECE_CHARS = 1 << 20


class TensorField(Fields):
    """A tensor from the client."""

    data: Base64
    shape: Annotated[Items[int], at_most(MAX_DIMENSIONS, "dimensions")]
    dtype: Literal["float32", "float16", "bfloat16"]
    sha256: str = Field("", description="Of the bytes, in hexadecimal; checked when it is given.")


def tensor_fields(given: TensorField, field: str) -> dict[str, Any]:
    """Return the fields of a `payloads.Tensor`, decoded and not checked. It takes a while."""
    if len(given.data) > (most := -(-MAX_BYTES // 3) * 4):
        raise InvalidRequest(
            f"{field}.data: it has {len(given.data)} characters; at most {most}, which are {MAX_BYTES} bytes.",
            param=f"{field}.data",
        )
    data = bytearray()
    try:
        # In pieces: one call would hold the interpreter to its end.
        for at in range(0, len(given.data), PIECE_CHARS):
            data += base64.b64decode(given.data[at : at + PIECE_CHARS], validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{field}.data: it is not base64.", param=f"{field}.data") from error
    return {"data": memoryview(data), "shape": tuple(given.shape), "dtype": given.dtype, "sha256": given.sha256}


class EmbedsPart(TensorField):
    """Rows of prompt embeds that stand in the place of tokens."""

    type: Literal["prompt_embeds"] = "prompt_embeds"


PromptInput = str | list[int] | tuple[list[int] | EmbedsPart, ...]
"""A prompt as a client sends it: text, token ids, or segments of token ids and prompt embeds."""


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class PastFunction(Fields):
    name: str
    arguments: str = Field("{}", description="JSON, as a string.")


class PastCustom(Fields):
    name: str
    input: str


ToolType = Literal["function", "custom"]


class FunctionOrCustom(Fields):
    """The base of objects that are of a function or of a custom tool, and have a field of that name."""

    type: ToolType

    @model_validator(mode="after")
    def _is_of_its_type(self) -> Self:
        for name in ("function", "custom"):
            if (getattr(self, name) is None) == (self.type == name):
                raise PydanticCustomError("of_type", f"it goes with the type {name}, which needs it.", {"field": name})
        return self


class PastCall(FunctionOrCustom):
    """A tool call that the assistant made earlier."""

    place: ClassVar[str] = "chat.messages.tool_calls"

    id: str | None = None
    type: ToolType = "function"
    function: PastFunction | None = None
    custom: PastCustom | None = None


class Message(Fields):
    place: ClassVar[str] = "chat.messages"

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | list[str | EmbedsPart] | None,
        PlainValidator(content_text, json_schema_input_type=str | list[TextPart | EmbedsPart] | None),
    ] = Field(
        None,
        description="Several text parts are joined by line ends; prompt embeds stand where they are. Only an "
        "assistant's call needs none.",
    )
    name: str | None = None
    tool_calls: Items[PastCall] = Field([])
    function_call: PastFunction | None = Field(None, description="The older form of one of tool_calls.")
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="What an assistant thought; templates may use it.")
    reasoning: str | None = Field(None, description="The other name of reasoning_content.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "only an assistant's message has them.", {"field": "tool_calls"})
        if self.function_call and (self.role != "assistant" or self.tool_calls):
            raise PydanticCustomError(
                "calls", "only an assistant's message without tool_calls has it.", {"field": "function_call"}
            )
        if self.content is None and not self.tool_calls and not self.function_call:
            raise PydanticCustomError("missing", "it must be given.", {"field": "content"})
        return self


TOOL_NAME = r"^[A-Za-z0-9_.:-]{1,64}$"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Function(Fields):
    place: ClassVar[str] = "chat.tools.function"

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field(NO_PARAMETERS, description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments of a call that is forced always fit the schema.")


class CustomGrammar(Fields):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(Fields):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self) -> Self:
        if (self.grammar is None) == (self.type == "grammar"):
            raise ValueError("a grammar goes with the type grammar, and with no other.")
        return self


class CustomFunction(Fields):
    """A tool that takes one text. The model is told of it as a function with the parameter `input`."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    format: CustomFormat | None = Field(
        None, description="The model is told of a grammar; a regular expression is enforced."
    )


class Tool(FunctionOrCustom):
    place: ClassVar[str] = "chat.tools"

    function: Function | None = None
    custom: CustomFunction | None = None


class NamedFunction(Fields):
    name: Name


class NamedTool(FunctionOrCustom):
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1)]


class AllowedChoice(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: Any) -> str:
    if not isinstance(value, dict | Fields):
        return "word"
    return "allowed_tools" if _type_of(value) == "allowed_tools" else "function"


def _type_of(value: Any) -> object:
    return value.get("type") if isinstance(value, dict) else value.type


ToolChoiceWord = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolChoiceWord, Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedChoice, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]


class JsonSchema(Fields):
    place: ClassVar[str] = "chat.response_format.json_schema"

    name: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = Field(None, description="Answers fit the schema whether or not this is set.")


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="The schema, as llama.cpp's clients send it."
    )
    value: dict[str, Any] | None = Field(None, description="The schema, as Hugging Face's clients send it.")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("json_schema goes with the type json_schema, and with no other.")
        schemas = sum(given is not None for given in (self.json_schema, self.schema_, self.value))
        if schemas > 1 or (self.type == "json_schema" and not schemas):
            raise ValueError("the type json_schema needs either json_schema or schema.")
        if self.type == "text" and schemas:
            raise ValueError("a schema goes with the types json_schema and json_object.")
        return self


class StructuredOutputs(Fields):
    """The field says what the output must be: exactly one of these."""

    place: ClassVar[str] = "chat.structured_outputs"

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="In Lark's notation, or in llama.cpp's (GBNF).")
    json_object: bool = False

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        asked = [self.json_ is not None, self.regex is not None, self.choice is not None, self.grammar is not None]
        if sum(asked) + self.json_object != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar and json_object.")
        return self


class PredictedContent(Fields):
    """A text that the answer is expected to repeat: tokens are drafted from it, and none changes."""

    type: Literal["content"]
    content: Annotated[str, PlainValidator(predicted_text, json_schema_input_type=str | list[TextPart])]


class StreamOptions(Fields):
    place: ClassVar[str] = "chat.stream_options"

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="Every chunk tells of the usage so far.")


def _within(low: float, high: float | None = None, *, open_low: bool = False) -> dict[str, JsonValue]:
    """Return the bounds of a number, for the description; `SamplingParams.check` enforces them."""
    bounds: dict[str, JsonValue] = {"exclusiveMinimum" if open_low else "minimum": low}
    return bounds if high is None else bounds | {"maximum": high}


_PENALTY = _within(-2, 2)
_LOGPROBS = _within(0, MAX_LOGPROBS)
_POSITIVE = _within(1, 2**31 - 1)


MODEL_S_OWN = "Without it: what the model's files recommend, else a neutral one."


class SamplingFields(Fields):
    """The fields that chat and plain completions have in common."""

    model: Name
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description=MODEL_S_OWN, json_schema_extra=_within(0, 100))
    top_p: float | None = Field(None, description=MODEL_S_OWN, json_schema_extra=_within(0, 1, open_low=True))
    n: int = Field(1, description="Answers to each prompt.", json_schema_extra=_within(1))
    seed: int | None = Field(None, json_schema_extra=_within(-(2**63), 2**63 - 1))
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings, json_schema_input_type=str | list[str] | None)] = ()
    presence_penalty: float = Field(0.0, json_schema_extra=_PENALTY)
    frequency_penalty: float = Field(0.0, json_schema_extra=_PENALTY)
    logit_bias: dict[str, float] = Field({}, description="Token ids, as strings, and what is added to their logits.")

    top_k: int | None = Field(
        None,
        description=f"Keep the k likeliest tokens; 0 or -1: all. {MODEL_S_OWN}",
        json_schema_extra=_within(-1, 2**31 - 1),
    )
    min_p: float | None = Field(
        None,
        description=f"Keep tokens at least this likely, as a share of the likeliest one. {MODEL_S_OWN}",
        json_schema_extra=_within(0, 1),
    )
    repetition_penalty: float | None = Field(
        None, description=MODEL_S_OWN, json_schema_extra=_within(0, 100, open_low=True)
    )
    stop_token_ids: Items[int] = Field([])
    min_tokens: int = Field(0, json_schema_extra=_within(0, 2**31 - 1))
    ignore_eos: bool = Field(False, description="Go on behind the model's end of sequence.")
    speculative: bool | None = Field(
        None, description="Draft tokens and verify several in a step, which changes none; null: as the server is set."
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(
        None, description="Figures of the prompt's tokens, and so many likely ones.", json_schema_extra=_LOGPROBS
    )
    return_token_ids: bool = Field(False, description="The prompt's and the answer's token ids as well.")
    return_tokens_as_token_ids: bool = Field(
        False, description="Log probabilities name tokens as token_id:5, and not by their text."
    )
    return_timings: bool = Field(False, description="How long it took, with every choice's end.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the last so many tokens of a longer prompt; -1: what the context holds."
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: Items[str] | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="The older name of structured_outputs.grammar.")
    json_schema: dict[str, Any] | None = Field(None, description="llama.cpp's name of structured_outputs.json.")
    grammar: str | None = Field(None, description="llama.cpp's name of structured_outputs.grammar.")
    priority: int = Field(
        0,
        description="Of a key's waiting requests those of a lower number go first.",
        json_schema_extra=_within(-(2**31), 2**31 - 1),
    )
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")
    prompt_cache_key: str | None = Field(None, description=SESSION)
    adapter: Name | None = Field(
        None, description="The name of a LoRA adapter, where it is not the model's; empty: the model as it is."
    )
    request_id: str | None = Field(None, pattern=SANE_ID, description="Becomes part of the answer's id.")


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    place: ClassVar[str] = "chat"

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: int | None = Field(
        None, description="Without it: up to the end of the context.", json_schema_extra=_POSITIVE
    )
    max_completion_tokens: int | None = Field(
        None, description="The newer name of max_tokens.", json_schema_extra=_POSITIVE
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, json_schema_extra=_LOGPROBS)
    response_format: ResponseFormat | None = None
    prediction: PredictedContent | None = None
    tools: Annotated[
        Items[Tool], BeforeValidator(client_tools("function", "custom"), json_schema_input_type=list[Tool])
    ] = Field([])
    tool_choice: ToolChoice | None = None
    functions: Items[Function] = Field([], description="The older form of tools; calls are answered in it as well.")
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        None, description="The older form of tool_choice."
    )
    parallel_tool_calls: bool = Field(True, description="False: at most one call an answer.")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="For a model whose chat template reads it, or whose thinking can be switched; else a hint."
    )
    enable_thinking: bool | None = Field(
        None, description="Whether the model thinks before it answers, where its chat template can switch it."
    )
    include_reasoning: bool = Field(True, description="False: what the model thinks is left out.")

    add_generation_prompt: bool | None = Field(None, description="True unless the final message is continued.")
    continue_final_message: bool = Field(False, description="The answer goes on where the last message ends.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the model's chat template.")


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    place: ClassVar[str] = "completions"

    prompt: Annotated[
        list[PromptInput],
        PlainValidator(
            prompts,
            json_schema_input_type=str | list[str] | list[int | EmbedsPart] | list[list[int | EmbedsPart]],
        ),
    ] = Field([], description="May be left out, or be empty, with prompt_embeds.")
    prompt_embeds: Annotated[
        Items[EmbedsPart], BeforeValidator(tensors, json_schema_input_type=EmbedsPart | list[EmbedsPart])
    ] = Field([], description="Prompts as rows of the hidden size, which come before those of prompt.")
    max_tokens: int = Field(16, description="0 is allowed with echo.", json_schema_extra=_within(0, 2**31 - 1))
    logprobs: int | None = Field(None, json_schema_extra=_LOGPROBS)
    echo: bool = Field(False, description="The prompt stands before the answer, its tokens' figures too.")
    best_of: int | None = Field(
        None, description="Make so many answers to each prompt, and give the n likeliest by mean log probability."
    )
    suffix: str = Field("", description="The text behind the answer, for models with tokens to fill in the middle.")

    @model_validator(mode="after")
    def _has_a_prompt(self) -> Self:
        if not self.prompt and not self.prompt_embeds:
            raise PydanticCustomError("missing", "Field required", {"field": "prompt"})
        return self
