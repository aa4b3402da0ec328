"""What is tried when a load does not fit: the utilisation first, then the context, then the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from weft.config import CacheOptions, Config, settings
from weft.hub.memory import MIB, safe_share
from weft.hub.planning import CPU_CACHE_BYTES, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Plan

SHARE_STEP = 0.10
"""Of a GPU: what an engine that ran out of memory is given less."""
LEAST_CONTEXT = 2048
"""No shorter context is tried, unless the plan says that no longer one fits."""
HALVINGS = 3
"""Of the context, and of the batch."""
UNKNOWN_CONTEXT = 16384
"""Where to begin with a model whose own context is not known."""

PlanOf = Callable[[Config], Plan | None]


def rungs(config: Config, plan_of: PlanOf) -> Iterator[Config]:
    """What is tried after this, one after the other. Each keeps what those before it changed, and is made when it is
    asked for: by what is free then."""
    for lower in (_own_cache, _free_share, _smaller_share, _contexts, _batches):
        for config in lower(config, plan_of(config)):  # noqa: B020 - the next step goes on from the last
            config = _within_free(config, plan_of(config))
            yield config


def flags_between(old: Config, new: Config) -> str:
    """The flags that make one of the other."""
    changed = []
    for setting in settings("model", "cache", "scheduler"):
        before, after = (getattr(getattr(config, setting.section), setting.name) for config in (old, new))
        if before != after:
            changed.append(f"{setting.flag} {after}")
    return " ".join(changed)


def _own_cache(config: Config, plan: Plan | None) -> Iterator[Config]:
    """A cache that was asked for by its size is given up for the one that the engine takes by itself: where the plan
    has no room for it, or that one is smaller."""
    has_room = plan is not None and plan.problem is None
    is_smaller = plan is not None and plan.place == "cpu" and plan.kv > CPU_CACHE_BYTES
    if _has_sized_cache(config) and (is_smaller or not has_room):
        yield replace(config, cache=replace(config.cache, kv_cache_memory_mb=0, num_blocks=0))


def _free_share(config: Config, plan: Plan | None) -> Iterator[Config]:
    """Where the plan itself finds the share too small, or more than there is: all that is free now."""
    if plan is None or plan.problem is None or plan.place == "cpu" or not plan.free_share:
        return
    if plan.free_share != config.cache.gpu_memory_utilization:
        yield replace(config, cache=replace(config.cache, gpu_memory_utilization=plan.free_share))


def _smaller_share(config: Config, plan: Plan | None) -> Iterator[Config]:
    """Where it was the engine that ran out of memory: less than it was given, but what still holds the weights and the
    least context."""
    if plan is None or plan.problem is not None or plan.place == "cpu" or not plan.free_share:
        return
    total, given = plan.room.total, safe_share(config.cache)
    if _has_sized_cache(config):
        given = min(given, plan.needed_bytes / total)
    least = (plan.needed_bytes - plan.kv + LEAST_CONTEXT * plan.kv_per_token) / total
    share = max(math.ceil(least * 100) / 100, min(plan.free_share, round(given - SHARE_STEP, 2)))
    if share < given:
        cache = replace(config.cache, gpu_memory_utilization=share, kv_cache_memory_mb=0, num_blocks=0)
        yield replace(config, cache=cache)


def _has_sized_cache(config: Config) -> bool:
    return bool(config.cache.kv_cache_memory_mb or config.cache.num_blocks)


def _within_free(config: Config, plan: Plan | None) -> Config:
    """What was free a try ago may be taken by now."""
    if plan is None or plan.place == "cpu" or not 0 < plan.free_share < config.cache.gpu_memory_utilization:
        return config
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=plan.free_share))


def _contexts(config: Config, plan: Plan | None) -> Iterator[Config]:
    """The longest that the plan holds, and halves."""
    longest = (plan.max_model_len if plan is not None else config.model.max_model_len) or UNKNOWN_CONTEXT
    largest = plan.largest_context if plan is not None else 0
    halves = {longest >> times for times in range(1, HALVINGS + 1)}
    least = min(LEAST_CONTEXT, largest or LEAST_CONTEXT)
    for context in sorted((c for c in halves | {largest} if least <= c < longest), reverse=True):
        shorter = replace(config, model=replace(config.model, max_model_len=context))
        yield replace(shorter, cache=_cache_for(context, shorter, plan)) if plan is not None else shorter


def _cache_for(context: int, config: Config, plan: Plan) -> CacheOptions:
    """On a CPU the cache has a size of its own: one that holds this context, where it was larger."""
    if plan.place != "cpu" or not plan.kv_per_token:
        return config.cache
    blocks = -(-context // config.cache.block_size) + 1
    needed_mib = -(-blocks * config.cache.block_size * plan.kv_per_token // MIB)
    current_mib = config.cache.kv_cache_memory_mb or CPU_CACHE_BYTES // MIB
    return replace(config.cache, kv_cache_memory_mb=min(needed_mib, current_mib))


def _batches(config: Config, plan: Plan | None) -> Iterator[Config]:
    """Fewer requests at a time, and fewer tokens in a step."""
    seqs = plan.max_num_seqs if plan is not None else config.scheduler.max_num_seqs or MAX_NUM_SEQS["cuda"]
    tokens = (
        plan.max_num_batched_tokens
        if plan is not None
        else config.scheduler.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS["cuda"]
    )
    for _ in range(HALVINGS):
        if seqs == 1:
            return
        seqs //= 2
        tokens = max(seqs, tokens // 2)
        yield replace(config, scheduler=replace(config.scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens))
