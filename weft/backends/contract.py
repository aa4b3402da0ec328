"""The engine contract: all that a door (HTTP, gRPC, the Python API) knows of whatever generates behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from weft.errors import EngineFault, InvalidRequest, RequestTimeout, Unavailable, WeftError
from weft.options import ModelEntry
from weft.payloads import NO_TEXTS, GivenTexts
from weft.text.parsers.pieces import Piece
from weft.text.parsers.reasoning import ReasoningStyle
from weft.text.parsers.styles import ToolStyle
from weft.text.tokenizer import Tokenizer
from weft.types import (
    Adapter,
    EngineStats,
    FinishReason,
    ImageParams,
    ModelInfo,
    Output,
    Pooling,
    SamplingParams,
    Usage,
)


class Health(Struct, frozen=True):
    """`ready` is true only while the engine's loop beats and takes requests."""

    ready: bool
    reason: str = ""
    """Why not, when not: starting, restarting, draining, failed."""
    gone: bool = False
    """A request found nobody there: whoever has another engine need not wait for this one."""


class Conversation(Struct, frozen=True, kw_only=True):
    """A chat as OpenAI's clients write it, for an engine behind which somebody else has the chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] = {}


Prompt = list[int] | str | Conversation
"""Token ids for an engine that computes with tokens; for one that does not know them (`Abilities.tokens`), text or a
conversation."""


def tokens_of(prompt: Prompt) -> list[int]:
    """Of a prompt for an engine that computes with tokens. It is text only where another engine was in use when the
    prompt was made."""
    if isinstance(prompt, list):
        return prompt
    raise Unavailable("The engine has changed while this request was on its way.", hint="Send it again.")


class Able(Protocol):
    """The part of an engine that tells what it can."""

    @property
    def name(self) -> str: ...

    @property
    def abilities(self) -> Abilities: ...


def tokens_unknown(engine: Able, what: str, param: str | None = None) -> InvalidRequest:
    """What an engine that is given text and not tokens says to `what` needs them."""
    helps = "tokens" in engine.abilities.with_tokenizer
    return InvalidRequest(
        f"{what} needs the model's tokens, and the engine {engine.name} does not know them.",
        hint="The operator can name the model whose tokenizer it is with --tokenizer." if helps else "",
        param=param,
    )


def not_taken(engine_name: str, field: str) -> InvalidRequest:
    """What an engine says to a request's field that it has no use for."""
    return InvalidRequest(
        f"{field} is not supported by the engine {engine_name}.",
        hint="Leave it out, or serve the model with an engine that takes it (`weft engines` lists them).",
        param=field,
    )


def unknown_adapter(name: str, adapters: Iterable[Adapter]) -> InvalidRequest:
    there = ", ".join(adapter.name for adapter in adapters)
    return InvalidRequest(f"There is no adapter {name!r:.200}.", hint=f"There are: {there or 'none'}.", param="adapter")


def num_tokens(prompt: Prompt) -> int:
    """As far as is known on this side: 0 for text."""
    return len(prompt) if isinstance(prompt, list) else 0


Take = Callable[[Output], Awaitable[None] | None]
"""Is given a delta. What it returns, if anything, is awaited before it is given the next one."""


class ParsedOutput(Output, frozen=True, kw_only=True):
    """Of an answer that was read where it was made: thoughts and calls are told apart already. `text` is the content
    among the pieces."""

    pieces: Sequence[Piece] = ()


class Terms(Struct, frozen=True, kw_only=True):
    """On which terms a request is computed, whatever it asks for."""

    request_id: str = ""
    """No two that are open have the same; empty: one is made up."""
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    adapter: str | None = None
    """The name of one of the engine's adapters; None: the one called `default`, if there is one; empty: the model as it
    is."""
    uncut: bool = False
    """Large pieces of text come as the engine gives them, and not in those of --stream-chunk-size."""


PLAIN_TERMS = Terms()


class Stream(Protocol):
    """The answer to one request, as it comes. A delta may carry several tokens: all that came since the last."""

    def __aiter__(self) -> Stream: ...

    async def __anext__(self) -> Output: ...

    async def follow(self, take: Take) -> None:
        """Give every delta to `take`, to the last one. An engine may call it at once when a token comes, which costs
        less than to wake a task."""
        async for delta in self:
            if (taking := take(delta)) is not None:
                await taking

    async def aclose(self) -> None:
        """End the request, whether or not it was ever iterated; its memory is free before the next step."""


class ChatPrompt(Struct, frozen=True):
    """A conversation as the model's own chat template writes it."""

    text: str
    token_ids: list[int]


class Embedding(Struct, frozen=True):
    """float32 values, and what they were made of."""

    data: bytes
    usage: Usage


class ImageUpdate(Struct, frozen=True, kw_only=True):
    """How far an image is."""

    step: int
    """How many of its steps are done."""
    image: bytes | None = None
    """Rows of RGB bytes: the image as it is after this step, when a preview was asked for, or it is the last."""
    finish: FinishReason | None = None
    error: str = ""
    usage: Usage = Usage()


class ImageUpdates(Protocol):
    """An image on its way: an update after every step, the last one with `finish`."""

    def __aiter__(self) -> ImageUpdates: ...

    async def __anext__(self) -> ImageUpdate: ...

    async def aclose(self) -> None:
        """End the request, whether or not it was ever iterated."""


class ChatStyles(Struct, frozen=True):
    """How this model writes what is not plain text; None: not at all, as far as is known."""

    tools: ToolStyle | None = None
    reasoning: ReasoningStyle | None = None


class Abilities(Struct, frozen=True, kw_only=True):
    """What an engine can be asked for besides plain sampling. What it cannot is refused, never dropped."""

    tokens: bool = True
    """Prompts are token ids, encoded on this side; else text and messages are passed on, and nothing that needs to
    know the model's tokens is possible."""
    answer_tokens: bool = True
    """The ids of the tokens that it generates are told, and not only their text."""
    with_tokenizer: frozenset[str] = frozenset()
    """What --tokenizer would add to these, of an engine that is not told it: `tokens`, and what comes with them."""
    seed: bool = True
    penalties: bool = True
    """Presence and frequency."""
    repetition_penalty: bool = True
    top_k: bool = True
    min_p: bool = True
    logit_bias: bool = True
    logprobs: bool = True
    prompt_logprobs: bool = True
    stop_tokens: bool = True
    min_tokens: bool = True
    ignore_eos: bool = True
    stop_in_output: bool = True
    """The text of a stop string may be a part of the answer."""
    special_tokens: bool = True
    """Their text may be a part of the answer."""
    grammar: bool = True
    """Structured output, and calls of tools that must come."""
    priority: bool = True
    cache_salt: bool = True
    embeddings: bool = True
    images: bool = True
    lora: bool = True


class Engine(Protocol):
    """One model that is served."""

    @property
    def name(self) -> str:
        """Of the kind of engine, as `weft engines` lists it."""

    @property
    def abilities(self) -> Abilities: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest where it is not known (`Abilities.tokens`); so does `encode_chat`."""

    @property
    def styles(self) -> ChatStyles: ...

    @property
    def adapters(self) -> Collection[Adapter]:
        """Those that requests may name now."""

    async def load_adapter(self, name: str, path: str) -> None:
        """From a directory of the engine's machine, which the operator named. When it returns, the engine has read it.
        Raises ModelError for what is no adapter of this model; InvalidRequest where there can be none
        (`Abilities.lora`)."""

    async def unload_adapter(self, name: str) -> None:
        """Requests that have begun with it go on. Raises InvalidRequest when there is none of that name."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The messages as the model's own chat template writes them. Raises InvalidRequest.

        `continue_final_message`: the text ends with the last message's own, for the model to go on with.
        """

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms = PLAIN_TERMS,
        *,
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> Stream:
        """Check and queue one request; its deltas follow, the last one with `finish`.

        `sibling_of` is the id of a request with the same prompt that was submitted before: the two share its blocks.
        `markers` are texts of special tokens that are shown whatever `skip_special_tokens` says: a parser needs them.

        Raises InvalidRequest, Overloaded or Unavailable before anything is queued. Whoever stops reading early
        must call `aclose`.
        """

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        """The prompt as one vector of length 1. Raises as `submit` does. Cancelling it ends the request."""

    async def draw(
        self, prompt_token_ids: list[int], image: ImageParams, terms: Terms = PLAIN_TERMS, given: GivenTexts = NO_TEXTS
    ) -> ImageUpdates:
        """Check and queue one image. Raises as `submit` does, and InvalidRequest when `model.images` is None or cannot
        draw this size or a prompt of this length.

        `given` are hidden states that it is drawn from instead of a prompt, which is empty then.
        """

    def health(self) -> Health: ...

    def stats(self) -> EngineStats:
        """Counters go on rising when the engine behind them is replaced."""

    def restarts(self) -> int:
        """How often the engine process was replaced."""

    def open_requests(self) -> int: ...

    async def reset_cache(self) -> int:
        """Forget the prompts that were computed, and return how many blocks of them were known. What is in use stays
        in use. Raises Unavailable."""

    async def start_profile(self, folder: str) -> str:
        """Record what the engine spends its time on, and return the file that will tell. Raises InvalidRequest when
        that is being done already, and Unavailable."""

    async def stop_profile(self) -> str:
        """Write what was recorded, and return the file. Raises InvalidRequest when nothing was, and Unavailable."""

    async def close(self) -> None: ...


class Need(Struct, frozen=True, kw_only=True):
    """What a model will take of its device, by the plan."""

    num_bytes: int = 0
    """In all; 0: nothing here, or nobody knows."""
    libraries: int = 0
    """Of them: what is not the model's own."""
    problem: str = ""
    """Why it does not fit in what is free now."""


StageReport = Callable[[str], None]
"""Hears how far a load is."""
FreeMemory = Callable[[str], Awaitable[bool]]
"""Gives up something that holds memory, for the reason it is told; false: there is nothing."""


class ConfiguredModels(Protocol):
    """The models that a server has names for, and how each of them is loaded."""

    @property
    def entries(self) -> Mapping[str, ModelEntry]: ...

    @property
    def default(self) -> str:
        """The model of requests that name none."""

    @property
    def memory_limit(self) -> int:
        """Bytes that all loaded models may take together; 0: what is free."""

    def refresh(self) -> bool:
        """Look whether the entries have changed, and take them in. What is wrong is logged, and changes nothing."""

    def reload(self) -> None:
        """Read the entries again. Raises ConfigError, and nothing has changed then."""

    def fault(self, entry: ModelEntry) -> str:
        """What is wrong with files that are here; empty: nothing, or they are not here. Fetches nothing."""

    async def need(self, entry: ModelEntry, report: StageReport) -> Need:
        """Find, fetch and check the model, and plan its load. Raises what is wrong with it."""

    async def start(self, entry: ModelEntry, report: StageReport, make_room: FreeMemory) -> Engine:
        """Load it: while the memory is short and room can be made, again, and only then with the next engine of a
        list. Raises what keeps it from being loaded."""


def text_prompt(engine: Engine, text: str) -> Prompt:
    """A text as this engine takes it."""
    return engine.tokenizer.encode(text) if engine.abilities.tokens else text


def chat_prompt(engine: Engine, messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """A conversation as this engine takes it."""
    return engine.encode_chat(messages).token_ids if engine.abilities.tokens else Conversation(messages=messages)


def failure_of(last: Output | ImageUpdate) -> WeftError | None:
    """The error that a request's last word stands for; None for an answer that ended as it should."""
    match last.finish:
        case None | FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return RequestTimeout(last.error or "The request took too long and was ended.")
        case FinishReason.REJECTED:
            return InvalidRequest(last.error or "The engine refused the request.")
        case FinishReason.ABORT:
            return Unavailable(last.error or "The server ended the request.")
        case FinishReason.ERROR:
            return EngineFault(last.error or "The engine failed while it worked on this request.")


class NotSupported(WeftError):
    """This kind of engine cannot do it at all, however it is asked."""

    status = 501
    grpc_code = "UNIMPLEMENTED"
    kind = "not_implemented"


class FieldRule(Struct, frozen=True):
    """A field of requests: the ability that it needs, and whether these parameters make use of it."""

    field: str
    ability: str
    by: Callable[[SamplingParams], bool]


FIELD_RULES = (
    FieldRule("seed", "seed", lambda params: params.seed is not None),
    FieldRule("presence_penalty", "penalties", lambda params: params.presence_penalty != 0),
    FieldRule("frequency_penalty", "penalties", lambda params: params.frequency_penalty != 0),
    FieldRule("repetition_penalty", "repetition_penalty", lambda params: params.repetition_penalty != 1),
    FieldRule("top_k", "top_k", lambda params: params.top_k != 0),
    FieldRule("min_p", "min_p", lambda params: params.min_p != 0),
    FieldRule("logit_bias", "logit_bias", lambda params: bool(params.logit_bias)),
    FieldRule("logprobs", "logprobs", lambda params: params.logprobs is not None),
    FieldRule("prompt_logprobs", "prompt_logprobs", lambda params: params.prompt_logprobs is not None),
    FieldRule("stop_token_ids", "stop_tokens", lambda params: bool(params.stop_token_ids)),
    FieldRule("min_tokens", "min_tokens", lambda params: params.min_tokens > 0),
    FieldRule("ignore_eos", "ignore_eos", lambda params: params.ignore_eos),
    FieldRule("include_stop_str_in_output", "stop_in_output", lambda params: params.include_stop_str_in_output),
    FieldRule("skip_special_tokens", "special_tokens", lambda params: not params.skip_special_tokens),
    FieldRule("structured_outputs", "grammar", lambda params: bool(params.grammar)),
)


def check_abilities(engine: Able, params: SamplingParams, terms: Terms = PLAIN_TERMS) -> None:
    """Raise InvalidRequest for the first thing that this engine does not take."""
    for rule in FIELD_RULES:
        if rule.by(params) and not getattr(engine.abilities, rule.ability):
            if rule.ability in engine.abilities.with_tokenizer:
                raise tokens_unknown(engine, rule.field, rule.field)
            raise not_taken(engine.name, rule.field)
    for field, ability in (("priority", "priority"), ("cache_salt", "cache_salt"), ("adapter", "lora")):
        if getattr(terms, field) and not getattr(engine.abilities, ability):
            raise not_taken(engine.name, field)


def cannot(engine_name: str, what: str) -> NotSupported:
    """For a method of the contract that this kind of engine has no answer to."""
    return NotSupported(f"The engine {engine_name} cannot {what}.", hint="`weft engines` lists those that there are.")
