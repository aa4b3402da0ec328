"""The structs that pass between packages: requests, parameters, outputs, and how a request ends."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from weft.engine_stats import MemoryLedger
from weft.errors import InvalidRequest, in_full
from weft.payloads import Conditioning, DeclaredInput, EmbedsSegment, PromptEmbeds


class FinishReason(enum.StrEnum):
    """Every request ends exactly once, with one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"
    TIMEOUT = "timeout"


MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARS = 1 << 20
MAX_CACHE_SALT = 256
MAX_SESSION = 512


class SamplingParams(Struct, frozen=True, kw_only=True):
    """The parameters that choose the next token, and the conditions that end an output."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    """The sampled tokens depend on the seed and the position alone; without one, a random seed is drawn."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    max_tokens: int | None = None
    """None: up to the end of the context."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: no log probabilities. k: the chosen token's, and those of the k likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, but the first: nothing stands before it."""
    grammar: str = ""
    """The grammar of the output, as `weft.text.grammars` writes it; empty: none."""
    speculative: bool | None = None
    """Whether tokens are drafted and verified several in a step, which changes none of them; None: as the engine is
    set."""
    prediction: tuple[int, ...] = ()
    """Token ids of a text that the answer is expected to repeat: a source of drafts, also where the engine is not set
    to draft."""

    def check(self) -> None:
        """Raise InvalidRequest for a value that no model could honour."""
        _in_range("temperature", self.temperature, 0, 100)
        _in_range("top_p", self.top_p, 0, 1, open_low=True)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).", param="min_tokens"
                )
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.grammar:
            self._check_grammar()
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS}.", param="stop")
        if any(not s or len(s) > MAX_STOP_LENGTH for s in self.stop):
            raise InvalidRequest(f"A stop string must have 1 to {MAX_STOP_LENGTH} characters.", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"{len(self.stop_token_ids)} stop_token_ids; at most {MAX_STOP_TOKEN_IDS}.", param="stop_token_ids"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"{len(self.logit_bias)} logit_bias entries; at most {MAX_LOGIT_BIAS}.", param="logit_bias"
            )
        for bias in self.logit_bias.values():
            _in_range("logit_bias", bias, -100, 100)

    def _check_grammar(self) -> None:
        if len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"The output's grammar has more than {MAX_GRAMMAR_CHARS} characters.")
        for name, contradicts in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens > 0)):
            if contradicts:
                raise InvalidRequest(f"{name} cannot go with structured output, which ends where it ends.", param=name)

    def check_token_ids(self, logits_width: int) -> None:
        """Raise InvalidRequest for a token id that the model's logits do not have."""
        for param in ("logit_bias", "stop_token_ids", "prediction"):
            check_token_ids(getattr(self, param), logits_width, param)


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """The sampling parameters of requests that leave them out: a model's own, where its files have some."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """None: up to the end of the context, which an answer never exceeds."""

    def params(self) -> SamplingParams:
        """Return the parameters of a request that gives none. The engine resolves `max_tokens`."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


def check_token_ids(ids: Collection[int], logits_width: int, param: str) -> None:
    if not ids:
        return
    for token in (min(ids), max(ids)):
        if not 0 <= token < logits_width:
            raise InvalidRequest(
                f"{param} has the token id {token}; this model's ids run from 0 to {logits_width - 1}.", param=param
            )


LOWEST_PRIORITY = 2**31 - 1


def check_priority(priority: int) -> None:
    """Raise InvalidRequest for a priority that does not fit into 32 bits."""
    _in_range("priority", priority, -(2**31), LOWEST_PRIORITY)


def check_cache_salt(cache_salt: str) -> None:
    if len(cache_salt) > MAX_CACHE_SALT:
        raise InvalidRequest(
            f"cache_salt has {len(cache_salt)} characters; at most {MAX_CACHE_SALT}.", param="cache_salt"
        )


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # Written so that NaN is refused, and an integer too large for a float is still compared.
    if not low <= value <= high or (open_low and value == low):
        bound = f"{'above' if open_low else 'at least'} {in_full(low)}"
        raise InvalidRequest(f"{name} is {in_full(value)}; it must be {bound} and at most {in_full(high)}.", param=name)


class Pooling(enum.StrEnum):
    """The way in which the hidden states of a prompt become one vector."""

    MEAN = "mean"
    LAST = "last"


MAX_DENOISE_STEPS = 1000
MAX_GUIDANCE = 50.0
MAX_IMAGE_TEXT = 4000
FlowSampler = Literal["euler", "heun"]
VELOCITIES: dict[FlowSampler, int] = {"euler": 1, "heun": 2}
"""How often a step of each sampler asks for the velocity."""


class ImageParams(Struct, frozen=True, kw_only=True):
    """The parameters of one image. Every default is resolved by the endpoint, from the model's."""

    width: int
    height: int
    steps: int
    guidance_scale: float
    """How far the prompt steers away from the negative one; 1: the prompt alone, in one pass a step instead of two."""
    seed: int
    sampler: FlowSampler = "euler"
    negative_token_ids: list[int] = []
    """Empty: away from no prompt at all."""
    prompt_text: str = ""
    negative_text: str = ""
    """The negative prompt as text. A model that reads text is sent both prompts so, and no tokens."""
    preview_every: int = 0
    """The number of steps between two previews; 0: none."""

    def check(self) -> None:
        _in_range("num_inference_steps", self.steps, 1, MAX_DENOISE_STEPS)
        _in_range("guidance_scale", self.guidance_scale, 0, MAX_GUIDANCE)
        _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        _in_range("preview_every", self.preview_every, 0, MAX_DENOISE_STEPS)
        for name, size in (("width", self.width), ("height", self.height)):
            _in_range(name, size, 1, 16384)
        if self.sampler not in VELOCITIES:
            raise InvalidRequest(f"There is no sampler {self.sampler!r}.", param="sampler")
        for name, text in (("prompt", self.prompt_text), ("negative_prompt", self.negative_text)):
            if len(text) > MAX_IMAGE_TEXT:
                raise InvalidRequest(
                    f"{name} has {len(text)} characters; it must be at most {MAX_IMAGE_TEXT}.", param=name
                )

    def check_read(self, prompt_token_ids: list[int], *, reads_text: bool) -> None:
        """Raise InvalidRequest for prompts in a form that the model cannot read, and for what a model that reads text
        does in its own way."""
        if reads_text and (prompt_token_ids or self.negative_token_ids):
            raise InvalidRequest("This model reads prompts as text, and no tokens.", param="prompt")
        if not reads_text and (self.prompt_text or self.negative_text):
            raise InvalidRequest("This model reads prompts as tokens, and no text.", param="prompt")
        if reads_text and self.sampler != "euler":
            raise InvalidRequest(
                f"sampler is {self.sampler}; this model makes steps with a scheduler of its own.", param="sampler"
            )

    @property
    def passes(self) -> int:
        """Passes of the model for one velocity."""
        return 1 if self.guidance_scale == 1 else 2

    @property
    def passes_per_step(self) -> int:
        return self.passes * VELOCITIES[self.sampler]


class Adapter(Struct, frozen=True, kw_only=True):
    """A LoRA adapter: a directory as PEFT writes it."""

    name: str
    number: int
    """The number that the engine knows it by: counted, and the same in every engine that is started again."""
    path: str


class LatentCheckpoint(Struct, frozen=True):
    """The state of an image after some of its steps, from which another engine goes on."""

    step: int
    """Steps that were made."""
    latents: bytes
    """float32: the latents, then what a pipeline's scheduler remembers, each in the latents' shape."""


class TraceContext(Struct, frozen=True):
    """The place of a request in a trace. It goes with the request from an edge to a replica."""

    traceparent: str
    """The span of the edge, as the header of W3C's Trace Context names it."""
    replica: str = ""
    """The replica that the request is sent to, by the name that the edge has for it."""
    moves: int = 0
    """Replicas that were lost while they had the request."""


class Request(Struct, frozen=True, kw_only=True):
    """One generation as the engine sees it: integers only, every default resolved."""

    request_id: str
    prompt_token_ids: list[int]
    """One id for each position; PLACEHOLDER_ID where a row of prompt embeds stands."""
    params: SamplingParams
    """`seed` and `max_tokens` are set."""
    stop_token_ids: list[int] = []
    """Ids that end the output: the model's end-of-sequence ids unless ignored, and the request's own."""
    output_token_ids: list[int] = []
    """Tokens that the user already has: not empty when a request is resumed in a new engine."""
    cache_salt: str = ""
    """Requests share cached prompt blocks only with requests of the same salt."""
    priority: int = 0
    """Of a tenant's waiting requests those of the lowest number go first."""
    tenant: str = ""
    """The tenant whose request it is: tenants get equal shares of the engine."""
    session: str = ""
    """Requests of one session are sent to one of several replicas, while that costs little."""
    sibling_of: str = ""
    """The id of a request with the same prompt, whose blocks this one shares as soon as they are computed."""
    pooling: Pooling | None = None
    """Set: the answer is a vector made of the prompt's hidden states, and no token is sampled."""
    image: ImageParams | None = None
    """Set: the answer is an image, generated from the prompt's hidden states."""
    conditioning: Conditioning = Conditioning()
    """Hidden states that the client of an image sent instead of prompts, and other inputs of the image model."""
    checkpoint: LatentCheckpoint | None = None
    """Set: an image that another engine has begun goes on from here."""
    adapter: Adapter | None = None
    """None: the model as it is."""
    embeds: list[EmbedsSegment] = []
    """Rows that enter the model in the place of the embeddings of token ids, in the order of their positions."""
    trace: TraceContext | None = None
    """None: it is not traced."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors that the client sent."""
        return self.conditioning.num_bytes + sum(segment.embeds.data.nbytes for segment in self.embeds)

    @property
    def prompt_digest(self) -> tuple[list[int], list[tuple[int, bytes]]]:
        """Token ids, and digests of rows with their positions, which tell two prompts apart."""
        return self.prompt_token_ids, [(segment.start, segment.digests) for segment in self.embeds]

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens that are computed before there is an answer."""
        return len(self.prompt_token_ids) + (len(self.image.negative_token_ids) if self.image is not None else 0)

    def check_given(self, image: ImageParams, inputs: Mapping[str, DeclaredInput]) -> None:
        """Raise InvalidRequest for what a client sent for its image that the image model does not take, and for
        prompts that are given twice."""
        if self.conditioning.prompt is not None and (self.prompt_token_ids or image.prompt_text):
            raise InvalidRequest("prompt_embeds: there is a prompt already.", param="prompt_embeds")
        if self.conditioning.negative is not None and (image.negative_token_ids or image.negative_text):
            raise InvalidRequest("negative_prompt_embeds: there is a negative prompt already.", param="negative_prompt")
        self.conditioning.check(inputs, steps=image.steps)


class Conversation(Struct, frozen=True, kw_only=True):
    """A chat in the form of OpenAI's clients, for an engine that applies the chat template itself."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] = {}


PLACEHOLDER_ID = 0
"""The token id that stands in a prompt where a row of prompt embeds does. It is never looked up."""


class MixedPrompt(Struct, frozen=True):
    """A prompt of token ids and of rows of prompt embeds."""

    token_ids: list[int]
    """One id for each position; PLACEHOLDER_ID where a row stands."""
    embeds: list[EmbedsSegment]

    @classmethod
    def of(cls, parts: Iterable[Sequence[int] | PromptEmbeds]) -> MixedPrompt:
        """Join token ids and tensors that were checked. It takes a while: every row is hashed."""
        token_ids: list[int] = []
        segments: list[EmbedsSegment] = []
        for part in parts:
            if isinstance(part, PromptEmbeds):
                segments.append(EmbedsSegment(len(token_ids), part, part.row_digests()))
                token_ids += [PLACEHOLDER_ID] * part.shape[0]
            else:
                token_ids += part
        return cls(token_ids, segments)

    def __len__(self) -> int:
        return len(self.token_ids)

    def parts(self) -> Iterator[list[int] | PromptEmbeds]:
        """Return what it was joined of."""
        at = 0
        for segment in self.embeds:
            if at < segment.start:
                yield self.token_ids[at : segment.start]
            yield segment.embeds
            at = segment.stop
        if at < len(self.token_ids):
            yield self.token_ids[at:]


Prompt = list[int] | MixedPrompt | str | Conversation
"""Token ids, and prompt embeds among them, for an engine that computes with tokens; text or a conversation for one that
does not know them."""


class ChunkSize(Struct):
    """The tokens in a piece of an answer, after the first token, which comes alone. It may change while answers run."""

    tokens: int = 0
    """0: they come as they are made."""


class Sample(Struct, frozen=True, kw_only=True):
    """The task to generate tokens."""

    params: SamplingParams
    markers: tuple[str, ...] = ()
    """Texts of special tokens that are shown whatever `skip_special_tokens` says, because a parser needs them."""
    call_marker: str = ""
    """The text with which the model begins a tool call; empty: none, or the request has no tools."""
    chunk_size: ChunkSize | None = None
    """The size of the answer's pieces, where the caller has one of its own; None: the engine's."""


class Embed(Struct, frozen=True):
    """The task to turn the prompt into one vector of length 1."""

    pooling: Pooling = Pooling.MEAN


class GenerateImage(Struct, frozen=True, kw_only=True):
    """The task to generate one image."""

    params: ImageParams
    conditioning: Conditioning = Conditioning()
    """Hidden states that the client sent instead of a prompt, which is empty then, and other inputs of the model."""


Task = Sample | Embed | GenerateImage


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """One request to an engine, whichever endpoint it came through and whatever it asks for."""

    prompt: Prompt
    task: Task
    request_id: str = ""
    """Unique among the open requests; empty: the engine makes one up."""
    cache_salt: str = ""
    """The client's own: its requests share cached prompt blocks only with those of the same salt."""
    priority: int = 0
    """Of a tenant's waiting requests those of the lowest number go first."""
    tenant: str = ""
    shares_cache: bool = False
    """True: cached prompt blocks are shared with other tenants."""
    session: str = ""
    """The client's own name of a conversation: with several replicas its requests are sent to the same one."""
    adapter: str | None = None
    """The name of a LoRA adapter; None: the one called `default`, if there is one; empty: the model as it is."""
    sibling_of: str = ""
    """The id of a request with the same prompt that was submitted before: the two share its blocks."""
    trace: TraceContext | None = None
    """None: it is not traced."""

    @property
    def tenant_salt(self) -> str:
        """The salt that the engine gets. The tenant is a part of it, so that how much of a prompt was cached tells no
        tenant what others asked."""
        if not self.tenant or self.shares_cache:
            return self.cache_salt
        return hashlib.blake2b(repr((self.tenant, self.cache_salt)).encode(), digest_size=16).hexdigest()

    @property
    def tenant_session(self) -> str:
        """The session that the engine gets: short, and apart from other tenants' sessions of the same name."""
        named = repr((self.tenant, self.session[:MAX_SESSION])).encode()
        return hashlib.blake2b(named, digest_size=8).hexdigest() if self.session else ""


class LoadLora(Struct, frozen=True, tag=True):
    """The control message to load a LoRA adapter from a directory of the engine's machine, which the operator named."""

    name: str
    path: str
    within_roots: bool = False
    """True when it came over the network: the directory must be below a folder of --adapter-root."""


class UnloadLora(Struct, frozen=True, tag=True):
    """The control message to unload a LoRA adapter. Requests that have begun with it go on."""

    name: str


class ResetPrefixCache(Struct, frozen=True, tag=True):
    """The control message to forget the prompts that were computed. It is answered with the number of blocks."""


class StartProfile(Struct, frozen=True, tag=True):
    """The control message to record what the engine spends its time on. It is answered with the file to come."""

    folder: str


class StopProfile(Struct, frozen=True, tag=True):
    """The control message to write what was recorded. It is answered with the file."""


class ReadBlocks(Struct, frozen=True, tag=True):
    """The control message to count the blocks of the KV cache that are in use, and the free ones that are cached, in
    cells of neighbouring blocks from the block `first` on. It is answered with both lists of counts, in JSON."""

    first: int
    num_cells: int
    blocks_per_cell: int


class SetChunkSize(Struct, frozen=True, tag=True):
    """The control message to set the tokens in a piece of an answer, of answers that run too; 0: as they are made."""

    tokens: int


ControlMessage = LoadLora | UnloadLora | ResetPrefixCache | StartProfile | StopProfile | ReadBlocks | SetChunkSize


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """The log probability of the chosen token, and of the likeliest tokens as (id, logprob).

    An answer may have a million of these. As tuples of numbers the garbage collector lets them alone; a collection that
    went through lists would hold up every stream."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The event that one step brought one request. The last event of a request, and no other, has `finish`."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the prefix cache held, on a request's first event."""
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the output, when one did; it is the last of `token_ids`."""
    draft_tokens: int = 0
    """Tokens that were drafted and verified."""
    accepted_tokens: int = 0
    """Drafted tokens that were right: the first of `token_ids`."""
    error: str = ""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log probabilities of every prompt token but the first, on the first event, when asked for."""
    queue_seconds: float | None = None
    """Seconds that it waited in this engine before it was admitted, on a request's first event."""
    embedding: bytes | None = None
    """The last event of a request with `pooling`: a vector of float32."""
    denoise_step: int | None = None
    """Steps of an image that are done."""
    image: bytes | None = None
    """The image after that step, a preview or the last: rows of RGB bytes."""
    checkpoint: LatentCheckpoint | None = None
    """The state of an image after that step, which the journal keeps."""

    @property
    def is_plain(self) -> bool:
        """True when it tells of one more token and of nothing else: a first event always tells of cached tokens."""
        return self.finish is None and self.logprobs is None and self.cached_tokens is None and len(self.token_ids) == 1


class StepEvents(Struct):
    """The tokens and events that a step brought to the requests in it."""

    tokens: dict[str, int] = {}
    """The token of every request to which the step brought one token and nothing else, by request id."""
    events: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self.tokens or self.events)


Arrival = Event | int
"""The item that a step brought one request: an event, or a token id alone for one that would tell of nothing else."""


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    """Tokens that were drafted and verified."""
    accepted_tokens: int = 0
    """Drafted tokens that are in the answer."""


class Timings(Struct, frozen=True, kw_only=True):
    """The times of one answer, from its request's arrival."""

    queue_seconds: float | None
    """None: unknown."""
    first_token_seconds: float
    total_seconds: float
    tokens: int

    @property
    def inter_token_seconds(self) -> float:
        """Seconds between two tokens on average; 0 with fewer than two."""
        return (self.total_seconds - self.first_token_seconds) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Output(Struct, frozen=True, kw_only=True):
    """One item of a stream: new text and its tokens, a vector, or an image's progress; the last one has `finish`."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended the output, when one did."""
    error: str = ""
    usage: Usage = Usage()
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log probabilities of every prompt token but the first, with the first output, when asked for."""
    queue_seconds: float | None = None
    """Seconds in the engine's queue: told once, with the first output or the last, or never."""
    embedding: bytes | None = None
    """The vector of an Embed task, float32, with its last output."""
    denoise_step: int | None = None
    """How many steps of a GenerateImage task are done."""
    image: bytes | None = None
    """The image after that step, a preview or the last: rows of RGB bytes."""
    timings: Timings | None = None
    """The times of the answer, with the last output of an endpoint that took them."""


class ImageModelInfo(Struct, frozen=True, kw_only=True):
    """The facts about the image model that endpoints need."""

    name: str
    width: int
    height: int
    num_tokens: int
    """Tokens that an image counts as in one pass of the model."""
    max_prompt_tokens: int
    reads_text: bool = False
    """True when it encodes prompts by itself, and is sent their text."""
    inputs: dict[str, DeclaredInput] = {}
    """The inputs that its stages take from clients: `prompt_embeds`, and entries of additional information."""
    steps: int
    guidance_scale: float
    """The last two: for a request that does not say."""


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The facts about the loaded model that the api process needs."""

    name: str
    max_model_len: int
    logits_width: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    memory: MemoryLedger = MemoryLedger()
    load_seconds: float = 0.0
    images: ImageModelInfo | None = None
    """The model that draws beside this one, from its hidden states."""
    embeds_width: int = 0
    """Values of a row of prompt embeds; 0: prompts have none."""


class TextAssets(Struct, frozen=True, kw_only=True):
    """The text side of a model's files, free of formats: vocabulary and chat template."""

    kind: str
    """json: `tokenizer_json` is a tokenizers file. gpt2, llama: the vocabulary fields are set, as in a GGUF file."""
    tokenizer_json: str = ""
    tokens: list[str] = []
    scores: list[float] = []
    token_types: list[int] = []
    """GGUF's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte."""
    merges: list[str] = []
    pre: str = ""
    """The name of the pre-tokenizer, for kind gpt2."""
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    eos_token_ids: list[int] = []
    """Every id that ends an answer: the tokenizer's, and those of the generation config."""
    sampling: dict[str, Any] = {}
    """Values for fields of `SamplingDefaults` that the files recommend. They are not checked."""
    chat_template: str | None = None
