"""Computes what weights, cache and steps take of a device's memory, and how long a context the rest holds.

The plan that is made before anything is loaded and the engine that has loaded use the same functions. A model's shape
and the type of its numbers are protocols: torch is not needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from weft.engine_stats import MemoryLedger
from weft.errors import ConfigError, OutOfMemory
from weft.options import CacheOptions

MIB = 2**20
GIB = 2**30
HIGHEST_SHARE, SAFE_SHARE = 0.90, 0.85
"""A GPU filled above the first share has no reserve for unplanned allocations: it is filled to the second."""
GRAPH_SLACK_BYTES = 256 * MIB
"""Memory of graphs besides activations: their nodes, the libraries' workspaces, partial results of attention."""


class Shape(Protocol):
    """The geometry of a decoder."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...


class NumberType(Protocol):
    """The type that a number is stored as, such as torch.bfloat16."""

    @property
    def itemsize(self) -> int: ...


class GraphShape(Protocol):
    @property
    def num_tokens(self) -> int: ...
    @property
    def samples(self) -> int: ...


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """A device's memory, and the part of it that is neither weights nor cache. All sizes are in bytes."""

    total: int
    share: float = 1.0
    """The part of `total` that Weft may take."""
    others: int = 0
    """Memory in use that torch does not account for: other processes, the CUDA context, libraries."""
    libraries: int = 0
    """The part of `others` that came since this process began: its own libraries."""
    activations: int = 0
    """Memory that torch holds at the largest step besides weights and cache."""
    graphs: int = 0

    @property
    def available(self) -> int:
        """Return the bytes that are left for weights and cache together."""
        allowed = int(self.total * self.share) - self.libraries
        return min(allowed, self.total - self.others) - self.activations - self.graphs

    def share_for(self, missing: int) -> float | None:
        """Return the share, in hundredths, with which `missing` more bytes are available, or None."""
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
    """The size of the cache, and the context that it holds."""

    kv_bytes: int
    num_blocks: int
    max_model_len: int


def adapter_bytes(config: Shape, rank: int, dtype: NumberType) -> int:
    """Return the bytes of one adapter of this rank to every weight of every layer."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = 7 * config.hidden_size + 2 * heads + 2 * kv_heads + 3 * config.intermediate_size
    return config.num_layers * rank * widths * dtype.itemsize


def slot_rank(rank: int) -> int:
    """Return the rank of slots for adapters up to this one: a power of two, 16 at least, which matrix units need."""
    return max(16, 1 << (rank - 1).bit_length())


def plan_memory(
    config: Shape,
    cache: CacheOptions,
    memory: DeviceMemory,
    *,
    max_model_len: int,
    dtype: NumberType,
    weights_bytes: int,
    kv_memory_bytes: int | None = None,
    draft: Shape | None = None,
) -> MemoryPlan:
    """Plan the blocks and the context that fit. Raises OutOfMemory with the numbers and the flags that would help.

    `max_model_len` 0 takes the longest context that the model allows and the cache holds. The cache gets
    `kv_memory_bytes` unless the operator says otherwise; None: all that the weights leave. A draft model has as many
    blocks, of its own geometry.
    """
    models = [config] if draft is None else [config, draft]
    block_bytes = sum(kv_bytes_per_token(one, dtype, cache) for one in models) * cache.block_size
    if cache.kv_cache_memory_mb:
        kv_memory_bytes = cache.kv_cache_memory_mb * MIB
    elif kv_memory_bytes is None:
        kv_memory_bytes = max(0, memory.available - weights_bytes)
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
        missing = weights_bytes + needed_mib * MIB - memory.available
        if missing <= 0:
            ways.append(f"--num-blocks {needed} or more")
            if not cache.num_blocks:
                ways.append(f"--kv-cache-memory-mb {needed_mib} or more")
        ways += _more_share(memory, missing)
        raise OutOfMemory(
            f"A context of {wanted} tokens needs {needed} cache blocks; there are {num_blocks}.",
            hint=f"Set {', or '.join(ways)}.",
        )
    kv_bytes = num_blocks * block_bytes
    missing = weights_bytes + kv_bytes - memory.available
    if missing > 0:
        ways = _more_share(memory, missing) + _smaller_cache(cache, memory.available - weights_bytes, block_bytes)
        raise OutOfMemory(
            f"The weights need {weights_bytes / MIB:.0f} MiB and the cache {kv_bytes / MIB:.0f} MiB; "
            f"{memory.available / MIB:.0f} MiB are free for them.",
            hint=f"Set {', or '.join(ways)}, or serve a smaller model." if ways else "Serve a smaller model.",
        )
    return MemoryPlan(kv_bytes=kv_bytes, num_blocks=num_blocks, max_model_len=wanted)


def _more_share(memory: DeviceMemory, missing: int) -> list[str]:
    """Return the flags that give Weft so many bytes more of a GPU, where there are that many."""
    share = memory.share_for(missing) if missing > 0 else None
    if share is None:
        return []
    insisted = " with --insist-gpu-memory" if share > HIGHEST_SHARE else ""
    return [f"--gpu-memory-utilization {share:.2f} or more{insisted}"]


def _smaller_cache(cache: CacheOptions, most_bytes: int, block_bytes: int) -> list[str]:
    """Return the flag for a cache of so many bytes, where it would hold anything."""
    if most_bytes < max(3 * block_bytes, MIB):
        return []
    if cache.num_blocks:
        return [f"--num-blocks {most_bytes // block_bytes} or less"]
    return [f"--kv-cache-memory-mb {most_bytes // MIB} or less"]


KV_SCALE_BYTES = {"fp8": 2, "int8": 4}
"""The scale of a head's key or value in a cache of these: a bfloat16 on GPUs, a float32 on CPUs."""


def kv_bytes_per_token(config: Shape, dtype: NumberType, cache: CacheOptions) -> int:
    """Return the bytes of one token's keys and values in every layer, by the number of key-value heads."""
    match cache.kv_cache_dtype:
        case "auto":
            head_bytes = config.head_dim * dtype.itemsize
        case "fp16":
            head_bytes = config.head_dim * 2
        case "fp8" | "int8":
            head_bytes = config.head_dim + KV_SCALE_BYTES[cache.kv_cache_dtype]
    return config.num_layers * 2 * config.num_kv_heads * head_bytes


def num_parameters(config: Shape) -> int:
    queries, keys_values = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + keys_values + 3 * config.intermediate_size + 2)
    tables = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return config.num_layers * layer + tables


QUANTISED_GROUP = 128
"""Columns of quantised weights that share a scale, where a row has several."""


def fp8_bytes(config: Shape, dtype: NumberType, *, grouped: bool = False) -> int:
    """Return the bytes of the weights with those of the decoder's linear layers as e4m3, their scales as float32."""
    return _quantised_bytes(config, dtype, bits=8, bytes_of_group=4, grouped=grouped)


def int4_bytes(config: Shape, dtype: NumberType) -> int:
    """Return the bytes of the weights with those of the decoder's linear layers of four bits, quantised here."""
    return _quantised_bytes(config, dtype, bits=4, bytes_of_group=2 * dtype.itemsize, grouped=True)


def int8_bytes(config: Shape, dtype: NumberType, *, in_panels: bool = False) -> int:
    """Return the bytes of the weights with those of the decoder's linear layers of eight bits, quantised here. In a
    CPU's panels every 32 columns have a scale and a minimum of half precision."""
    beside = 4 * QUANTISED_GROUP // 32 if in_panels else dtype.itemsize
    return _quantised_bytes(config, dtype, bits=8, bytes_of_group=beside, grouped=in_panels)


def _quantised_bytes(config: Shape, dtype: NumberType, *, bits: int, bytes_of_group: int, grouped: bool) -> int:
    queries, keys_values = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    hidden, middle = config.hidden_size, config.intermediate_size
    linears = ((queries + keys_values, hidden), (hidden, queries), (2 * middle, hidden), (hidden, middle))
    numbers = sum(rows * columns for rows, columns in linears)
    groups = sum(rows * (-(-columns // QUANTISED_GROUP) if grouped else 1) for rows, columns in linears)
    others = num_parameters(config) - config.num_layers * numbers
    return config.num_layers * (numbers * bits // 8 + bytes_of_group * groups) + others * dtype.itemsize


def int8_head_bytes(config: Shape, dtype: NumberType, *, in_panels: bool = False) -> int:
    """Return what a head of eight bits adds to the bytes of the weights: less than none where it is not tied."""
    head = config.vocab_size * config.hidden_size
    return (head * 9 // 8 if in_panels else head) - (0 if config.tied_embeddings else head * dtype.itemsize)


def activations_bytes(config: Shape, dtype: NumberType, num_tokens: int) -> int:
    """Return the bytes of the activations of so many tokens in one layer."""
    queries, keys_values = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    token = 3 * config.hidden_size + 2 * queries + keys_values + 3 * config.intermediate_size
    return token * num_tokens * dtype.itemsize


def graphs_bytes(config: Shape, dtype: NumberType, shapes: Sequence[GraphShape]) -> int:
    """Estimate what graphs of these shapes will hold once all are captured: the activations of the largest, which the
    others share, and the logits of each."""
    activations = activations_bytes(config, dtype, max(shape.num_tokens for shape in shapes))
    logits = config.vocab_size * sum(shape.samples for shape in shapes) * dtype.itemsize
    return activations + logits + GRAPH_SLACK_BYTES


def check_step(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raise ConfigError for a step that could not hold one token of every running request."""
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {max_num_batched_tokens} is below --max-num-seqs {max_num_seqs}: "
            "a step could not hold one token of every running request."
        )


def check_shards(config: Shape, size: int) -> None:
    """Raise ConfigError for a model that cannot be divided among so many ranks."""

    def divides(size: int) -> bool:
        heads, kv_heads = config.num_heads, config.num_kv_heads
        # With more ranks than key-value heads, several ranks have the same one.
        has_whole_heads = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        return has_whole_heads and config.intermediate_size % size == 0 and config.vocab_size >= size

    if divides(size):
        return
    possible = [str(size) for size in range(1, config.num_heads + 1) if divides(size)]
    raise ConfigError(
        f"--tensor-parallel-size {size}: the model has {config.num_heads} heads, {config.num_kv_heads} key-value heads "
        f"and an MLP of {config.intermediate_size}, which cannot be divided among so many ranks.",
        hint=f"With this model it can be {', '.join(possible)}.",
    )


def safe_share(cache: CacheOptions) -> float:
    """Return the share of a GPU that may be taken: what the operator asked for, where that is safe or insisted on."""
    asked = cache.gpu_memory_utilization
    return asked if asked <= HIGHEST_SHARE or cache.insist_gpu_memory else SAFE_SHARE


def as_out_of_memory(error: BaseException) -> OutOfMemory | None:
    """Return a shortage of memory as OutOfMemory; None for another error. The error's type decides."""
    if isinstance(error, OutOfMemory):
        return error
    # What is not loaded cannot have raised it.
    torch = sys.modules.get("torch")
    shortages = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    if not isinstance(error, shortages):
        return None
    return OutOfMemory(
        f"There is no memory for what was asked: {str(error).splitlines()[0] if str(error) else 'it ran out'}",
        hint="Set less: --gpu-memory-utilization, --max-model-len, --max-num-seqs, --max-num-batched-tokens.",
    )
