"""Random steps over a paged cache in which everything that no sequence owns is NaN, and how results are compared."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.kernels import AttentionBatch, HeadShape
from weft.kernels.fp8 import E4M3
from weft.kernels.kv_cache import Fp8Cache, LayerCache, zero_cache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# ||out - reference|| / ||reference||, the reference computed in float32 from the same rounded inputs.
# The interpreter cuts float32 to bfloat16 where hardware rounds.
TOLERANCE = {torch.bfloat16: 1.6e-2 if INTERPRETED else 8e-3, torch.float16: 2e-3, torch.float32: 2e-5}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def assert_near(out: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert out.shape == wanted.shape, f"{tuple(out.shape)} is not {tuple(wanted.shape)}"
    assert bool(wanted.isfinite().all()), "the reference is not finite"
    assert bool(out.isfinite().all()), f"{int((~out.isfinite()).sum())} of {out.numel()} are not finite"
    error = float((out.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.2e}"
    worst = float((out.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30))
    assert worst <= 8 * tolerance, f"an element is off by {worst:.2e} of the largest"


@contextmanager
def poisoned() -> Iterator[None]:
    """What kernels allocate and never write is NaN, or a number that no result has."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -7)

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = empty


def paged(
    heads: HeadShape, news: list[int], lengths: list[int], dtype: torch.dtype, block_size: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor, AttentionBatch]:
    """(qkv, kv, batch): sequences with so many new tokens at such lengths, in shuffled blocks. One column of every
    table, and whatever is past a length, is NaN in the cache."""
    rng = random.Random(seed)
    counts = [-(-length // block_size) for length in lengths]
    free = list(range(1, sum(counts) + 1))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    width = max(counts) + 1
    kv = torch.full((sum(counts) + 1, block_size, 2, heads.num_kv_heads, heads.head_dim), float("nan"), device=DEVICE)
    slots: list[int] = []
    starts = [0]
    for new, length, table in zip(news, lengths, tables, strict=True):
        at = [table[p // block_size] * block_size + p % block_size for p in range(length)]
        if at:
            flat = kv.view(-1, heads.kv_size)
            flat[torch.tensor(at, device=DEVICE)] = torch.randn(length, heads.kv_size, device=DEVICE)
        slots += at[length - new :] if length else [0] * new
        starts.append(starts[-1] + new)
    batch = AttentionBatch(
        num_decodes=sum(new == 1 for new in news),
        query_starts=torch.tensor(starts, device=DEVICE),
        lengths=torch.tensor(lengths, device=DEVICE),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], device=DEVICE),
        slots=torch.tensor(slots, device=DEVICE),
    )
    return randn(starts[-1], heads.q_size + heads.kv_size, dtype=dtype), kv.to(dtype), batch


def as_fp8(kv: Tensor) -> Fp8Cache:
    """A cache as e4m3. The scales of its tokens and heads differ, but in the null block; what is NaN has none."""
    spread = torch.exp2(torch.randint(-6, 7, kv.shape[:4], device=kv.device).float())
    spread[:, :, 0] = spread[:, :, 0].clamp(2**-3, 2)
    spread[0] = 1
    [cache] = zero_cache((1, *kv.shape), E4M3, kv.device)
    cache.write(
        torch.arange(kv.shape[0] * kv.shape[1], device=kv.device), (kv.float() * spread[..., None]).flatten(0, 1)
    )
    cache.scales[kv.isnan().any(-1).permute(0, 3, 1, 2)] = float("nan")
    return cache


def overwrite(kv: LayerCache, own: LayerCache) -> None:
    """Put a cache in the place of a larger one, the rest of which is NaN then."""
    if isinstance(kv, Tensor):
        kv.fill_(float("nan"))[: len(own)] = own
    else:
        kv.scales.fill_(float("nan"))[: len(own.scales)] = own.scales
        kv.numbers.view(torch.uint8).fill_(0x7F)[: len(own.numbers)] = own.numbers.view(torch.uint8)


def padded(
    qkv: Tensor, batch: AttentionBatch, decodes: int, prompts: int, prompt_tokens: int
) -> tuple[Tensor, AttentionBatch, Tensor]:
    """(qkv, batch, rows): a step in the shape of a captured one, with so many decodes, prompts and prompt tokens and
    nothing on the host. Its own tokens are in `rows`; the others are NaN, and belong to no sequence or an empty one."""
    own_decodes, own_sequences, own_tokens = batch.num_decodes, len(batch.lengths), len(qkv)
    spare = decodes - own_decodes
    sequences = torch.tensor([*range(own_decodes), *range(decodes, own_sequences + spare)], device=DEVICE)
    rows = torch.tensor([*range(own_decodes), *range(decodes, own_tokens + spare)], device=DEVICE)
    wide = torch.full((decodes + prompt_tokens, qkv.shape[1]), float("nan"), dtype=qkv.dtype, device=DEVICE)
    wide[rows] = qkv
    tables = torch.zeros(decodes + prompts, batch.block_tables.shape[1], dtype=torch.int64, device=DEVICE)
    tables[sequences] = batch.block_tables
    lengths = torch.zeros(decodes + prompts, dtype=torch.int64, device=DEVICE)
    lengths[sequences] = batch.lengths
    starts = torch.full((decodes + prompts + 1,), own_tokens + spare, device=DEVICE)
    starts[:decodes] = torch.arange(decodes, device=DEVICE)
    starts[decodes : own_sequences + spare] = batch.query_starts[own_decodes:-1] + spare
    shape = AttentionBatch(
        num_decodes=decodes,
        query_starts=starts,
        lengths=lengths,
        block_tables=tables,
        slots=torch.zeros(len(wide), dtype=torch.int64, device=DEVICE),
    )
    return wide, shape, rows
