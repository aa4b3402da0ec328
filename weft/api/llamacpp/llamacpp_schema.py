"""The requests and answers of llama.cpp's server, as far as Weft has what they are about."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from msgspec import UNSET, Raw, Struct, UnsetType
from pydantic import Field, PlainValidator, model_validator

from weft.api.body import Fields
from weft.api.openai.openai_schema import Items, Message, Name, Tool, stop_strings
from weft.api.openai.tokenize import TokenizeRequest
from weft.types import Timings, Usage

LlamaPrompt = str | list[int] | list[int | str]
"""Text, token ids, or one prompt of both."""


def _prompts(value: object) -> list[LlamaPrompt]:
    """Return one prompt or several. A list that has a number in it is one prompt."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) in (int, str) for item in value):
            return [value] if any(type(item) is int for item in value) else value
        if all(isinstance(item, str) or _is_mixed(item) for item in value):
            return value
    raise ValueError("it must be a string, a list of token ids and strings, or a list of such prompts.")


def _is_mixed(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) in (int, str) for item in value)


Bias = tuple[int | str, float]
NEVER = -100.0
"""The bias of a token that must not come: the lowest there is."""


def _biases(value: object) -> list[Bias]:
    pairs = [*value.items()] if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise ValueError("it must be a list of pairs, or an object.")
    return [_bias(pair) for pair in pairs]


def _bias(pair: Any) -> Bias:
    match pair:
        case (int() | str() as key, False):
            return key, NEVER
        case (int() | str() as key, float() | int() as bias):
            return key, float(bias)
    raise ValueError("its items must be pairs of a token id or a text, and a number or false.")


class LlamaSampling(Fields):
    """The base of completion and infill has the fields that both take."""

    place: ClassVar[str] = "llamacpp.completion"

    model: Name | None = None
    n_predict: int = Field(-1, description="-1: up to the end of the context; 0: the prompt is computed.")
    max_tokens: int | None = Field(None, description="Another name of n_predict.")
    stream: bool = False
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = Field(None, description="-1: a random one.")
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool = False
    logit_bias: Annotated[list[Bias], PlainValidator(_biases)] = Field(
        [], description="Pairs of a token id or a text, and what is added, or an object of them; false: never."
    )
    n_probs: int = Field(0, description="Log probabilities of every token, and so many likely ones.")
    grammar: str = Field("", description="In GBNF, or in Lark's notation.")
    json_schema: dict[str, Any] | None = None
    return_tokens: bool = False

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if self.grammar and self.json_schema is not None:
            raise ValueError("json_schema and grammar both say what to write.")
        return self


def num_predict(request: LlamaSampling) -> int:
    return request.n_predict if request.max_tokens is None else request.max_tokens


def completion_fields(request: LlamaSampling) -> dict[str, Any]:
    """Return the fields of a completion of OpenAI's that say the same; None: absent."""
    form: dict[str, Any] | None = None
    if request.json_schema is not None:
        form = {"json": request.json_schema}
    elif request.grammar:
        form = {"grammar": request.grammar}
    return {
        "max_tokens": max(1, num_predict(request)),
        "stream": request.stream,
        "stop": [*request.stop],
        "temperature": request.temperature,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "top_p": request.top_p,
        "min_p": request.min_p,
        "seed": None if request.seed == -1 else request.seed,
        "repetition_penalty": request.repeat_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "ignore_eos": request.ignore_eos,
        "structured_outputs": form,
        "logprobs": request.n_probs if request.n_probs > 0 else None,
    }


class LlamaCompletionRequest(LlamaSampling):
    """POST /completion"""

    prompt: Annotated[list[LlamaPrompt], PlainValidator(_prompts)]


class InfillFile(Fields):
    filename: str = ""
    text: str


class InfillRequest(LlamaSampling):
    """POST /infill"""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Items[InfillFile] = Field([], description="Other files, which come before.")
    prompt: str = Field("", description="How the middle begins.")


class ApplyTemplateRequest(Fields):
    """POST /apply-template"""

    model: Name | None = None
    messages: Annotated[Items[Message], Field(min_length=1)]
    tools: Items[Tool] = Field([])
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables for the model's chat template.")


class LlamaTokenizeRequest(TokenizeRequest):
    """POST /tokenize: llama.cpp's fields beside those that are there without it."""

    place: ClassVar[str] = "llamacpp.tokenize"

    content: str | None = Field(None, description="The text; the answer has llama.cpp's shape.")
    add_special: bool = False
    with_pieces: bool = False


class LlamaTimings(Struct, frozen=True, kw_only=True):
    cache_n: int
    """Tokens of the prompt that were cached."""
    prompt_n: int
    """Tokens of the prompt that were computed."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaAnswer(Struct, frozen=True, kw_only=True):
    """An answer, whole or in part; only the last has what is not always set."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    completion_probabilities: Raw | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET


def llama_timings(usage: Usage, timings: Timings | None) -> LlamaTimings:
    queue_s = 0.0 if timings is None or timings.queue_seconds is None else timings.queue_seconds
    prompt_s = 0.0 if timings is None else max(0.0, timings.first_token_seconds - queue_s)
    answer_s = 0.0 if timings is None else max(0.0, timings.total_seconds - timings.first_token_seconds)
    computed, made = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    return LlamaTimings(
        cache_n=usage.cached_tokens,
        prompt_n=computed,
        prompt_ms=1000 * prompt_s,
        prompt_per_token_ms=1000 * prompt_s / computed if computed else 0.0,
        prompt_per_second=computed / prompt_s if prompt_s else 0.0,
        predicted_n=made,
        predicted_ms=1000 * answer_s,
        predicted_per_token_ms=1000 * answer_s / made if made else 0.0,
        predicted_per_second=made / answer_s if answer_s else 0.0,
    )
