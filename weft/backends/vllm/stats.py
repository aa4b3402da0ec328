"""The stats and the model info of vLLM in Weft's structs. What vLLM does not tell is 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.engine_stats import EngineStats, MemoryLedger
from weft.machine.devices import cuda_devices
from weft.machine.hardware import MemoryGauge, resident_bytes
from weft.machine.planner import Plan
from weft.types import ModelInfo


def model_info(name: str, vllm_config: Any, device: str, plan: Plan, load_seconds: float) -> ModelInfo:
    """Return what is known of the model from vLLM's own configuration, and of its memory from the plan."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kv = (cache.num_gpu_blocks or 0) * cache.block_size * plan.kv_per_token
    return ModelInfo(
        name=name,
        max_model_len=model.max_model_len,
        logits_width=model.get_vocab_size(),
        num_blocks=cache.num_gpu_blocks or 0,
        block_size=cache.block_size,
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
        memory=MemoryLedger(weights=plan.weights, kv=kv, total=plan.memory.total),
        load_seconds=load_seconds,
    )


def memory_reader(device: str) -> Callable[[], tuple[int, int]]:
    """Return what reads the memory that vLLM has: of its processes on CPU, and on a GPU what came to be used since now.
    Its allocators are in other processes, which tell nothing of them."""
    if device == "cpu":
        return _read_resident
    before = _used_of_devices()
    return lambda: (max(0, _used_of_devices() - before),) * 2


def _read_resident() -> tuple[int, int]:
    resident = sum(resident_bytes(pid) for pid in _own_group())
    return resident, resident


def _own_group() -> Iterator[int]:
    """Yield the processes of vLLM: they are the group of this one."""
    own = os.getpgrp()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(folder.name)) == own:
                yield int(folder.name)


def _used_of_devices() -> int:
    return sum(device.total - device.free for device in cuda_devices())


class VllmStats:
    """A stat logger of vLLM, which calls it after every step."""

    def __init__(self, memory: MemoryGauge) -> None:
        self._memory = memory
        self._num_blocks = 0
        self._counted = EngineStats()
        self._running = 0
        self._usage = 0.0

    def logger(self, vllm_config: Any, engine_index: int) -> VllmStats:
        """Return this object as vLLM's logger. vLLM calls it once it knows its cache."""
        self._num_blocks = vllm_config.cache_config.num_gpu_blocks or 0
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._running, self._usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            prefixes = scheduler_stats.prefix_cache_stats
            self._count(EngineStats(prefix_queries=prefixes.queries, prefix_hits=prefixes.hits))
        if iteration_stats is not None:
            prompts, generated = iteration_stats.prompt_token_stats, iteration_stats.num_generation_tokens
            self._count(
                EngineStats(
                    prompt_tokens=prompts.total,
                    computed_tokens=prompts.computed + generated,
                    decode_tokens=generated,
                    prefill_tokens=prompts.computed,
                    generation_tokens=generated,
                    preemptions=iteration_stats.num_preempted_reqs,
                    steps=1,
                )
            )

    def _count(self, more: EngineStats) -> None:
        self._counted = more.with_counters_of(self._counted)

    def log(self) -> None:
        """Do nothing: Weft's own endpoints show what was recorded."""

    def log_engine_initialized(self) -> None:
        """Do nothing, as `log`."""

    def stats(self, num_open: int) -> EngineStats:
        """Return the stats now. vLLM tells nothing between steps: where no request is open, none runs."""
        running, usage = (self._running, self._usage) if num_open else (0, 0.0)
        allocated, reserved = self._memory.now()
        now = EngineStats(
            memory_allocated=allocated,
            memory_reserved=reserved,
            running=min(running, num_open),
            blocks_total=self._num_blocks,
            blocks_used=round(usage * self._num_blocks),
        )
        return now.with_counters_of(self._counted)
