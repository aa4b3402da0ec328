"""An engine that another package wrote as a class of BaseEngine, behind the engine contract.

Its tokens are not known here: prompts are text, and so are answers. How many tokens there were it tells itself, in
`last_metrics`; where it does not, words are counted.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Mapping
from typing import Any, assert_never

import msgspec
from msgspec.structs import replace

from weft.backends.contract import (
    Abilities,
    Health,
    Stream,
    UnknownText,
    cannot,
    check_abilities,
    not_taken,
    unknown_adapter,
)
from weft.backends.rechunk import RechunkedStream, split_words
from weft.checkpoint.adapter_files import DEFAULT_ADAPTER, adapter_paths
from weft.compat.base_engine import BaseEngine, InferMetrics
from weft.engine_stats import EngineStats
from weft.errors import InvalidRequest
from weft.options import Config, settings
from weft.types import (
    Adapter,
    ChunkSize,
    ControlMessage,
    FinishReason,
    GenerationRequest,
    LoadLora,
    ModelInfo,
    Output,
    ReadBlocks,
    ResetPrefixCache,
    Sample,
    SamplingParams,
    SetChunkSize,
    StartProfile,
    StopProfile,
    UnloadLora,
    Usage,
)

log = logging.getLogger(__name__)

KEYWORDS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "stop", "seed")
"""The parameters that `infer` is told, where they are not at their default; besides always `request_id`, and
`lora_name` where a request names an adapter."""

ABILITIES = msgspec.convert(
    {name: name in KEYWORDS for name in Abilities.__struct_fields__ if name != "with_tokenizer"}, Abilities
)
DEFAULT_PARAMS = SamplingParams()
NOT_PASSED = frozenset({"model", "adapter", "engine"})
"""Settings that `load_model` has other keywords for, or no use."""


async def start_adapted(engine_class: type[BaseEngine], config: Config) -> AdaptedEngine:
    """Make an engine of the class, and load the model that the configuration names."""
    inner = engine_class()
    adapters = adapter_paths(config)
    default = adapters.pop(DEFAULT_ADAPTER, None)
    keywords = settings_of(config) | ({"adapters": adapters} if adapters else {})
    await asyncio.to_thread(inner.load_model, config.model.model, default, **keywords)
    return AdaptedEngine(inner, config)


def settings_of(config: Config) -> dict[str, Any]:
    """Return what `load_model` is told: the settings of models and engines that are not at their default."""
    values = {
        setting.name: (getattr(getattr(config, setting.section), setting.name), setting.default)
        for setting in settings("model", "backend", "cache", "scheduler")
        if setting.name not in NOT_PASSED
    }
    return {name: value for name, (value, default) in values.items() if value != default}


class AnswerMetrics:
    """The token counts of one answer: at its end those of its engine, until then, or without them, its words."""

    def __init__(self, engine: AdaptedEngine, prompt: str, request_id: str) -> None:
        self._engine = engine
        self._prompt = prompt
        self._request_id = request_id
        self._num_words = 0

    def piece(self, text: str) -> Output:
        """Return the output for a piece of text, which is a token at least: engines that stream give one at a time."""
        self._num_words += max(1, len(split_words(text)))
        return Output(text=text, usage=Usage(completion_tokens=self._num_words))

    def last(self) -> Output:
        if (told := self._told()) is None:
            usage = Usage(prompt_tokens=len(split_words(self._prompt)), completion_tokens=self._num_words)
            return Output(finish=FinishReason.STOP, usage=usage)
        usage = Usage(prompt_tokens=told.prompt_tokens, completion_tokens=told.completion_tokens)
        return Output(finish=told.finish, usage=usage, queue_seconds=told.queue_seconds)

    def _told(self) -> InferMetrics | None:
        """Return the engine's metrics of this request; None where it has none, or those of another."""
        told = self._engine.inner.last_metrics
        if told is None:
            self._engine.note_silence()
        return told if told is not None and told.request_id == self._request_id else None


class AdaptedStream(Stream):
    """The outputs of one call of `async_infer`."""

    def __init__(self, engine: AdaptedEngine, prompt: str, keywords: Mapping[str, Any]) -> None:
        self._engine = engine
        self._metrics = AnswerMetrics(engine, prompt, keywords["request_id"])
        self._chunks = engine.inner.async_infer(prompt, **keywords)
        self._ended = False
        engine.open.add(self)

    def __aiter__(self) -> AdaptedStream:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        try:
            return self._metrics.piece(await anext(self._chunks))
        except StopAsyncIteration:
            self._end()
            return self._metrics.last()
        except asyncio.CancelledError:
            self._end()
            raise
        except Exception as error:
            self._end()
            log.exception("the engine %s failed", self._engine.name)
            return Output(finish=FinishReason.ERROR, error=f"{type(error).__name__}: {error}")

    async def aclose(self) -> None:
        self._end()
        await self._chunks.aclose()

    def _end(self) -> None:
        self._ended = True
        self._engine.open.discard(self)


class AdaptedEngine:
    """An object of a BaseEngine class, behind the engine contract."""

    def __init__(self, inner: BaseEngine, config: Config) -> None:
        self.name = config.backend.engine
        self.inner = inner
        paths = adapter_paths(config)
        self.adapters: Collection[Adapter] = [
            Adapter(name=name, number=number, path=path) for number, (name, path) in enumerate(paths.items(), 1)
        ]
        self.abilities = replace(ABILITIES, lora=bool(paths))
        self.text = UnknownText(self)
        self._chunk_size = ChunkSize(config.backend.stream_chunk_size)
        self._noted_silence = False
        self.open: set[AdaptedStream] = set()
        info = inner.get_model_info()
        self.model = ModelInfo(
            name=str(info.get("name", config.model.model)),
            max_model_len=int(info.get("max_model_len", 0)),
            logits_width=0,
            num_blocks=0,
            block_size=0,
            device=str(info.get("device", "")),
            dtype=str(info.get("dtype", "")),
        )

    def check_capacity(self, tenant: str) -> None:
        """Refuse nothing: the queue is the other side's."""

    async def submit(self, request: GenerationRequest) -> Stream:
        check_abilities(self, request)
        task, prompt = request.task, request.prompt
        assert isinstance(task, Sample), "the abilities have no other task"
        task.params.check()
        if not isinstance(prompt, str):
            raise InvalidRequest(
                f"The engine {self.name} takes text, and neither conversations nor token ids.",
                hint="Send a plain prompt to /v1/completions instead.",
            )
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if request.adapter and request.adapter not in [adapter.name for adapter in self.adapters]:
            raise unknown_adapter(request.adapter, self.adapters)
        values = {name: getattr(task.params, name) for name in KEYWORDS}
        keywords = {name: value for name, value in values.items() if value != getattr(DEFAULT_PARAMS, name)}
        keywords["request_id"] = request.request_id or uuid.uuid4().hex
        if request.adapter is not None and self.adapters:
            keywords["lora_name"] = request.adapter
        return RechunkedStream(AdaptedStream(self, prompt, keywords), task.chunk_size or self._chunk_size)

    async def control(self, message: ControlMessage) -> str:
        match message:
            case LoadLora() | UnloadLora():
                raise not_taken(self.name, "adapter")
            case SetChunkSize(tokens=tokens):
                self._chunk_size.tokens = tokens
                return ""
            case ResetPrefixCache():
                raise cannot(self.name, "forget prompts")
            case StartProfile() | StopProfile():
                raise cannot(self.name, "be profiled")
            case ReadBlocks():
                raise cannot(self.name, "tell which blocks are in use")
        assert_never(message)

    def note_silence(self) -> None:
        if not self._noted_silence:
            self._noted_silence = True
            log.warning("The engine %s leaves no last_metrics: words are counted for its tokens.", self.name)

    def health(self) -> Health:
        try:
            is_well = self.inner.health_check()
        except Exception:
            log.exception("the engine %s cannot tell how it is", self.name)
            is_well = False
        return Health(True) if is_well else Health(False, "failed")

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.open), open_requests=len(self.open))

    async def close(self) -> None:
        await asyncio.to_thread(self.inner.unload_model)
