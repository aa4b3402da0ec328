"""The worker's side of the memory plan: the cache's layout, what is free here, and the ledger for a reader."""

from __future__ import annotations

import logging

from weft.config import CacheOptions
from weft.hub.hardware import read_memory
from weft.hub.memory import GIB, Shape, safe_share
from weft.types import MemoryLedger

log = logging.getLogger(__name__)


def cache_shape(config: Shape, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)


def available_cpu_bytes() -> int:
    """What this process may still take: the machine's free memory, or what a limit leaves where that is less."""
    return read_memory().available


def gpu_share(cache: CacheOptions) -> float:
    """The share of a GPU that is taken. One that is lowered is told of."""
    share, asked = safe_share(cache), cache.gpu_memory_utilization
    if share != asked:
        log.warning(
            "--gpu-memory-utilization %g leaves too little for what a step may need beyond its measure: %g is used. "
            "--insist-gpu-memory takes %g.",
            asked,
            share,
            asked,
        )
    return share


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
