"""Attention of one new token of each sequence over its paged cache, the cache read once at the memory's speed.

A sequence's tokens are cut into as many splits as it takes to fill the chip: how many at most is the host's choice,
where they lie is computed on the device from the sequence's length. A sequence of one split is written at once; of
several, the program that ends last puts the others' partial results together. No second kernel, no length on the host.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.batch import HeadShape
from weft.kernels.triton.launch import launch_options, wait_for_inputs

MAX_SPLITS = 32
_MAX_COUNTERS = 1 << 16
_FULL_CHIP_VECTOR, _FULL_CHIP_MATRIX = 528, 132
"""Programs up to which a split pays on an H200 (132 multiprocessors): measured at 1 to 64 rows of 200 to 1,000 tokens.
More splits lose more in the combination than they win in the reading."""
_LONG = 4096
"""Tokens that one program may be left alone with, however many programs there are."""
_LOG2_E = 1.4426950408889634
_LEAST = tl.constexpr(-1.0e30)
"""Below every score, and finite: a maximum over nothing has to subtract from itself."""


@triton.jit
def _share(length, split, num_splits, min_tiles, TOKENS: tl.constexpr):
    """This split's tiles, and how many splits the sequence has. At least one, even without tokens."""
    tiles = tl.cdiv(length, TOKENS)
    each = tl.maximum(min_tiles, tl.cdiv(tiles, num_splits))
    first = split * each
    return first, tl.minimum(first + each, tiles), tl.maximum(tl.cdiv(tiles, each), 1)


@triton.jit
def _is_last(counters, at, active):
    """Count this program among its sequence's; true for the last. Leaves the counter at zero for the next launch."""
    tl.debug_barrier()
    before = tl.atomic_add(counters + at, 1, sem="acq_rel", scope="gpu")
    is_last = before == active - 1
    if is_last:
        tl.store(counters + at, 0)
    return is_last


@triton.jit
def _combine(
    partials, statistics, out_row, row, first_head, end_head, num_heads, active,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    split = tl.arange(0, SPLITS)[:, None]
    head = first_head + tl.arange(0, HEADS)[None, :]
    inside = (split < active) & (head < end_head)
    at = (row * num_heads + head) * SPLITS + split
    peaks = tl.load(statistics + at * 2, mask=inside, other=_LEAST, cache_modifier=".cg")
    totals = tl.load(statistics + at * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
    column = tl.arange(0, PADDED)[None, None, :]
    values = tl.load(
        partials + at[:, :, None] * DIM + column,
        mask=inside[:, :, None] & (column < DIM),
        other=0.0,
        cache_modifier=".cg",
    )
    weights = tl.exp2(peaks - tl.max(peaks, axis=0, keep_dims=True))
    total = tl.sum(weights * totals, axis=0)
    result = tl.sum(values * weights[:, :, None], axis=0) / tl.where(total == 0.0, 1.0, total)[:, None]
    own = first_head + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    tl.store(
        out_row + own * DIM + columns, result.to(out_row.dtype.element_ty), mask=(own < end_head) & (columns < DIM)
    )


@triton.jit(do_not_specialize=["tables", "lengths", "counters", "table_stride", "num_splits", "min_tiles"])
def _vector_kernel(
    q, kv, tables, lengths, out, partials, statistics, counters,
    q_stride, block_stride, token_stride, table_stride, out_stride, num_heads, num_splits, min_tiles, scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, WAYS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A key head for each query head. Each of WAYS warps takes every WAYS-th token of a tile and keeps its own
    maximum and sums over whole heads, so that warps meet once, at the end."""
    INNER: tl.constexpr = TOKENS // WAYS
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // TOKENS
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    wait_for_inputs(PDL)
    length = tl.load(lengths + row).to(tl.int32)
    first, end, active = _share(length, split, num_splits, min_tiles, TOKENS)
    if split >= active:
        return
    # Dimensions: heads, ways, tokens of a way, columns. Of those that are not contiguous the compiler gives the first
    # to threads first: a warp holds whole heads of one token, and a thread all of its way's tokens.
    head = group * HEADS + tl.arange(0, HEADS)[:, None, None, None]
    token = tl.arange(0, WAYS)[None, :, None, None] + tl.arange(0, INNER)[None, None, :, None] * WAYS
    column = tl.arange(0, PADDED)[None, None, None, :]
    inside = (head < num_heads) & (column < DIM)
    query = tl.load(q + row * q_stride + head * DIM + column, mask=inside, other=0.0).to(tl.float32) * scale
    offsets = token * token_stride + head * DIM + column
    value_offset = num_heads * DIM

    peak = tl.full([HEADS, WAYS, 1, 1], _LEAST, dtype=tl.float32)
    total = tl.zeros([HEADS, WAYS, 1, 1], dtype=tl.float32)
    sums = tl.zeros([HEADS, WAYS, 1, PADDED], dtype=tl.float32)
    table = tables + row * table_stride
    coming = tl.load(table + first // PER_BLOCK).to(tl.int64)
    for tile in range(first, end):
        block = coming
        coming = tl.load(table + tl.minimum(tile + 1, end - 1) // PER_BLOCK).to(tl.int64)
        at = kv + block * block_stride + (tile % PER_BLOCK) * TOKENS * token_stride + offsets
        known = token < length - tile * TOKENS
        keys = tl.load(at, mask=inside & known, other=0.0)
        values = tl.load(at + value_offset, mask=inside & known, other=0.0)
        scores = tl.sum(keys.to(tl.float32) * query, axis=3, keep_dims=True)
        scores = tl.where(known, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=2, keep_dims=True))
        shrink = tl.exp2(peak - highest)
        shares = tl.exp2(scores - highest)
        total = total * shrink + tl.sum(shares, axis=2, keep_dims=True)
        sums = sums * shrink + tl.sum(values.to(tl.float32) * shares, axis=2, keep_dims=True)
        peak = highest

    head_peak = tl.max(peak, axis=1, keep_dims=True)
    weights = tl.exp2(peak - head_peak)
    row_peak = tl.reshape(head_peak, [HEADS])
    row_total = tl.reshape(tl.sum(total * weights, axis=1), [HEADS])
    row_sums = tl.reshape(tl.sum(sums * weights, axis=1), [HEADS, PADDED])
    own = group * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, PADDED)[None, :]
    own_inside = (own < num_heads)[:, None] & (columns < DIM)
    out_row = out + row * out_stride
    if SPLIT:  # noqa: SIM102 (known when compiling; `active` is not)
        if active > 1:
            slot = (row * num_heads + own) * SPLITS + split
            tl.store(partials + slot[:, None] * DIM + columns, row_sums, mask=own_inside)
            tl.store(statistics + slot * 2, row_peak, mask=own < num_heads)
            tl.store(statistics + slot * 2 + 1, row_total, mask=own < num_heads)
            if _is_last(counters, row * tl.num_programs(0) + group, active):
                _combine(
                    partials, statistics, out_row, row, group * HEADS, num_heads, num_heads, active,
                    HEADS, DIM, PADDED, SPLITS,
                )  # fmt: skip
            return
    result = row_sums / tl.where(row_total == 0.0, 1.0, row_total)[:, None]
    tl.store(out_row + own[:, None] * DIM + columns, result.to(out.dtype.element_ty), mask=own_inside)


@triton.jit(do_not_specialize=["tables", "lengths", "counters", "table_stride", "num_splits", "min_tiles"])
def _matrix_kernel(
    q, kv, tables, lengths, out, partials, statistics, counters,
    q_stride, block_stride, token_stride, table_stride, out_stride, num_heads, num_splits, min_tiles, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP query heads share a key head: a matrix product, its rows padded to the least that the units take."""
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    wait_for_inputs(PDL)
    length = tl.load(lengths + row).to(tl.int32)
    first, end, active = _share(length, split, num_splits, min_tiles, TOKENS)
    if split >= active:
        return
    member = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    token = tl.arange(0, TOKENS)
    own = group * GROUP + member
    own_inside = (member < GROUP)[:, None] & (column < DIM)[None, :]
    query = tl.load(q + row * q_stride + own[:, None] * DIM + column[None, :], mask=own_inside, other=0.0)
    table = tables + row * table_stride
    head_kv = kv + group * DIM

    peak = tl.full([ROWS], _LEAST, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    for tile in range(first, end):
        position = tile * TOKENS + token
        known = position < length
        block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        at = head_kv + block * block_stride + (position % BLOCK_SIZE) * token_stride
        mask = known[:, None] & (column < DIM)[None, :]
        keys = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0)
        values = tl.load(at[:, None] + KV_HEADS * DIM + column[None, :], mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - highest)
        shares = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(shares, axis=1)
        sums = tl.dot(shares.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
        peak = highest

    out_row = out + row * out_stride
    if SPLIT:  # noqa: SIM102 (known when compiling; `active` is not)
        if active > 1:
            slot = (row * num_heads + own) * SPLITS + split
            tl.store(partials + slot[:, None] * DIM + column[None, :], sums, mask=own_inside)
            tl.store(statistics + slot * 2, peak, mask=member < GROUP)
            tl.store(statistics + slot * 2 + 1, total, mask=member < GROUP)
            if _is_last(counters, row * tl.num_programs(0) + group, active):
                for some in range(group * GROUP, group * GROUP + GROUP, 2):
                    _combine(
                        partials, statistics, out_row, row, some, group * GROUP + GROUP, num_heads, active,
                        2, DIM, PADDED, SPLITS,
                    )  # fmt: skip
            return
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_row + own[:, None] * DIM + column[None, :], result.to(out.dtype.element_ty), mask=own_inside)


class SplitPlan(NamedTuple):
    num_splits: int
    """At most so many for a sequence."""
    min_tokens: int
    """No split is shorter, but a sequence's last."""


def split_plan(num_programs: int, max_context: int, tile: int, full_chip: int) -> SplitPlan:
    """`num_programs` there would be without splits; `max_context` is the longest the launch must be ready for."""
    fill = full_chip // num_programs
    if fill < 2:
        wanted, min_tokens = triton.cdiv(max_context, _LONG), 1024
    else:
        wanted, min_tokens = max(fill, triton.cdiv(max_context, _LONG)), 2 * tile
    most = 1 if num_programs > _MAX_COUNTERS else MAX_SPLITS
    return SplitPlan(max(1, min(wanted, most, triton.cdiv(max_context, min_tokens))), min_tokens)


_counters: dict[torch.device, Tensor] = {}


def _zeroed_counters(device: torch.device) -> Tensor:
    """Zero before every launch and after it. Launches that split share them: they belong on one stream.

    Made by the first eager launch. Where a capture comes first, the graph brings its own and clears them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and device not in _counters:
        return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
    if device not in _counters:
        _counters[device] = torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


def decode_attention(
    qkv: Tensor,
    heads: HeadShape,
    kv: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """[rows, heads * head dim]: row i of qkv is the last token of sequence i, whose keys and values are in the cache.

    The width of `block_tables` bounds the lengths. A row of length 0 gives zeros. Rows of qkv, tables and out may be
    apart; the cache is contiguous, its block size a multiple of 16.
    """
    rows, block_size = qkv.shape[0], kv.shape[1]
    if out is None:
        out = torch.empty(rows, heads.q_size, dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return out
    if block_size % 16 or not kv.is_contiguous() or qkv.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the block size must be a multiple of 16, rows and the cache contiguous")
    group = heads.num_heads // heads.num_kv_heads
    padded = max(16, triton.next_power_of_2(heads.head_dim))
    is_vector = group == 1 and padded <= 256
    together = min(256 // padded, triton.next_power_of_2(heads.num_heads)) if is_vector else 1
    tile = 16 if is_vector else 32
    groups = triton.cdiv(heads.num_kv_heads, together)
    full_chip = _FULL_CHIP_VECTOR if is_vector else _FULL_CHIP_MATRIX
    plan = split_plan(rows * groups, block_tables.shape[1] * block_size, tile, full_chip)
    is_split = plan.num_splits > 1
    if is_split:
        partials = torch.empty(
            rows, heads.num_heads, MAX_SPLITS, heads.head_dim, dtype=torch.float32, device=qkv.device
        )
        statistics = torch.empty(rows, heads.num_heads, MAX_SPLITS, 2, dtype=torch.float32, device=qkv.device)
        counters = _zeroed_counters(qkv.device)
    else:
        partials = statistics = counters = lengths
    arguments = (
        qkv, kv, block_tables, lengths, out, partials, statistics, counters,
        qkv.stride(0), kv.stride(0), kv.stride(1), block_tables.stride(0), out.stride(0), heads.num_heads,
        plan.num_splits, plan.min_tokens // tile, heads.scale * _LOG2_E,
    )  # fmt: skip
    grid = (groups, rows, plan.num_splits)
    if is_vector:
        _vector_kernel[grid](
            *arguments,
            DIM=heads.head_dim, PADDED=padded, HEADS=together, WAYS=4, TOKENS=tile, BLOCK_SIZE=block_size,
            SPLIT=is_split, SPLITS=MAX_SPLITS, num_warps=4, **launch_options(),
        )  # fmt: skip
    else:
        _matrix_kernel[grid](
            *arguments,
            KV_HEADS=heads.num_kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
            DIM=heads.head_dim, PADDED=padded, TOKENS=tile, BLOCK_SIZE=block_size,
            SPLIT=is_split, SPLITS=MAX_SPLITS,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=4, num_stages=5, **launch_options(),
        )  # fmt: skip
    return out
