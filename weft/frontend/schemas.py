"""OpenAI's requests, as far as Weft answers them, and Weft's own additions to them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from typing_extensions import TypedDict

from weft.frontend.fields import NotYet, content_text, prompts, stop_strings, without_empty_fields

SANE_ID = r"^[A-Za-z0-9._-]{1,128}$"


class Fields(BaseModel):
    """An object of a request: strict types, null means absent, no field is ever ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    not_yet: ClassVar[NotYet] = {}
    """OpenAI's fields that Weft does not support, each with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _no_field_is_ignored(cls, value: Any) -> Any:
        return without_empty_fields(value, cls.model_fields, cls.not_yet)


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class Message(Fields):
    not_yet: ClassVar[NotYet] = {
        "tool_calls": [[]],
        "function_call": [],
        "audio": [],
        "refusal": [],
        "annotations": [[]],
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(content_text, json_schema_input_type=str | list[TextPart])]
    """Several parts are joined by line ends."""
    name: str | None = None
    tool_call_id: str | None = None


class StreamOptions(Fields):
    not_yet: ClassVar[NotYet] = {"include_obfuscation": [False]}

    include_usage: bool = False


class GenerationRequest(Fields):
    """What chat and plain completions have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings, json_schema_input_type=str | list[str] | None)] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field({}, description="Token ids, as strings, and what is added to their logits.")
    user: str | None = Field(None, description="Accepted, and without meaning here.")

    top_k: int = Field(0, description="Keep the k likeliest tokens; 0 or -1: all.")
    min_p: float = Field(0.0, description="Keep tokens at least this likely, as a share of the likeliest one.")
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = Field(False, description="Go on behind the model's end of sequence.")
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")
    request_id: str | None = Field(None, pattern=SANE_ID, description="Becomes part of the answer's id.")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    not_yet: ClassVar[NotYet] = {
        "audio": [],
        "function_call": ["none", "auto"],
        "functions": [[]],
        "modalities": [["text"]],
        "moderation": [],
        "n": [1],
        "prediction": [],
        "prompt_cache_retention": ["in_memory", "in-memory"],
        "reasoning_effort": [],
        "response_format": [{"type": "text"}],
        "service_tier": ["auto", "default"],
        "store": [False],
        "tool_choice": ["none", "auto"],
        "tools": [[]],
        "verbosity": ["medium"],
        "web_search_options": [],
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, description="Without it: up to the end of the context.")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = None
    metadata: dict[str, str] = Field({}, description="Accepted, and without meaning here.")
    parallel_tool_calls: bool = Field(True, description="Accepted, and without meaning here.")
    prompt_cache_key: str | None = Field(None, description="Accepted, and without meaning here.")
    safety_identifier: str | None = Field(None, description="Accepted, and without meaning here.")

    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the model's chat template.")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    not_yet: ClassVar[NotYet] = {"best_of": [1], "echo": [False], "n": [1], "suffix": [""]}

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int = 16
    logprobs: int | None = None


class TokenizeRequest(Fields):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = Field(True, description="Of a prompt; a chat template brings its own.")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the model's chat template.")
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]
