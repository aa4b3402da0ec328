"""The memory plan, made before anything large is allocated: what the weights take, and how long a context fits."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from msgspec import Struct

from weft.config import CacheOptions
from weft.errors import OutOfMemory
from weft.model.dense import DenseConfig

MIB = 2**20


class MemoryPlan(Struct, frozen=True, kw_only=True):
    weights_bytes: int
    kv_bytes: int
    num_blocks: int
    max_model_len: int


def plan_memory(
    config: DenseConfig,
    cache: CacheOptions,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    available_bytes: int,
    kv_memory_bytes: int | None = None,
) -> MemoryPlan:
    """Blocks and context that fit, or OutOfMemory with the numbers and the flags that would help.

    `max_model_len` 0 takes the longest context that the model allows and the cache holds. The cache gets
    `kv_memory_bytes` unless the operator says otherwise; None: all that the weights leave.
    """
    block_bytes = kv_bytes_per_token(config, dtype) * cache.block_size
    weights = num_parameters(config) * dtype.itemsize
    if cache.kv_cache_memory_mb:
        kv_memory_bytes = cache.kv_cache_memory_mb * MIB
    elif kv_memory_bytes is None:
        kv_memory_bytes = max(0, available_bytes - weights)
    num_blocks = cache.num_blocks or max(2, kv_memory_bytes // block_bytes)
    if num_blocks < 2:
        raise OutOfMemory(
            f"{num_blocks} cache block holds no context: one block is padding.", hint="Set --num-blocks 2 or more."
        )
    capacity = (num_blocks - 1) * cache.block_size
    wanted = max_model_len or min(config.max_position, capacity)
    if wanted > config.max_position:
        raise OutOfMemory(
            f"A context of {wanted} tokens is beyond the model's {config.max_position}.",
            hint=f"Set --max-model-len {config.max_position} or less.",
        )
    if wanted > capacity:
        needed = -(-wanted // cache.block_size) + 1
        more = f"--num-blocks {needed} or more"
        if not cache.num_blocks:
            more += f", or --kv-cache-memory-mb {-(-needed * block_bytes // MIB)} or more"
        raise OutOfMemory(
            f"A context of {wanted} tokens needs {needed} cache blocks; there are {num_blocks}.",
            hint=f"Set --max-model-len {capacity} or less, or {more}.",
        )
    kv_bytes = num_blocks * block_bytes
    if weights + kv_bytes > available_bytes:
        raise OutOfMemory(
            f"The weights need {weights / MIB:.0f} MiB and the cache {kv_bytes / MIB:.0f} MiB; "
            f"{available_bytes / MIB:.0f} MiB are free.",
            hint="Give the cache less (--kv-cache-memory-mb, --num-blocks), or serve a smaller model.",
        )
    return MemoryPlan(weights_bytes=weights, kv_bytes=kv_bytes, num_blocks=num_blocks, max_model_len=wanted)


def kv_bytes_per_token(config: DenseConfig, dtype: torch.dtype) -> int:
    return config.num_layers * config.heads.kv_size * dtype.itemsize


def num_parameters(config: DenseConfig) -> int:
    heads = config.heads
    layer = config.hidden_size * (2 * heads.q_size + heads.kv_size + 3 * config.intermediate_size + 2)
    tables = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return config.num_layers * layer + tables


def available_cpu_bytes() -> int:
    """What this process may still take: the machine's free memory, or its cgroup's where that is less."""
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            break
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
