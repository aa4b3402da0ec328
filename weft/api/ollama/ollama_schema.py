"""Ollama's requests and answers, as far as Weft has what they are about."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import UNSET, Raw, Struct, UnsetType
from pydantic import Field, PlainValidator, model_validator

from weft.api.body import Fields
from weft.api.openai.openai_schema import Function, Items, Name, stop_strings
from weft.types import Timings, Usage

LATEST = ":latest"
"""The tag of a name that has none."""


class OllamaOptions(Fields):
    """The settings of sampling."""

    place: ClassVar[str] = "ollama.options"

    num_predict: int | None = Field(None, description="0 or less: up to the end of the context.")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = Field(None, description="-1: a random one.")
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


NO_OPTIONS = OllamaOptions.model_validate({})

Think = bool | Literal["low", "medium", "high", "max"]


class OllamaFields(Fields):
    """The base of chat and generate has the fields that both take."""

    model: Name
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = Field("", description="json: an object; or a JSON schema.")
    options: OllamaOptions = NO_OPTIONS
    think: Think | None = Field(None, description="False: what the model thinks is left out.")
    logprobs: bool = False
    top_logprobs: int | None = None


def max_tokens(options: OllamaOptions) -> int | None:
    """Return the most tokens of the answer; None: up to the end of the context."""
    return options.num_predict if options.num_predict is not None and options.num_predict > 0 else None


def sampling_fields(request: OllamaFields) -> dict[str, Any]:
    """Return the fields of a request of OpenAI's that say the same; None: absent."""
    options = request.options
    return {
        "stream": request.stream,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": [*options.stop],
        "max_tokens": max_tokens(options),
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }


def chat_fields(request: OllamaFields) -> dict[str, Any]:
    """Return those, and what a chat has besides."""
    form: dict[str, Any] | None = None
    if isinstance(request.format, dict):
        form = {"type": "json_schema", "json_schema": {"schema": request.format}}
    elif request.format == "json":
        form = {"type": "json_object"}
    return sampling_fields(request) | {
        "response_format": form,
        "include_reasoning": request.think is not False,
        "enable_thinking": request.think if isinstance(request.think, bool) else None,
        "reasoning_effort": request.think if isinstance(request.think, str) else None,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs if request.logprobs else None,
    }


class OllamaFunctionCall(Fields):
    place: ClassVar[str] = "ollama.messages.tool_calls.function"

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Fields):
    """A call that the assistant made earlier."""

    place: ClassVar[str] = "ollama.messages.tool_calls"

    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(Fields):
    place: ClassVar[str] = "ollama.messages"

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Items[OllamaCall] = Field([])
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _calls_are_the_assistants(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls.")
        return self


class OllamaTool(Fields):
    type: Literal["function"] = "function"
    function: Function


class OllamaChatRequest(OllamaFields):
    """POST /api/chat"""

    place: ClassVar[str] = "ollama.chat"

    messages: Items[OllamaMessage] = Field([], description="None: the model is loaded, and nothing is written.")
    tools: Items[OllamaTool] = Field([])


class OllamaGenerateRequest(OllamaFields):
    """POST /api/generate"""

    place: ClassVar[str] = "ollama.generate"

    prompt: str = Field("", description="Empty: the model is loaded, and nothing is written.")
    system: str = ""
    raw: bool = Field(False, description="The prompt is continued as it is, without the chat template.")
    suffix: str = Field("", description="The answer stands between the prompt and this.")


class OllamaEmbedRequest(Fields):
    """POST /api/embed"""

    place: ClassVar[str] = "ollama.embed"

    model: Name
    input: str | Items[str] = Field([])
    truncate: bool = Field(True, description="A longer input loses its beginning.")
    dimensions: int | None = None


class OllamaOldEmbedRequest(Fields):
    """POST /api/embeddings"""

    place: ClassVar[str] = "ollama.embed"

    model: Name
    prompt: str = ""


class OllamaModelRequest(Fields):
    """POST /api/show, POST /api/pull"""

    place: ClassVar[str] = "ollama.models"

    model: Name = ""
    name: Name = Field("", description="The older name of model.")
    stream: bool = Field(True, description="Of a pull.")

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if not (self.model or self.name):
            raise ValueError("model is required.")
        return self


class OllamaCalledFunction(Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class OllamaMadeCall(Struct, frozen=True):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaMadeCall] | UnsetType = UNSET


class OllamaAnswer(Struct, frozen=True, kw_only=True):
    """An answer of chat or generate, whole or in part."""

    model: str
    created_at: str
    message: OllamaAnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    """Nanoseconds, as all durations are."""
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaEmbeddings(Struct, frozen=True, kw_only=True):
    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    embeddings: list[list[float]]


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def durations(usage: Usage, timings: Timings | None, load_s: float, total_s: float) -> dict[str, int]:
    """Return the counts and durations of a whole answer. `total_s` stands where no token was timed."""
    first_s = 0.0 if timings is None else timings.first_token_seconds
    queue_s = 0.0 if timings is None or timings.queue_seconds is None else timings.queue_seconds
    last_s = total_s if timings is None else timings.total_seconds
    return {
        "total_duration": nanoseconds(last_s),
        "load_duration": nanoseconds(load_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(first_s - queue_s - load_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(last_s - first_s),
    }


def now() -> str:
    return written_time(datetime.datetime.now(datetime.UTC))


def written_time(when: datetime.datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
