"""An engine that plays a script: for errors, timing and odd outputs that no real model gives on demand."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from tests import virtual_time
from weft.backends.contract import (
    Abilities,
    ChatPrompt,
    ChatStyles,
    Health,
    Stream,
    tokens_of,
    unknown_adapter,
)
from weft.engine_stats import EngineStats
from weft.errors import ContextTooLong, InvalidRequest, ModelError, Overloaded, WeftError
from weft.payloads import Conditioning, DeclaredInput
from weft.scheduler.block_pool import BlockPool
from weft.text.tokenizer import FillInMiddle
from weft.types import (
    Adapter,
    ChunkSize,
    ControlMessage,
    Embed,
    FinishReason,
    GenerateImage,
    GenerationRequest,
    ImageModelInfo,
    ImageParams,
    LoadLora,
    MixedPrompt,
    ModelInfo,
    Output,
    Pooling,
    ReadBlocks,
    ResetPrefixCache,
    Sample,
    SamplingDefaults,
    SamplingParams,
    StartProfile,
    StopProfile,
    TokenLogprob,
    UnloadLora,
    Usage,
)

Condition = Callable[[], Awaitable[object]]

Step = Output | float | Condition | Exception
"""An output to give, seconds of virtual time or something else to wait for, or an error to raise."""


async def forever() -> None:
    """A condition that never comes about: a task that waits for it must be cancelled."""
    await asyncio.Event().wait()


async def next_turn() -> None:
    """A condition that holds in the loop's next turn."""
    await asyncio.sleep(0)


PAINTER = ImageModelInfo(
    name="painter",
    width=4,
    height=2,
    num_tokens=8,
    max_prompt_tokens=40,
    inputs={
        "prompt_embeds": DeclaredInput(stage="encode", shape=(40, 2), fewer_rows=True),
        "negative_prompt_embeds": DeclaredInput(stage="encode", shape=(40, 2), fewer_rows=True),
        "latents": DeclaredInput(stage="denoise", shape=(1, 2, 2)),
        "sigmas": DeclaredInput(stage="denoise"),
    },
    steps=6,
    guidance_scale=3.0,
)


class ScriptedTokenizer:
    """A token is a byte, and 0 the end of an answer."""

    special_ids = frozenset({0})
    fill_in_middle: FillInMiddle | None = None

    bos_token, eos_token = None, None
    named_ids: Mapping[str, int] = {}
    """Ids of tokens, by their names."""

    vocab_size = 256
    bos_token = None
    eos_token = "\0"

    def __init__(self, *, is_bounded: bool = False) -> None:
        """`is_bounded`: refuse texts that are too long, as a real one does."""
        self._is_bounded = is_bounded

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        if self._is_bounded:
            assert max_tokens is not None, "a client's text is encoded whatever its length"
            if len(text) > max_tokens:
                raise ContextTooLong(f"A text of {len(text)} characters has more than {max_tokens} tokens.")
        return list(text.encode())

    def check_chars(self, num_chars: int, max_tokens: int) -> None:
        if num_chars > max_tokens:
            raise ContextTooLong(f"A text of {num_chars} characters has more than {max_tokens} tokens.")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode()

    def token_id(self, token: str) -> int | None:
        return self.named_ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


class Submitted(Struct, frozen=True):
    prompt: list[int] | MixedPrompt
    params: SamplingParams
    request_id: str
    cache_salt: str
    priority: int
    tenant: str
    adapter: str | None
    sibling_of: str
    markers: tuple[str, ...]
    chunk_size: ChunkSize | None
    session: str = ""


class Embedded(Struct, frozen=True):
    prompt: list[int]
    pooling: Pooling
    cache_salt: str
    priority: int
    tenant: str
    adapter: str | None


class SubmittedImage(Struct, frozen=True):
    prompt: list[int]
    image: ImageParams
    cache_salt: str
    priority: int
    tenant: str
    conditioning: Conditioning


def picture(image: ImageParams, step: int) -> bytes:
    """What the scripted engine draws: every pixel tells the seed, the step and the guidance."""
    return bytes([image.seed % 256, step % 256, int(image.guidance_scale)]) * (image.width * image.height)


def all_steps(image: ImageParams, prompt_tokens: int) -> Iterator[Step]:
    for step in range(1, image.steps):
        shown = image.preview_every and step % image.preview_every == 0
        yield Output(denoise_step=step, image=picture(image, step) if shown else None)
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=10 * image.steps)
    yield Output(denoise_step=image.steps, image=picture(image, image.steps), finish=FinishReason.STOP, usage=usage)


def answer(*texts: str, finish: FinishReason = FinishReason.STOP, prompt_tokens: int = 3) -> list[Step]:
    """A script that gives these texts, the last one with the end."""
    completion_tokens = sum(len(text.encode()) for text in texts)
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=1)
    steps: list[Step] = [Output(text=text, token_ids=list(text.encode())) for text in texts[:-1]]
    last = texts[-1]
    return [*steps, Output(text=last, token_ids=list(last.encode()), finish=finish, usage=usage)]


def with_logprobs(text: str) -> list[Step]:
    """A script with a figure for every token: the chosen one's, and those of the tokens `a` and `b`."""
    logprobs = [TokenLogprob(-0.5, ((97, -0.25), (98, float("-inf")))) for _ in text]
    ids = list(text.encode())
    usage = Usage(prompt_tokens=3, completion_tokens=len(ids))
    return [
        Output(text=text[:1], token_ids=ids[:1], logprobs=logprobs[:1]),
        Output(text=text[1:], token_ids=ids[1:], logprobs=logprobs[1:], finish=FinishReason.LENGTH, usage=usage),
    ]


class ScriptedEngine:
    """It is its own text side, too."""

    name = "scripted"
    abilities = Abilities()

    def __init__(
        self,
        script: Sequence[Step] = (),
        *,
        refuse: WeftError | None = None,
        images: ImageModelInfo | None = None,
        tokenizer: ScriptedTokenizer | None = None,
        embeds_width: int = 0,
    ) -> None:
        self.model = ModelInfo(
            name="scripted",
            max_model_len=1000,
            logits_width=256,
            num_blocks=10,
            block_size=16,
            device="cpu",
            dtype="float32",
            images=images,
            embeds_width=embeds_width,
        )
        self.tokenizer: Any = tokenizer or ScriptedTokenizer()
        self.script = list(script or answer("Hello", ", ", "world"))
        self.refuse = refuse
        self.refuse_from = 0
        """With `refuse`: the first submission that is refused."""
        self.is_full = False
        """No request of any tenant would be queued."""
        self.state = Health(True)
        self.submitted: list[Submitted] = []
        self.embedded: list[Embedded] = []
        self.embed_when: Condition = next_turn
        """What a vector waits for."""
        self.drawn: list[SubmittedImage] = []
        self.image_script: Sequence[Step] | None = None
        """None: every step, to the end."""
        self.open: set[str] = set()
        self.held: set[str] = set()
        """Requests whose stream waits for a condition: all outputs before it have been taken in."""
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.template_variables: Mapping[str, Any] | None = None
        self.tools: Sequence[Mapping[str, Any]] | None = None
        self.continue_final_message = False
        self.styles = ChatStyles()
        self.sampling_defaults = SamplingDefaults()
        self.memory = (0, 0)
        """Allocated and reserved bytes."""
        self.add_generation_prompt = True
        self.closed = False
        self.adapters: list[Adapter] = []
        self.cache_resets = 0
        self.pool = BlockPool(11)
        self.block_reads: list[ReadBlocks] = []
        self.profiling = ""

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
        self.messages = list(messages)
        self.tools = tools
        self.add_generation_prompt = add_generation_prompt
        self.continue_final_message = continue_final_message
        self.template_variables = template_variables
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return ChatPrompt(text, self.tokenizer.encode(text, max_tokens=max_tokens))

    @property
    def text(self) -> ScriptedEngine:
        return self

    async def submit(self, request: GenerationRequest) -> Stream:
        match request.task:
            case Sample():
                return self._sample(request, request.task)
            case Embed(pooling):
                return self._embed(request, pooling)
            case GenerateImage():
                return self._generate_image(request, request.task)

    def _sample(self, request: GenerationRequest, task: Sample) -> Stream:
        request_id = self._opened(request, len(self.submitted))
        self.submitted.append(
            Submitted(
                request.prompt,  # type: ignore[arg-type]
                task.params,
                request_id,
                request.cache_salt,
                request.priority,
                request.tenant,
                request.adapter,
                request.sibling_of,
                task.markers,
                task.chunk_size,
                request.session,
            )
        )
        return _Play(self, request_id, iter(self.script))

    def _embed(self, request: GenerationRequest, pooling: Pooling) -> Stream:
        """A vector of the prompt's length and its first token."""
        request_id = self._opened(request, len(self.embedded))
        prompt = tokens_of(request.prompt)
        self.embedded.append(
            Embedded(prompt, pooling, request.cache_salt, request.priority, request.tenant, request.adapter)
        )
        vector = array("f", [len(prompt), prompt[0]]).tobytes()
        usage = Usage(prompt_tokens=len(prompt))
        last = Output(embedding=vector, finish=FinishReason.STOP, usage=usage)
        return _Play(self, request_id, iter([self.embed_when, last]))

    def _generate_image(self, request: GenerationRequest, task: GenerateImage) -> Stream:
        request_id = self._opened(request, len(self.drawn))
        prompt = tokens_of(request.prompt)
        self.drawn.append(
            SubmittedImage(prompt, task.params, request.cache_salt, request.priority, request.tenant, task.conditioning)
        )
        steps = all_steps(task.params, len(prompt)) if self.image_script is None else iter(self.image_script)
        return _Play(self, request_id, steps)

    def _opened(self, request: GenerationRequest, number: int) -> str:
        """The id of a request that is not refused."""
        if self.refuse is not None and number >= self.refuse_from:
            raise self.refuse
        request_id = request.request_id or f"own-{type(request.task).__name__}-{number}"
        assert request_id not in self.open
        self.open.add(request_id)
        return request_id

    def check_capacity(self, tenant: str) -> None:
        if self.is_full:
            raise Overloaded("2 requests are waiting already.")

    def health(self) -> Health:
        return self.state

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.open), waiting=2, prompt_tokens=7, generation_tokens=8, blocks_used=5,
            blocks_total=self.pool.num_usable,
            prefix_queries=9, prefix_hits=4, preemptions=3, drafts=2, draft_tokens=6, accepted_tokens=5, restarts=1,
            open_requests=len(self.open), memory_allocated=self.memory[0], memory_reserved=self.memory[1],
        )  # fmt: skip

    async def control(self, message: ControlMessage) -> str:
        match message:
            case LoadLora(name, path):
                if not path.startswith("/"):
                    raise ModelError(f"{path}: there is no adapter_config.json.")
                self.adapters.append(Adapter(name=name, number=len(self.adapters) + 1, path=path))
                return ""
            case UnloadLora(name):
                if name not in [adapter.name for adapter in self.adapters]:
                    raise unknown_adapter(name, self.adapters)
                self.adapters = [adapter for adapter in self.adapters if adapter.name != name]
                return ""
            case ResetPrefixCache():
                self.cache_resets += 1
                return "7"
            case StartProfile(folder):
                if self.profiling:
                    raise InvalidRequest("A trace is being recorded already.")
                self.profiling = f"{folder}/trace.json"
                return self.profiling
            case StopProfile():
                if not self.profiling:
                    raise InvalidRequest("No trace is being recorded.")
                file, self.profiling = self.profiling, ""
                return file
            case ReadBlocks(first, num_cells, blocks_per_cell):
                self.block_reads.append(message)
                return msgspec.json.encode(self.pool.cells(first, num_cells, blocks_per_cell)).decode()

    async def close(self) -> None:
        self.closed = True


class _Play(Stream):
    """Closing it ends the request even when nothing was taken from it, as the contract says."""

    def __init__(self, engine: ScriptedEngine, request_id: str, steps: Iterator[Step]) -> None:
        self._engine = engine
        self._request_id = request_id
        self._steps = steps

    def __aiter__(self) -> _Play:
        return self

    async def __anext__(self) -> Output:
        for step in self._steps:
            match step:
                case Output():
                    if step.finish:
                        self._engine.open.discard(self._request_id)
                    await asyncio.sleep(0)
                    return step
                case Exception():
                    raise step
                case float():
                    await virtual_time.sleep(step)
                case condition:
                    self._engine.held.add(self._request_id)
                    await condition()
                    self._engine.held.discard(self._request_id)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._engine.open.discard(self._request_id)
        self._engine.held.discard(self._request_id)
