"""An engine that another package wrote as a class of BaseEngine, behind the contract that the doors know.

Its tokens are not known here: prompts are text, and so are answers. How many there were it tells itself, in
`last_metrics`; where it does not, words are counted.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from weft.backends.contract import (
    PLAIN_TERMS,
    Abilities,
    ChatPrompt,
    ChatStyles,
    Embedding,
    Health,
    ImageUpdates,
    Prompt,
    Stream,
    Terms,
    cannot,
    check_abilities,
    not_taken,
    tokens_unknown,
    unknown_adapter,
)
from weft.backends.rechunk import RechunkedStream, split_words
from weft.checkpoint.adapter_files import DEFAULT_ADAPTER, adapter_paths
from weft.compat.base_engine import BaseEngine, InferMetrics
from weft.errors import InvalidRequest
from weft.options import Config, settings
from weft.payloads import NO_TEXTS, GivenTexts
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

log = logging.getLogger(__name__)

WORDS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "stop", "seed")
"""What `infer` is told of a request's parameters, where they are not at their default; besides always `request_id`, and
`lora_name` where a request names an adapter."""

ABILITIES = msgspec.convert(
    {name: name in WORDS for name in Abilities.__struct_fields__ if name != "with_tokenizer"}, Abilities
)
PLAIN = SamplingParams()
SAID_BESIDE = frozenset({"model", "adapter", "engine"})
"""Settings that `load_model` has other words for, or no use."""


async def start_adapted(engine_class: type[BaseEngine], config: Config) -> AdaptedEngine:
    """Make one, and load the model that the configuration names."""
    inner = engine_class()
    adapters = adapter_paths(config)
    default = adapters.pop(DEFAULT_ADAPTER, None)
    words = settings_of(config) | ({"adapters": adapters} if adapters else {})
    await asyncio.to_thread(inner.load_model, config.model.model, default, **words)
    return AdaptedEngine(inner, config)


def settings_of(config: Config) -> dict[str, Any]:
    """What `load_model` is told: the settings of models and engines that are not at their default."""
    given = {
        setting.name: (getattr(getattr(config, setting.section), setting.name), setting.default)
        for setting in settings("model", "backend", "cache", "scheduler")
        if setting.name not in SAID_BESIDE
    }
    return {name: value for name, (value, default) in given.items() if value != default}


class AnswerFigures:
    """What is known of one answer: at its end what its engine tells of it, until then, or else, its words."""

    def __init__(self, engine: AdaptedEngine, prompt: str, request_id: str) -> None:
        self._engine = engine
        self._prompt = prompt
        self._request_id = request_id
        self._num_words = 0

    def piece(self, text: str) -> Output:
        """A piece is a token at least: engines that stream give one at a time."""
        self._num_words += max(1, len(split_words(text)))
        return Output(text=text, usage=Usage(completion_tokens=self._num_words))

    def last(self) -> Output:
        if (told := self._told()) is None:
            usage = Usage(prompt_tokens=len(split_words(self._prompt)), completion_tokens=self._num_words)
            return Output(finish=FinishReason.STOP, usage=usage)
        usage = Usage(prompt_tokens=told.prompt_tokens, completion_tokens=told.completion_tokens)
        return Output(finish=told.finish, usage=usage, queue_seconds=told.queue_seconds)

    def _told(self) -> InferMetrics | None:
        """None: nothing, or of another request that has ended since."""
        told = self._engine.inner.last_metrics
        if told is None:
            self._engine.note_silence()
        return told if told is not None and told.request_id == self._request_id else None


class AdaptedStream(Stream):
    def __init__(self, engine: AdaptedEngine, prompt: str, words: Mapping[str, Any]) -> None:
        self._engine = engine
        self._figures = AnswerFigures(engine, prompt, words["request_id"])
        self._chunks = engine.inner.async_infer(prompt, **words)
        self._ended = False
        engine.open.add(self)

    def __aiter__(self) -> AdaptedStream:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        try:
            return self._figures.piece(await anext(self._chunks))
        except StopAsyncIteration:
            self._end()
            return self._figures.last()
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
    styles = ChatStyles()

    def __init__(self, inner: BaseEngine, config: Config) -> None:
        self.name = config.backend.engine
        self.inner = inner
        paths = adapter_paths(config)
        self.adapters: Collection[Adapter] = [
            Adapter(name=name, number=number, path=path) for number, (name, path) in enumerate(paths.items(), 1)
        ]
        self.abilities = replace(ABILITIES, lora=bool(paths))
        self._chunk_size = config.backend.stream_chunk_size
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

    @property
    def tokenizer(self) -> Tokenizer:
        raise tokens_unknown(self, "This")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        raise tokens_unknown(self, "This")

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms = PLAIN_TERMS,
        *,
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> Stream:
        params.check()
        check_abilities(self, params, terms)
        if not isinstance(prompt, str):
            raise InvalidRequest(
                f"The engine {self.name} takes text, and neither conversations nor token ids.",
                hint="Send a plain prompt to /v1/completions instead.",
            )
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if terms.adapter and terms.adapter not in [adapter.name for adapter in self.adapters]:
            raise unknown_adapter(terms.adapter, self.adapters)
        given = {word: getattr(params, word) for word in WORDS}
        words = {word: value for word, value in given.items() if value != getattr(PLAIN, word)}
        words["request_id"] = terms.request_id or uuid.uuid4().hex
        if terms.adapter is not None and self.adapters:
            words["lora_name"] = terms.adapter
        answer = AdaptedStream(self, prompt, words)
        return answer if terms.uncut else RechunkedStream(answer, self._chunk_size)

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        raise cannot(self.name, "embed")

    async def draw(
        self, prompt_token_ids: list[int], image: ImageParams, terms: Terms = PLAIN_TERMS, given: GivenTexts = NO_TEXTS
    ) -> ImageUpdates:
        raise cannot(self.name, "draw images")

    async def load_adapter(self, name: str, path: str) -> None:
        raise not_taken(self.name, "adapter")

    async def unload_adapter(self, name: str) -> None:
        raise not_taken(self.name, "adapter")

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
        return EngineStats(running=len(self.open))

    def restarts(self) -> int:
        return 0

    def open_requests(self) -> int:
        return len(self.open)

    async def reset_cache(self) -> int:
        raise cannot(self.name, "forget prompts")

    async def start_profile(self, folder: str) -> str:
        raise cannot(self.name, "be profiled")

    async def stop_profile(self) -> str:
        raise cannot(self.name, "be profiled")

    async def close(self) -> None:
        await asyncio.to_thread(self.inner.unload_model)
