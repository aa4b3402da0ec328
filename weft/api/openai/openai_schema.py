"""OpenAI's requests to generate, as far as Weft answers them, and Weft's own additions to them."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import TypedDict

from weft.errors import InvalidRequest, shown
from weft.payloads import MAX_BYTES, MAX_DIMENSIONS
from weft.types import MAX_LOGPROBS

MAX_NAME_CHARS = 64
"""No field has a longer name."""
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

NotYet = Mapping[str, Sequence[object]]
"""Fields by name, each with the values that ask for nothing and are let through."""


def without_empty_fields(value: Any, known: Collection[str], not_yet: NotYet) -> Any:
    """Return the object without its nulls and without what asks for nothing; refuses what Weft would have to ignore."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        if name in known:
            if item is not None:
                kept[name] = item
        elif name not in not_yet:
            raise PydanticCustomError(
                "unknown_field", "there is no such field.{hint}", {"field": name, "hint": _nearest(name, known)}
            )
        elif item is not None and not any(type(item) is type(empty) and item == empty for empty in not_yet[name]):
            raise PydanticCustomError(
                "not_supported", "{said} is not supported yet.", {"field": name, "said": _said(item)}
            )
    return kept


def with_empty_fields(schema: dict[str, Any], not_yet: NotYet) -> None:
    """Let an object's description say what is taken for nothing: null for a field that may be absent, and for one that
    is not supported yet whatever asks for nothing."""
    fields = schema.setdefault("properties", {})
    for name in fields.keys() - schema.get("required", ()):
        field = fields[name]
        if {"type": "null"} not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            fields[name] = {"anyOf": [field, {"type": "null"}], **about}
    fields |= {name: {"enum": [None, *empty], "description": "Not supported yet."} for name, empty in not_yet.items()}


def content_text(value: object) -> str | list[str | EmbedsPart]:
    """Return a message's content: a string, which text parts are joined to, or its parts if there are other ones."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string or a list of parts.")
    parts = [_content_part(part, index) for index, part in enumerate(value)]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def predicted_text(value: object) -> str:
    text = content_text(value)
    if not isinstance(text, str):
        raise ValueError("its parts must be text.")
    return text


def prompts(value: object) -> list[GivenPrompt]:
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


def _content_part(part: object, index: int) -> str | EmbedsPart:
    if not isinstance(part, dict):
        raise ValueError(f"part {index} must be an object with a type.")
    if part.get("type") == "prompt_embeds":
        return _embeds_part(part, index)
    if part.get("type") != "text":
        raise ValueError(
            f"part {index} is of type {shown(part.get('type'))}; only 'text' and 'prompt_embeds' are supported yet."
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"part {index} has no text.")
    if other := sorted(part.keys() - {"type", "text"}):
        raise ValueError(f"part {index} has a field that there is not: {shown(other[0])}.")
    text: str = part["text"]
    return text


def _nearest(name: str, known: Collection[str]) -> str:
    # The matcher takes quadratic time.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(name) <= MAX_NAME_CHARS else ()
    return f" Did you mean {close[0]!r}?" if close else ""


def _said(value: object) -> str:
    """Return the value when it is short enough to name."""
    return said if isinstance(value, str | int | float) and len(said := shown(value)) < 40 else "it"


SANE_ID = r"^[A-Za-z0-9._-]{1,128}$"


class Fields(BaseModel):
    """An object of a request: types are strict, null means absent, and a field that is not known is refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    not_yet: ClassVar[NotYet] = {}
    """OpenAI's fields that Weft does not support, each with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _no_field_is_ignored(cls, value: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        return without_empty_fields(value, known, cls.not_yet)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        with_empty_fields(handler.resolve_ref_schema(schema), cls.not_yet)
        return schema


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


GivenPrompt = str | list[int] | tuple[list[int] | EmbedsPart, ...]
"""A prompt as a client sends it: text, token ids, or segments of token ids and prompt embeds."""


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class PastFunction(Fields):
    name: str
    arguments: str = Field("{}", description="JSON, as a string.")


class PastCall(Fields):
    """A tool call that the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: PastFunction
    index: int | None = Field(None, description="Accepted, and without meaning here.")


class Message(Fields):
    not_yet: ClassVar[NotYet] = {
        "function_call": [],
        "audio": [],
        "refusal": [],
        "annotations": [[]],
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[str | EmbedsPart] | None,
        PlainValidator(content_text, json_schema_input_type=str | list[TextPart | EmbedsPart] | None),
    ] = Field(
        None,
        description="Several text parts are joined by line ends; prompt embeds stand where they are. Only an "
        "assistant's call needs none.",
    )
    name: str | None = None
    tool_calls: Items[PastCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="What an assistant thought; templates may use it.")
    reasoning: str | None = Field(None, description="The other name of reasoning_content.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "only an assistant's message has them.", {"field": "tool_calls"})
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "it must be given.", {"field": "content"})
        return self


TOOL_NAME = r"^[A-Za-z0-9_.:-]{1,64}$"


class Function(Fields):
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field({"type": "object", "properties": {}}, description="A JSON schema.")
    strict: bool | None = Field(None, description="Arguments of a call that is forced always fit the schema.")


class Tool(Fields):
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: Name


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = Field(None, description="Answers fit the schema whether or not this is set.")


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other.")
        return self


class StructuredOutputs(Fields):
    """What the output must be: exactly one of these."""

    not_yet: ClassVar[NotYet] = {"structural_tag": []}

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
    not_yet: ClassVar[NotYet] = {"include_obfuscation": [False]}

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
    """What chat and plain completions have in common."""

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
    user: str | None = Field(None, description="Accepted, and without meaning here.")

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
    stop_token_ids: Items[int] = []
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
    priority: int = Field(
        0,
        description="Of a key's waiting requests those of a lower number go first.",
        json_schema_extra=_within(-(2**31), 2**31 - 1),
    )
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")
    adapter: Name | None = Field(
        None, description="The name of a LoRA adapter, where it is not the model's; empty: the model as it is."
    )
    request_id: str | None = Field(None, pattern=SANE_ID, description="Becomes part of the answer's id.")


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    not_yet: ClassVar[NotYet] = {
        "audio": [],
        "function_call": ["none", "auto"],
        "functions": [[]],
        "modalities": [["text"]],
        "moderation": [],
        "prompt_cache_retention": ["in_memory", "in-memory"],
        "reasoning_effort": [],
        "service_tier": ["auto", "default"],
        "store": [False],
        "verbosity": ["medium"],
        "web_search_options": [],
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: int | None = Field(
        None, description="Without it: up to the end of the context.", json_schema_extra=_POSITIVE
    )
    max_completion_tokens: int | None = Field(
        None, description="The newer name of max_tokens.", json_schema_extra=_POSITIVE
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, json_schema_extra=_LOGPROBS)
    metadata: Metadata = Field({}, description="Accepted, and without meaning here.")
    response_format: ResponseFormat | None = None
    prediction: PredictedContent | None = None
    tools: Items[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = Field(True, description="False: at most one call an answer.")
    include_reasoning: bool = Field(True, description="False: what the model thinks is left out.")
    prompt_cache_key: str | None = Field(None, description="Accepted, and without meaning here.")
    safety_identifier: str | None = Field(None, description="Accepted, and without meaning here.")

    add_generation_prompt: bool | None = Field(None, description="True unless the final message is continued.")
    continue_final_message: bool = Field(False, description="The answer goes on where the last message ends.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the model's chat template.")


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    not_yet: ClassVar[NotYet] = {"suffix": [""]}

    prompt: Annotated[
        list[GivenPrompt],
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
    best_of: int | None = Field(None, description="Accepted when it is n.")

    @model_validator(mode="after")
    def _has_a_prompt(self) -> Self:
        if not self.prompt and not self.prompt_embeds:
            raise PydanticCustomError("missing", "Field required", {"field": "prompt"})
        return self
