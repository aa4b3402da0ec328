"""The memory plan: what a device has, what weights and steps take of it, and how long a context the rest holds."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import Struct

from weft.config import CacheOptions
from weft.errors import OutOfMemory
from weft.model.dense import DenseConfig
from weft.types import MemoryLedger
from weft.worker.inputs import StepShape

log = logging.getLogger(__name__)

MIB = 2**20
GIB = 2**30
HIGHEST_SHARE, SAFE_SHARE = 0.90, 0.85
"""A GPU filled above the first has no room for what nobody foresaw; it is filled to the second instead."""
GRAPH_SLACK_BYTES = 256 * MIB
"""For what graphs hold besides activations: their nodes, the libraries' workspaces, partial results of attention."""


class Room(Struct, frozen=True, kw_only=True):
    """A device's memory, and what of it is neither weights nor cache. All in bytes but the share."""

    total: int
    share: float = 1.0
    """The part of `total` that Weft may take."""
    others: int = 0
    """In use, but not by torch: other processes, the CUDA context, libraries."""
    libraries: int = 0
    """Of `others`, what came since this process began: its own."""
    activations: int = 0
    """What torch holds at the largest step besides weights and cache."""
    graphs: int = 0

    @property
    def available(self) -> int:
        """For weights and cache together."""
        allowed = int(self.total * self.share) - self.libraries
        return min(allowed, self.total - self.others) - self.activations - self.graphs

    def share_for(self, missing: int) -> float | None:
        """The share, in hundredths, with which `missing` more bytes are available; None: no share has them."""
        needed = self.available + missing + self.activations + self.graphs
        if needed > self.total - self.others:
            return None
        return math.ceil((needed + self.libraries) / self.total * 100) / 100

    def ledger(self, weights: int, kv: int) -> MemoryLedger:
        return MemoryLedger(
            total=self.total,
            weights=weights,
            activations=self.activations,
            graphs=self.graphs,
            kv=kv,
            others=self.others,
        )


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """The cache, and the context that it holds."""

    kv_bytes: int
    num_blocks: int
    max_model_len: int


def plan_memory(
    config: DenseConfig,
    cache: CacheOptions,
    room: Room,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    weights_bytes: int,
    kv_memory_bytes: int | None = None,
) -> MemoryPlan:
    """Blocks and context that fit, or OutOfMemory with the numbers and the flags that would help.

    `max_model_len` 0 takes the longest context that the model allows and the cache holds. The cache gets
    `kv_memory_bytes` unless the operator says otherwise; None: all that the weights leave.
    """
    block_bytes = kv_bytes_per_token(config, dtype) * cache.block_size
    if cache.kv_cache_memory_mb:
        kv_memory_bytes = cache.kv_cache_memory_mb * MIB
    elif kv_memory_bytes is None:
        kv_memory_bytes = max(0, room.available - weights_bytes)
    num_blocks = cache.num_blocks or max(2, kv_memory_bytes // block_bytes)
    capacity = (num_blocks - 1) * cache.block_size
    wanted = max_model_len or min(config.max_position, capacity)
    if wanted < 2:
        raise OutOfMemory(
            f"A context of {wanted} tokens holds no prompt and answer; there are {num_blocks} cache blocks of "
            f"{cache.block_size} tokens, and one block is padding.",
            hint="Set --num-blocks 3 or more, and no --max-model-len below 2.",
        )
    if wanted > config.max_position:
        raise OutOfMemory(
            f"A context of {wanted} tokens is beyond the model's {config.max_position}.",
            hint=f"Set --max-model-len {config.max_position} or less.",
        )
    if wanted > capacity:
        needed = -(-wanted // cache.block_size) + 1
        needed_mib = -(-needed * block_bytes // MIB)
        ways = [f"--max-model-len {capacity} or less"]
        missing = weights_bytes + needed_mib * MIB - room.available
        if missing <= 0:
            ways.append(f"--num-blocks {needed} or more")
            if not cache.num_blocks:
                ways.append(f"--kv-cache-memory-mb {needed_mib} or more")
        ways += _more_share(room, missing)
        raise OutOfMemory(
            f"A context of {wanted} tokens needs {needed} cache blocks; there are {num_blocks}.",
            hint=f"Set {', or '.join(ways)}.",
        )
    kv_bytes = num_blocks * block_bytes
    missing = weights_bytes + kv_bytes - room.available
    if missing > 0:
        ways = [
            *(f"set {way}" for way in _more_share(room, missing)),
            "give the cache less (--kv-cache-memory-mb, --num-blocks)",
            "serve a smaller model",
        ]
        raise OutOfMemory(
            f"The weights need {weights_bytes / MIB:.0f} MiB and the cache {kv_bytes / MIB:.0f} MiB; "
            f"{room.available / MIB:.0f} MiB are free for them.",
            hint=f"Either {', or '.join(ways)}.",
        )
    return MemoryPlan(kv_bytes=kv_bytes, num_blocks=num_blocks, max_model_len=wanted)


def _more_share(room: Room, missing: int) -> list[str]:
    """The flags that give Weft so many bytes more of a GPU, where there are that many."""
    share = room.share_for(missing) if missing > 0 else None
    if share is None:
        return []
    insisted = " with --insist-gpu-memory" if share > HIGHEST_SHARE else ""
    return [f"--gpu-memory-utilization {share:.2f} or more{insisted}"]


def kv_bytes_per_token(config: DenseConfig, dtype: torch.dtype) -> int:
    return config.num_layers * config.heads.kv_size * dtype.itemsize


def cache_shape(config: DenseConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)


def num_parameters(config: DenseConfig) -> int:
    heads = config.heads
    layer = config.hidden_size * (2 * heads.q_size + heads.kv_size + 3 * config.intermediate_size + 2)
    tables = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return config.num_layers * layer + tables


def graphs_bytes(config: DenseConfig, dtype: torch.dtype, shapes: Sequence[StepShape]) -> int:
    """An estimate of what graphs of these shapes will hold, once all are captured: the activations of the largest,
    which the others share, and the logits of each."""
    heads = config.heads
    token = 3 * config.hidden_size + 2 * heads.q_size + heads.kv_size + 3 * config.intermediate_size
    activations = token * max(shape.num_tokens for shape in shapes)
    logits = config.vocab_size * sum(shape.samples for shape in shapes)
    return (activations + logits) * dtype.itemsize + GRAPH_SLACK_BYTES


def gpu_share(cache: CacheOptions) -> float:
    """The share of a GPU that may be taken: what the operator asked for, where that is safe or insisted on."""
    asked = cache.gpu_memory_utilization
    if asked <= HIGHEST_SHARE or cache.insist_gpu_memory:
        return asked
    log.warning(
        "--gpu-memory-utilization %g leaves too little for what a step may need beyond its measure: %g is used. "
        "--insist-gpu-memory takes %g.",
        asked,
        SAFE_SHARE,
        asked,
    )
    return SAFE_SHARE


def ledger_table(ledger: MemoryLedger) -> str:
    """The ledger as lines for a reader."""
    shown = {
        "weights": ledger.weights,
        "activations": ledger.activations,
        "graphs": ledger.graphs,
        "KV cache": ledger.kv,
        "others": ledger.others,
        "spare": ledger.spare,
        "total": ledger.total,
    }
    return "\n".join(f"  {name:<12}{size / GIB:8.2f} GiB {size / ledger.total:7.1%}" for name, size in shown.items())


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
