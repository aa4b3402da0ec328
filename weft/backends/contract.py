"""The engine contract: all that an endpoint (HTTP, gRPC, the Python API) knows of the engine behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from weft.engine_stats import EngineStats
from weft.errors import EngineFault, InvalidRequest, RequestTimeout, Unavailable, WeftError
from weft.options import ModelEntry
from weft.text.parsers.pieces import Piece
from weft.text.parsers.reasoning import ReasoningStyle
from weft.text.parsers.styles import ToolStyle
from weft.text.tokenizer import Tokenizer
from weft.types import (
    Adapter,
    ControlMessage,
    Conversation,
    Embed,
    FinishReason,
    GenerateImage,
    GenerationRequest,
    MixedPrompt,
    ModelInfo,
    Output,
    Prompt,
    Sample,
    SamplingDefaults,
    SamplingParams,
)


class Health(Struct, frozen=True):
    """The health of an engine. `ready` is true only while heartbeats come and requests are taken."""

    ready: bool
    reason: str = ""
    """The reason when it is not ready: starting, restarting, draining, failed."""
    gone: bool = False
    """True when a request found no server: a caller that has another engine need not wait for this one."""


def tokens_of(prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt, with placeholders for prompt embeds. It is text only where another engine was
    in use when the prompt was made, which raises Unavailable."""
    if isinstance(prompt, list):
        return prompt
    if isinstance(prompt, MixedPrompt):
        return prompt.token_ids
    raise Unavailable("The engine has changed while this request was on its way.", hint="Send it again.")


class Able(Protocol):
    """The part of an engine that tells what it can."""

    @property
    def name(self) -> str: ...

    @property
    def abilities(self) -> Abilities: ...


def tokens_unknown(engine: Able, what: str, param: str | None = None) -> InvalidRequest:
    """Return the error of an engine that is given text and not tokens, for `what` needs the tokens."""
    helps = "tokens" in engine.abilities.with_tokenizer
    return InvalidRequest(
        f"{what} needs the model's tokens, and the engine {engine.name} does not know them.",
        hint="The operator can name the model whose tokenizer it is with --tokenizer." if helps else "",
        param=param,
    )


def not_taken(engine_name: str, field: str) -> InvalidRequest:
    """Return the error for a request's field that an engine does not support."""
    return InvalidRequest(
        f"{field} is not supported by the engine {engine_name}.",
        hint="Leave it out, or serve the model with an engine that takes it (`weft engines` lists them).",
        param=field,
    )


def unknown_adapter(name: str, adapters: Iterable[Adapter]) -> InvalidRequest:
    there = ", ".join(adapter.name for adapter in adapters)
    return InvalidRequest(f"There is no adapter {name!r:.200}.", hint=f"There are: {there or 'none'}.", param="adapter")


def num_tokens(prompt: Prompt) -> int:
    """Return how many tokens a prompt has, as far as is known on this side: 0 for text."""
    return len(prompt) if isinstance(prompt, list | MixedPrompt) else 0


Take = Callable[[Output], Awaitable[None] | None]
"""Takes an output. What it returns, if anything, is awaited before it is given the next one."""


class ParsedOutput(Output, frozen=True, kw_only=True):
    """An output whose reasoning and tool calls the engine has parsed already. `text` is the content among the
    pieces."""

    pieces: Sequence[Piece] = ()


class Stream(Protocol):
    """The outputs of one request, as they come. One may carry several tokens: all that came since the last."""

    def __aiter__(self) -> Stream: ...

    async def __anext__(self) -> Output: ...

    async def follow(self, take: Take) -> None:
        """Give every output to `take`, to the last one. An engine may call it at once when a token comes, which costs
        less than to wake a task."""
        async for output in self:
            if (taking := take(output)) is not None:
                await taking

    async def aclose(self) -> None:
        """End the request, whether or not it was ever iterated; its memory is free before the next step."""


class OneOutput(Stream):
    """The stream of a request whose answer is there already, as one output."""

    def __init__(self, output: Output) -> None:
        self._output: Output | None = output

    def __aiter__(self) -> OneOutput:
        return self

    async def __anext__(self) -> Output:
        output, self._output = self._output, None
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        self._output = None


class ChatPrompt(Struct, frozen=True):
    """A conversation as the model's own chat template writes it."""

    text: str
    token_ids: list[int]


class ChatStyles(Struct, frozen=True):
    """A model's chat template, and its styles of tool calls and reasoning; None: it has none, as far as is known."""

    tools: ToolStyle | None = None
    reasoning: ReasoningStyle | None = None
    template: str = ""
    """The source of its chat template; empty: it has none."""
    variables: frozenset[str] = frozenset()
    """The variables that the template reads."""


class Abilities(Struct, frozen=True, kw_only=True):
    """The abilities of an engine besides plain sampling. What it is not able to do is refused, never dropped."""

    tokens: bool = True
    """Prompts are token ids, encoded on this side; else text and messages are passed on, and nothing that needs to
    know the model's tokens is possible."""
    answer_tokens: bool = True
    """The ids of the tokens that it generates are told, and not only their text."""
    with_tokenizer: frozenset[str] = frozenset()
    """The abilities that --tokenizer would add: `tokens`, and what comes with them."""
    seed: bool = True
    penalties: bool = True
    """Presence and frequency penalties."""
    repetition_penalty: bool = True
    top_k: bool = True
    min_p: bool = True
    logit_bias: bool = True
    logprobs: bool = True
    prompt_logprobs: bool = True
    stop_tokens: bool = True
    min_tokens: bool = True
    ignore_eos: bool = True
    speculative: bool = True
    """A request may choose whether its tokens are drafted."""
    prediction: bool = True
    """A request may bring a text to draft tokens from."""
    stop_in_output: bool = True
    """The text of a stop string may be a part of the answer."""
    special_tokens: bool = True
    """The text of special tokens may be a part of the answer."""
    grammar: bool = True
    """Structured output, and calls of tools that must come."""
    priority: bool = True
    fair_shares: bool = True
    """Tenants have equal shares, whatever priorities their requests have."""
    cache_salt: bool = True
    embeddings: bool = True
    images: bool = True
    lora: bool = True
    prompt_embeds: bool = True
    """Rows of a client may stand in the place of a prompt's tokens."""


class EngineText(Protocol):
    """The text side of a model: its tokenizer, its chat template, and how it writes what is not plain text."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest where it is not known (`Abilities.tokens`); so does `encode_chat`."""

    @property
    def styles(self) -> ChatStyles: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> ChatPrompt:
        """Write the messages as the model's own chat template does. Raises InvalidRequest.

        `continue_final_message`: the text ends with the last message's own, for the model to go on with.
        `max_tokens`: a conversation that surely has more is refused before it is written or encoded.
        """


class UnknownText:
    """The text of an engine that is given text and not tokens: everything that needs the tokens is refused."""

    styles = ChatStyles()
    sampling_defaults = SamplingDefaults()

    def __init__(self, engine: Able) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> Tokenizer:
        raise tokens_unknown(self._engine, "This")

    def encode_chat(self, *_: Any, **__: Any) -> ChatPrompt:
        raise tokens_unknown(self._engine, "This")


class Engine(Protocol):
    """One model that is served."""

    @property
    def name(self) -> str:
        """The kind of engine, as `weft engines` lists it."""

    @property
    def abilities(self) -> Abilities: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def text(self) -> EngineText: ...

    @property
    def adapters(self) -> Collection[Adapter]:
        """The LoRA adapters that requests may name now."""

    def check_capacity(self, tenant: str) -> None:
        """Raise Overloaded where no request of this tenant would be queued now, so that none is read and encoded only
        to be refused."""

    async def submit(self, request: GenerationRequest) -> Stream:
        """Check and queue one request; its outputs follow, the last one with `finish`.

        Raises InvalidRequest, Overloaded or Unavailable before anything is queued. A caller that stops reading early
        must close the stream.
        """

    def health(self) -> Health: ...

    def stats(self) -> EngineStats:
        """Return counters and gauges. Counters go on rising when the engine process behind them is replaced."""

    async def control(self, message: ControlMessage) -> str:
        """Carry out an operator's command, and return what the message says that it is answered with.

        Raises InvalidRequest for what this engine cannot do or has nothing to do for, ModelError for an adapter that is
        none of this model, and Unavailable.
        """

    async def close(self) -> None: ...


class Need(Struct, frozen=True, kw_only=True):
    """The memory that a model will take of its device, by the plan."""

    num_bytes: int = 0
    """Bytes in all; 0: none on this machine, or unknown."""
    libraries: int = 0
    """Bytes among them that libraries take."""
    problem: str = ""
    """The reason why it does not fit in what is free now; empty: it fits."""


StageReport = Callable[[str], None]
"""Called with every stage of a load."""
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
        """Return what is wrong with files on this machine; empty: nothing, or they are not here. It fetches nothing."""

    async def need(self, entry: ModelEntry, report: StageReport) -> Need:
        """Find, fetch and check the model, and plan its load. Raises what is wrong with it."""

    async def start(self, entry: ModelEntry, report: StageReport, make_room: FreeMemory) -> Engine:
        """Load it: while the memory is short and some can be freed, again, and only then with the next engine of a
        list. Raises what keeps it from being loaded."""


ENCODED_CONTEXTS = 4
"""A text is encoded as long as it may have so many contexts of tokens. One that is too long for the context is then
told its length, or loses its beginning where the request allows that; one that has more is refused before."""


def max_encoded_tokens(engine: Engine) -> int:
    return ENCODED_CONTEXTS * engine.model.max_model_len


def text_prompt(engine: Engine, text: str) -> Prompt:
    """Return a text as this engine takes it."""
    if not engine.abilities.tokens:
        return text
    return engine.text.tokenizer.encode(text, max_tokens=max_encoded_tokens(engine))


def chat_prompt(engine: Engine, messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """Return a conversation as this engine takes it."""
    if not engine.abilities.tokens:
        return Conversation(messages=messages)
    return engine.text.encode_chat(messages, max_tokens=max_encoded_tokens(engine)).token_ids


async def final_output(stream: Stream) -> Output:
    """Read a stream to its end, close it, and return its last output. Raises the error that it ended with."""
    try:
        async for output in stream:
            if failure := failure_of(output):
                raise failure
            if output.finish:
                return output
    finally:
        await stream.aclose()
    raise EngineFault("The engine ended a request without a reason.")


def failure_of(last: Output) -> WeftError | None:
    """Return the error that a stream's last output stands for; None when it ended as it should."""
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
    """The error of a kind of engine that cannot do something at all."""

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
    FieldRule("speculative", "speculative", lambda params: params.speculative is not None),
    FieldRule("prediction", "prediction", lambda params: bool(params.prediction)),
    FieldRule("include_stop_str_in_output", "stop_in_output", lambda params: params.include_stop_str_in_output),
    FieldRule("skip_special_tokens", "special_tokens", lambda params: not params.skip_special_tokens),
    FieldRule("structured_outputs", "grammar", lambda params: bool(params.grammar)),
)


def check_abilities(engine: Able, request: GenerationRequest) -> None:
    """Raise InvalidRequest for the first thing that this engine does not take, and NotSupported for its whole task."""
    abilities = engine.abilities
    match request.task:
        case Embed() if not abilities.embeddings:
            raise cannot(engine.name, "embed")
        case GenerateImage() if not abilities.images:
            raise cannot(engine.name, "generate images")
        case Sample(params=params):
            for rule in FIELD_RULES:
                if rule.by(params) and not getattr(abilities, rule.ability):
                    if rule.ability in abilities.with_tokenizer:
                        raise tokens_unknown(engine, rule.field, rule.field)
                    raise not_taken(engine.name, rule.field)
    if isinstance(request.prompt, MixedPrompt):
        check_takes_embeds(engine)
        if not isinstance(request.task, Sample):
            raise InvalidRequest("Only requests for tokens have prompt embeds in the prompt.", param="prompt_embeds")
    for field, ability in (("priority", "priority"), ("cache_salt", "cache_salt"), ("adapter", "lora")):
        if getattr(request, field) and not getattr(abilities, ability):
            raise not_taken(engine.name, field)


def check_takes_embeds(engine: Able, field: str = "prompt_embeds") -> None:
    """Raise InvalidRequest where rows of a client cannot stand in the place of a prompt's tokens."""
    if not engine.abilities.prompt_embeds:
        raise InvalidRequest(
            f"{field}: the engine {engine.name} takes no prompt embeds.",
            hint="Send the prompt as text or token ids; the operator can serve the model with --engine native.",
            param=field,
        )


def cannot(engine_name: str, what: str) -> NotSupported:
    """Return the error for a part of the contract that this kind of engine does not have."""
    return NotSupported(f"The engine {engine_name} cannot {what}.", hint="`weft engines` lists those that there are.")
