"""What vLLM tells of its model and of its work, in Weft's terms. What it does not tell is 0."""

from __future__ import annotations

from typing import Any

from weft.machine.planner import Plan
from weft.types import EngineStats, MemoryLedger, ModelInfo


def model_info(name: str, vllm_config: Any, device: str, plan: Plan, load_seconds: float) -> ModelInfo:
    """Of the configuration that vLLM has settled on. What its weights hold, and a token of its cache, is the plan's to
    say: vLLM does not."""
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


class VllmStats:
    """A stat logger, as vLLM calls it: is told of every step."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._counted = EngineStats()
        self._running = 0
        self._usage = 0.0

    def logger(self, vllm_config: Any, engine_index: int) -> VllmStats:
        """What vLLM calls to get its logger, once it knows its cache."""
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
                    generation_tokens=generated,
                    preemptions=iteration_stats.num_preempted_reqs,
                    steps=1,
                )
            )

    def _count(self, more: EngineStats) -> None:
        self._counted = more.with_counters_of(self._counted)

    def log(self) -> None:
        """Weft's own doors tell what was recorded."""

    def log_engine_initialized(self) -> None:
        """So do they of this."""

    def stats(self, num_open: int) -> EngineStats:
        """vLLM tells nothing of a step that did not happen: where no request is open, none runs."""
        running, usage = (self._running, self._usage) if num_open else (0, 0.0)
        now = EngineStats(
            running=min(running, num_open),
            blocks_total=self._num_blocks,
            blocks_used=round(usage * self._num_blocks),
        )
        return now.with_counters_of(self._counted)
