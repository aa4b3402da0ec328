"""Any engine of the table behind the contract for callers that wait."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager
from functools import partial
from typing import Any

from msgspec import Struct

from weft import config as configuration
from weft.backends.blocking import BlockingEngine
from weft.backends.contract import Engine, Terms, not_taken, text_prompt, unknown_adapter
from weft.backends.failover import Asked, start_engine
from weft.backends.model_text import check_prompt
from weft.backends.preflight import check_engine
from weft.backends.rechunk import cut_text
from weft.backends.safe_loading import LoadStage, Start, load_safely
from weft.backends.starting import Load
from weft.checkpoint.adapter_files import DEFAULT_ADAPTER, adapter_settings
from weft.compat.base_engine import BaseEngine, InferMetrics
from weft.compat.keywords import GenerationKeywords, LoadKeywords, generation_keywords, load_keywords
from weft.errors import InvalidRequest, Unavailable
from weft.machine.memory import GIB
from weft.options import Config
from weft.types import FinishReason, Output


class HostedEngine(BaseEngine):
    def __init__(self, engine: str = "auto", **settings: Any) -> None:
        """`settings` are for every model that is loaded; `engine` as in `--engine`, where auto leaves the choice to the
        environment."""
        self._words = settings if engine == "auto" else {**settings, "engine": engine}
        self._looped: BlockingEngine | None = None
        self._stage = LoadStage("resolve")
        self._loading = threading.Lock()
        self._configure({})

    @property
    def is_async(self) -> bool:
        return True

    # The model.

    def load_model(self, model_path: str, adapter_path: str | None = None, **kwargs: Any) -> None:
        """`kwargs` are settings of Weft, and `LoadKeywords`. With load_mode async_load it returns at once:
        `get_model_info` tells the stage, `health_check` when it is done. With check_only what is loaded stays."""
        wishes, config = self._configure({**kwargs, "model": model_path}, adapter_path)
        with self._loading:
            if wishes.load_mode == "check_only":
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(asyncio.run, check_engine(config)).result()
                return
            self._unload()
            load: Load[Engine] = _as_it_is if wishes.skip_vram_check else partial(load_safely, report=self._note)
            in_background = wishes.load_mode == "async_load"
            self._looped = BlockingEngine(lambda: start_engine(config, load), in_background=in_background)

    def _configure(self, words: dict[str, Any], adapter_path: str | None = None) -> tuple[LoadKeywords, Config]:
        wishes, chosen = load_keywords({**self._words, **words})
        adapters = wishes.adapters | ({DEFAULT_ADAPTER: adapter_path} if adapter_path else {})
        if adapters:
            chosen["adapter"] = [*chosen.get("adapter", ()), *adapter_settings(adapters)]
        config = configuration.load(chosen)
        if not words or "stream_chunk_size" in words:
            self.stream_chunk_size = config.backend.stream_chunk_size
        return wishes, config

    def _note(self, stage: LoadStage) -> None:
        self._stage = stage

    def unload_model(self) -> None:
        with self._loading:
            self._unload()

    def _unload(self) -> None:
        looped, self._looped = self._looped, None
        if looped is not None:
            looped.close()

    def get_model_info(self) -> dict[str, Any]:
        looped = self._looped
        if looped is None:
            return super().get_model_info()
        if not looped.is_started:
            failed = {"stage": "failed", "error": str(looped.failure)} if looped.failure is not None else {}
            return {**super().get_model_info(), "stage": self._stage.stage, **failed}
        model = looped.engine.model
        return {
            "is_loaded": True,
            "engine": looped.engine.name,
            "stage": "ready",
            "name": model.name,
            "max_model_len": model.max_model_len,
            "device": model.device,
            "dtype": model.dtype,
            "load_seconds": model.load_seconds,
        }

    def get_memory_usage(self) -> dict[str, float]:
        """As the engine told when the model was loaded; all 0 without a model, and where an engine does not tell."""
        looped = self._looped
        if looped is None or not looped.is_started:
            return dict.fromkeys(("allocated_gb", "reserved_gb", "total_gb", "utilization"), 0.0)
        memory = looped.engine.model.memory
        allocated = memory.weights + memory.kv
        return {
            "allocated_gb": allocated / GIB,
            "reserved_gb": (allocated + memory.activations + memory.graphs) / GIB,
            "total_gb": memory.total / GIB,
            "utilization": allocated / memory.total if memory.total else 0.0,
        }

    def health_check(self) -> bool:
        looped = self._looped
        return looped is not None and looped.is_started and looped.engine.health().ready

    # Answers.

    def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
        """A request that cannot be is refused here; it begins with the first piece that is asked for."""
        looped = self._loaded()
        return self._stream(looped, _question(looped.engine, prompt, kwargs))

    def _stream(self, looped: BlockingEngine, question: _Question) -> Generator[str, None, None]:
        with (
            self._watched(question) as watch,
            closing(looped.follow(question.asked.submit, question.wishes.request_id, watch.saw)) as deltas,
        ):
            count = _TokenCount()
            for delta in deltas:
                yield from self._pieces(delta.text, count.added_by(delta))

    async def async_infer(self, prompt: str, **kwargs: Any) -> AsyncGenerator[str, None]:
        looped = self._loaded()
        question = await asyncio.to_thread(_question, looped.engine, prompt, kwargs)
        with self._watched(question) as watch:
            answer = looped.follow_async(question.asked.submit, question.wishes.request_id, watch.saw)
            count = _TokenCount()
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    for piece in self._pieces(delta.text, count.added_by(delta)):
                        yield piece

    def infer_batch(self, prompts: Sequence[str], **kwargs: Any) -> list[str]:
        """The engine has all of them at once. Of several, a `request_id` is numbered: id-0, id-1. `abort` ends one of
        them by that, or all by the id itself, and what had come is returned."""
        looped = self._loaded()
        given = kwargs.get("request_id")
        questions = [
            _question(
                looped.engine,
                prompt,
                kwargs | ({"request_id": f"{given}-{number}"} if given else {}),
            )
            for number, prompt in enumerate(prompts)
        ]
        watches = [_Watch(question.wishes) for question in questions]
        try:
            answers = looped.collect(
                [question.asked.submit for question in questions],
                [watch.saw for watch in watches],
                [question.wishes.request_id for question in questions],
                given or uuid.uuid4().hex,
            )
        finally:
            for watch in watches:
                self._tell(watch)
        return ["".join(delta.text for delta in answer) for answer in answers]

    def abort(self, request_id: str) -> bool:
        looped = self._looped
        return looped is not None and looped.abort(request_id)

    def _loaded(self) -> BlockingEngine:
        looped = self._looped
        if looped is None:
            raise Unavailable("No model is loaded.", hint="Call load_model first.")
        return looped

    def _pieces(self, text: str, num_tokens: int) -> Iterator[str]:
        return cut_text(text, num_tokens, lambda: self.stream_chunk_size)

    @contextmanager
    def _watched(self, question: _Question) -> Iterator[_Watch]:
        """However the request ends, its figures are told once."""
        watch = _Watch(question.wishes)
        try:
            yield watch
        except Exception:
            watch.finish = FinishReason.ERROR
            raise
        finally:
            self._tell(watch)

    def _tell(self, watch: _Watch) -> None:
        self.last_metrics = metrics = watch.metrics()
        if watch.wishes.on_metrics is not None:
            watch.wishes.on_metrics(metrics)


async def _as_it_is(start: Start, config: Config) -> Engine:
    return await start(config)


class _Question(Struct, frozen=True):
    """A prompt that an engine can be asked to continue."""

    asked: Asked
    wishes: GenerationKeywords


def _question(engine: Engine, text: str, words: dict[str, Any]) -> _Question:
    """Raises InvalidRequest for what this engine cannot answer."""
    if not text:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    prompt = text_prompt(engine, text)
    room = engine.model.max_model_len - len(prompt) if isinstance(prompt, list) else None
    wishes = generation_keywords(words, engine.abilities, room)
    if isinstance(prompt, list):
        check_prompt(engine.model, prompt, wishes.params)
    if wishes.lora_name and not engine.abilities.lora:
        raise not_taken(engine.name, "lora_name")
    if wishes.lora_name and wishes.lora_name not in [adapter.name for adapter in engine.adapters]:
        raise unknown_adapter(wishes.lora_name, engine.adapters)
    terms = Terms(
        request_id=wishes.request_id,
        cache_salt=wishes.cache_salt,
        priority=wishes.priority,
        adapter=wishes.lora_name,
        uncut=True,
    )
    return _Question(Asked(prompt=prompt, params=wishes.params, terms=terms), wishes)


class _TokenCount:
    """Tokens of an answer, as far as is known: by their ids, or by what its engine counted."""

    num_tokens = 0

    def added_by(self, delta: Output) -> int:
        before = self.num_tokens
        self.num_tokens = max(before + len(delta.token_ids), delta.usage.completion_tokens)
        return self.num_tokens - before


class _Watch:
    """The times and the tokens of one answer, when they come: how fast they are read is no matter."""

    def __init__(self, wishes: GenerationKeywords) -> None:
        self.wishes = wishes
        self.finish = FinishReason.ABORT
        """Until it is known better."""
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._count = _TokenCount()
        self._queue_seconds: float | None = None
        self._num_prompt_tokens = 0

    def saw(self, delta: Output) -> None:
        self._count.added_by(delta)
        if delta.text or delta.token_ids:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        if delta.queue_seconds is not None:
            self._queue_seconds = delta.queue_seconds
        self.finish = delta.finish or self.finish
        self._num_prompt_tokens = delta.usage.prompt_tokens or self._num_prompt_tokens

    def metrics(self) -> InferMetrics:
        return InferMetrics(
            request_id=self.wishes.request_id,
            finish=self.finish,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._count.num_tokens,
            queue_seconds=self._queue_seconds,
            ttft_seconds=self._first - self._began if self._first is not None else 0.0,
            generation_seconds=self._last - self._began,
        )
