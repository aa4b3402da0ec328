"""The engines of the registry as BaseEngines, for callers that block."""

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
from weft.backends.contract import Engine, not_taken, text_prompt, unknown_adapter
from weft.backends.failover import start_engine
from weft.backends.model_text import check_prompt
from weft.backends.preflight import check_engine
from weft.backends.safe_loading import LoadStage, Start, load_safely
from weft.backends.starting import Load
from weft.checkpoint.adapter_files import DEFAULT_ADAPTER, adapter_settings
from weft.compat.base_engine import BaseEngine, InferMetrics
from weft.compat.keywords import GenerationKeywords, LoadKeywords, generation_keywords, load_keywords
from weft.errors import InvalidRequest, Unavailable
from weft.machine.memory import GIB
from weft.options import Config
from weft.types import ChunkSize, FinishReason, GenerationRequest, Output, Sample


class HostedEngine(BaseEngine):
    """An engine of the registry, with the methods of BaseEngine."""

    def __init__(self, engine: str = "auto", **settings: Any) -> None:
        """Keep `settings` for every model that is loaded; `engine` is as in `--engine`, where auto leaves the choice to
        the environment."""
        self._settings = settings if engine == "auto" else {**settings, "engine": engine}
        self._blocking: BlockingEngine | None = None
        self._stage = LoadStage("resolve")
        self._loading = threading.Lock()
        self._chunks = ChunkSize()
        self._configure({})

    @property
    def is_async(self) -> bool:
        return True

    @property
    def stream_chunk_size(self) -> int:
        return self._chunks.tokens

    @stream_chunk_size.setter
    def stream_chunk_size(self, tokens: int) -> None:
        self._chunks.tokens = max(1, tokens)

    # The model.

    def load_model(self, model_path: str, adapter_path: str | None = None, **kwargs: Any) -> None:
        """Load a model. `kwargs` are settings of Weft, and `LoadKeywords`. With load_mode async_load it returns at
        once: `get_model_info` tells the stage, `health_check` when it is done. With check_only what is loaded stays."""
        keywords, config = self._configure({**kwargs, "model": model_path}, adapter_path)
        with self._loading:
            if keywords.load_mode == "check_only":
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(asyncio.run, check_engine(config)).result()
                return
            self._unload()
            load: Load[Engine] = _load_directly if keywords.skip_vram_check else partial(load_safely, report=self._note)
            in_background = keywords.load_mode == "async_load"
            self._blocking = BlockingEngine(lambda: start_engine(config, load), in_background=in_background)

    def _configure(self, given: dict[str, Any], adapter_path: str | None = None) -> tuple[LoadKeywords, Config]:
        keywords, chosen = load_keywords({**self._settings, **given})
        adapters = keywords.adapters | ({DEFAULT_ADAPTER: adapter_path} if adapter_path else {})
        if adapters:
            chosen["adapter"] = [*chosen.get("adapter", ()), *adapter_settings(adapters)]
        if "stream_chunk_size" in chosen and isinstance(chosen["stream_chunk_size"], int):
            chosen["stream_chunk_size"] = max(1, chosen["stream_chunk_size"])
        config = configuration.load(chosen)
        if not given or "stream_chunk_size" in given:
            self._chunks.tokens = config.backend.stream_chunk_size
        return keywords, config

    def _note(self, stage: LoadStage) -> None:
        self._stage = stage

    def unload_model(self) -> None:
        with self._loading:
            self._unload()

    def _unload(self) -> None:
        blocking, self._blocking = self._blocking, None
        if blocking is not None:
            blocking.close()

    def get_model_info(self) -> dict[str, Any]:
        blocking = self._blocking
        if blocking is None:
            return super().get_model_info()
        if not blocking.is_started:
            failed = {"stage": "failed", "error": str(blocking.failure)} if blocking.failure is not None else {}
            return {**super().get_model_info(), "stage": self._stage.stage, **failed}
        model = blocking.engine.model
        return {
            "is_loaded": True,
            "engine": blocking.engine.name,
            "stage": "ready",
            "name": model.name,
            "max_model_len": model.max_model_len,
            "device": model.device,
            "dtype": model.dtype,
            "load_seconds": model.load_seconds,
        }

    def get_memory_usage(self) -> dict[str, float]:
        """Return what the engine's device has in use now; all 0 without a model, or where the engine does not tell."""
        blocking = self._blocking
        if blocking is None or not blocking.is_started:
            return dict.fromkeys(("allocated_gb", "reserved_gb", "total_gb", "utilization"), 0.0)
        stats, total = blocking.engine.stats(), blocking.engine.model.memory.total
        return {
            "allocated_gb": stats.memory_allocated / GIB,
            "reserved_gb": stats.memory_reserved / GIB,
            "total_gb": total / GIB,
            "utilization": stats.memory_allocated / total if total else 0.0,
        }

    def health_check(self) -> bool:
        blocking = self._blocking
        return blocking is not None and blocking.is_started and blocking.engine.health().ready

    # Answers.

    def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
        """Stream the answer to a prompt. What cannot be answered is refused here; the request begins with the first
        piece that is read."""
        blocking = self._loaded()
        return self._stream(blocking, _call_of(blocking.engine, prompt, kwargs, self._chunks))

    def _stream(self, blocking: BlockingEngine, call: _Call) -> Generator[str, None, None]:
        with (
            self._timed(call) as timer,
            closing(blocking.follow(call.request, timer.observe)) as outputs,
        ):
            yield from (output.text for output in outputs if output.text)

    async def async_infer(self, prompt: str, **kwargs: Any) -> AsyncGenerator[str, None]:
        blocking = self._loaded()
        call = await asyncio.to_thread(_call_of, blocking.engine, prompt, kwargs, self._chunks)
        with self._timed(call) as timer:
            async with aclosing(blocking.follow_async(call.request, timer.observe)) as outputs:
                async for output in outputs:
                    if output.text:
                        yield output.text

    def infer_batch(self, prompts: Sequence[str], **kwargs: Any) -> list[str]:
        """Answer several prompts at once. Their `request_id` is numbered: id-0, id-1. `abort` ends one of them by that,
        or all by the id itself, and what had come is returned."""
        blocking = self._loaded()
        given = kwargs.get("request_id")
        calls = [
            _call_of(
                blocking.engine, prompt, kwargs | ({"request_id": f"{given}-{number}"} if given else {}), self._chunks
            )
            for number, prompt in enumerate(prompts)
        ]
        timers = [_CallTimer(call.keywords) for call in calls]
        try:
            answers = blocking.collect(
                [call.request for call in calls], [timer.observe for timer in timers], given or uuid.uuid4().hex
            )
        finally:
            for timer in timers:
                self._report(timer)
        return ["".join(output.text for output in answer) for answer in answers]

    def abort(self, request_id: str) -> bool:
        blocking = self._blocking
        return blocking is not None and blocking.abort(request_id)

    def _loaded(self) -> BlockingEngine:
        blocking = self._blocking
        if blocking is None:
            raise Unavailable("No model is loaded.", hint="Call load_model first.")
        return blocking

    @contextmanager
    def _timed(self, call: _Call) -> Iterator[_CallTimer]:
        """Time a call, and report its metrics once, however it ends."""
        timer = _CallTimer(call.keywords)
        try:
            yield timer
        except Exception:
            timer.finish = FinishReason.ERROR
            raise
        finally:
            self._report(timer)

    def _report(self, timer: _CallTimer) -> None:
        self.last_metrics = metrics = timer.metrics()
        if timer.keywords.on_metrics is not None:
            timer.keywords.on_metrics(metrics)


async def _load_directly(start: Start, config: Config) -> Engine:
    return await start(config)


class _Call(Struct, frozen=True):
    """One call of `infer`."""

    request: GenerationRequest
    keywords: GenerationKeywords


def _call_of(engine: Engine, text: str, given: dict[str, Any], chunk_size: ChunkSize) -> _Call:
    """Return the call for a prompt and keywords. Raises InvalidRequest for what this engine cannot answer."""
    if not text:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    prompt = text_prompt(engine, text)
    capacity = engine.model.max_model_len - len(prompt) if isinstance(prompt, list) else None
    keywords = generation_keywords(given, engine.abilities, capacity)
    if isinstance(prompt, list):
        keywords.params.check_token_ids(engine.model.logits_width)
        check_prompt(engine.model, prompt, keywords.params)
    if keywords.lora_name and not engine.abilities.lora:
        raise not_taken(engine.name, "lora_name")
    if keywords.lora_name and keywords.lora_name not in [adapter.name for adapter in engine.adapters]:
        raise unknown_adapter(keywords.lora_name, engine.adapters)
    request = GenerationRequest(
        prompt=prompt,
        task=Sample(params=keywords.params, chunk_size=chunk_size),
        request_id=keywords.request_id,
        cache_salt=keywords.cache_salt,
        priority=keywords.priority,
        adapter=keywords.lora_name,
    )
    return _Call(request, keywords)


class _TokenCount:
    """The tokens of an answer, as far as is known: by their ids, or by what its engine counted."""

    num_tokens = 0

    def added_by(self, output: Output) -> int:
        before = self.num_tokens
        self.num_tokens = max(before + len(output.token_ids), output.usage.completion_tokens)
        return self.num_tokens - before


class _CallTimer:
    """The times and the tokens of one answer when they come, however fast they are read."""

    def __init__(self, keywords: GenerationKeywords) -> None:
        self.keywords = keywords
        self.finish = FinishReason.ABORT
        """The reason until another is known."""
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._count = _TokenCount()
        self._queue_seconds: float | None = None
        self._num_prompt_tokens = 0

    def observe(self, output: Output) -> None:
        self._count.added_by(output)
        if output.text or output.token_ids:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        if output.queue_seconds is not None:
            self._queue_seconds = output.queue_seconds
        self.finish = output.finish or self.finish
        self._num_prompt_tokens = output.usage.prompt_tokens or self._num_prompt_tokens

    def metrics(self) -> InferMetrics:
        return InferMetrics(
            request_id=self.keywords.request_id,
            finish=self.finish,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._count.num_tokens,
            queue_seconds=self._queue_seconds,
            ttft_seconds=self._first - self._began if self._first is not None else 0.0,
            generation_seconds=self._last - self._began,
        )
