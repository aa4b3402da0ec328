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
from weft.kernels.kv_cache import Fp8Cache, LayerCache, block_size_of, numbers_in
from weft.kernels.triton.launch import (
    MAX_COUNTERS,
    cdiv,
    is_last,
    launch_options,
    next_power_of_2,
    wait_for_inputs,
    zeroed_counters,
)

MAX_SPLITS = 32
_LONG = 4096
"""Tokens that one program may be left alone with, however many programs there are."""
_LOG2_E = 1.4426950408889634
_LEAST = tl.constexpr(-1.0e30)
"""Below every score, and finite: a maximum over nothing has to subtract from itself."""
_TOKENS = 16
"""In a tile. They lie in one block: block sizes are multiples of it."""
_RESIDENT = 8 * 132
"""Programs up to which an H200 has all of them at once: each has more tiles on its way then."""
_LEAST_ROWS, _LEAST_TURNED = 16, 8
"""Query heads that the units multiply at least, as rows and as columns."""
_FP8_TOKENS, _FP8_STAGES, _FP8_WARPS = 32, 3, 1
"""Tokens in a tile of e4m3 numbers, which may lie in several blocks, and how its kernel is compiled."""
_FULL_CHIP, _MIN_TOKENS = 528, 64
"""Programs up to which a split pays on an H200 (132 multiprocessors), and how short one may be: measured at 1 to 256
rows of 200 to 4,000 tokens, with and without shared key heads."""
_FEW_PROGRAMS = 32
"""With no more programs than this a step waits for its longest chain of loads: splits are as short as tiles, and fewer
of them are on their way."""


@triton.jit
def _share(length, num_splits, min_tiles, TOKENS: tl.constexpr, SPLIT: tl.constexpr):
    """This program's tiles, and how many splits the sequence has. At least one, even without tokens."""
    first, end, active = 0, tl.cdiv(length, TOKENS), 1
    if SPLIT:
        tiles = end
        each = tl.maximum(min_tiles, tl.cdiv(tiles, num_splits))
        first = tl.program_id(2) * each
        end = tl.minimum(first + each, tiles)
        active = tl.maximum(tl.cdiv(tiles, each), 1)
    return first, end, active


@triton.jit
def _combine(
    partials, statistics, out_row, row, first_head, end_head, num_heads, active,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write the heads first_head..end_head, at most HEADS, from what `active` programs have left."""
    SOME: tl.constexpr = 1 if HEADS * PADDED > 2048 else 2048 // (HEADS * PADDED)
    own = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    peak = tl.full([HEADS], _LEAST, dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    sums = tl.zeros([HEADS, PADDED], dtype=tl.float32)
    for begin in range(0, active, SOME):
        split = begin + tl.arange(0, SOME)[:, None]
        inside = (split < active) & (own < end_head)[None, :]
        at = (row * num_heads + own[None, :]) * SPLITS + split
        peaks = tl.load(statistics + at * 2, mask=inside, other=_LEAST, cache_modifier=".cg")
        totals = tl.load(statistics + at * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partials + at[:, :, None] * DIM + column[None, None, :],
            mask=inside[:, :, None] & (column < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        highest = tl.maximum(peak, tl.max(peaks, axis=0))
        shrink = tl.exp2(peak - highest)
        weights = tl.exp2(peaks - highest[None, :])
        total = total * shrink + tl.sum(totals * weights, axis=0)
        sums = sums * shrink[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        peak = highest
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = (own < end_head)[:, None] & (column < DIM)[None, :]
    tl.store(out_row + own[:, None] * DIM + column[None, :], result.to(out_row.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    sums, total, peak, out_row, partials, statistics, counters, row, first_head, end_head, num_heads, active,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write what this program found out about its heads (ROWS of them, padded, the first HEADS to be written): the
    result where it is alone with its sequence, else its part, and the result where all parts are there."""
    own = first_head + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    inside = (own < end_head)[:, None] & (column < DIM)[None, :]
    if SPLIT:  # noqa: SIM102 (known when compiling; `active` is not)
        if active > 1:
            slot = (row * num_heads + own) * SPLITS + tl.program_id(2)
            tl.store(partials + slot[:, None] * DIM + column[None, :], sums, mask=inside)
            tl.store(statistics + slot * 2, peak, mask=own < end_head)
            tl.store(statistics + slot * 2 + 1, total, mask=own < end_head)
            if is_last(counters, row * tl.num_programs(0) + tl.program_id(0), active):
                _combine(
                    partials, statistics, out_row, row, first_head, end_head, num_heads, active,
                    HEADS, DIM, PADDED, SPLITS,
                )  # fmt: skip
    if active == 1:
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_row + own[:, None] * DIM + column[None, :], result.to(out_row.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tables", "lengths", "counters", "table_stride", "num_splits", "min_tiles"])
def _decode_kernel(
    q, kv, tables, lengths, out, partials, statistics, counters,
    q_stride, table_stride, out_stride, num_heads, num_splits, min_tiles, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    TURNED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP query heads share a key head: a matrix product, its rows padded to the least that the units take, 16, or 8
    where the products are TURNED, which is less work, and slower where sequences are split. One warp does it all and
    waits for no other: what is short here is the memory, and many programs keep it busy."""
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    # Lengths and tables are inputs of the whole step, which no kernel within it writes.
    length = tl.load(lengths + row).to(tl.int32)
    first, end, active = _share(length, num_splits, min_tiles, TOKENS, SPLIT)
    wait_for_inputs(PDL)
    if SPLIT:  # noqa: SIM102 (known when compiling; `active` is not)
        if tl.program_id(2) >= active:
            return
    member = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    token = tl.arange(0, TOKENS)
    own_inside = (member < GROUP)[:, None] & (column < DIM)[None, :]
    own = (group * GROUP + member)[:, None] * DIM + column[None, :]
    query = tl.load(q + row * q_stride + own, mask=own_inside, other=0.0)
    table = tables + row * table_stride
    STRIDE: tl.constexpr = 2 * KV_HEADS * DIM
    OF_TOKENS: tl.constexpr = 0 if TURNED else 1

    peak = tl.full([ROWS], _LEAST, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([PADDED, ROWS] if TURNED else [ROWS, PADDED], dtype=tl.float32)
    for tile in range(first, end):
        start = tile * TOKENS
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        at = kv + (block * BLOCK_SIZE + start % BLOCK_SIZE) * STRIDE + group * DIM
        # In the place of tokens behind the last it is read once more: no load depends on a condition.
        read = tl.minimum(token, length - 1 - start) * STRIDE
        keys = tl.load(at + (read[:, None] + column[None, :]), mask=(column < DIM)[None, :], other=0.0)
        at += KV_HEADS * DIM
        if TURNED:
            values = tl.load(at + (read[None, :] + column[:, None]), mask=(column < DIM)[:, None], other=0.0)
            scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION) * scale
        else:
            values = tl.load(at + (read[:, None] + column[None, :]), mask=(column < DIM)[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        known = tl.expand_dims(start + token < length, 1 - OF_TOKENS)
        scores = tl.where(known, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=OF_TOKENS))
        shrink = tl.exp2(peak - highest)
        shares = tl.exp2(scores - tl.expand_dims(highest, OF_TOKENS))
        total = total * shrink + tl.sum(shares, axis=OF_TOKENS)
        shrunk = sums * tl.expand_dims(shrink, OF_TOKENS)
        if TURNED:
            sums = tl.dot(values, shares.to(values.dtype), shrunk, input_precision=PRECISION)
        else:
            sums = tl.dot(shares.to(values.dtype), values, shrunk, input_precision=PRECISION)
        peak = highest

    if TURNED:
        sums = tl.trans(sums)
    _finish(
        sums, total, peak, out + row * out_stride, partials, statistics, counters, row, group * GROUP,
        group * GROUP + GROUP, num_heads, active, HEADS, DIM, PADDED, ROWS, SPLIT, SPLITS,
    )  # fmt: skip


@triton.jit
def as_half(x):
    """Return x as float16; what is too large becomes the largest."""
    wide = x.to(tl.float32)
    wide = tl.where(wide > 65504.0, 65504.0, wide)
    return tl.where(wide < -65504.0, -65504.0, wide).to(tl.float16)


@triton.jit
def inverse(scale):
    """Return 1 / scale for a power of two: exactly, and in one subtraction."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def key_scales(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def value_scales(words):
    return (words & -65536).to(tl.float32, bitcast=True)


_SPLIT_PAIRS = tl.constexpr("""
{
    .reg .b32 even, odd;
    .reg .b16 low, high, unused;
    prmt.b32 even, $2, 0, 0x4420;
    prmt.b32 odd, $2, 0, 0x4431;
    mov.b32 {low, unused}, even;
    mov.b32 {high, unused}, odd;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")


@triton.jit
def _halves(pairs, NATIVE: tl.constexpr):
    """Return the first and the second of the e4m3 numbers in each of the 16-bit words, as float16. The compiler takes
    three instructions to part two words, where one does."""
    if NATIVE:
        first, second = tl.inline_asm_elementwise(
            _SPLIT_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second


@triton.jit(do_not_specialize=["tables", "lengths", "counters", "table_stride", "num_splits", "min_tiles"])
def _decode_fp8_kernel(
    q, numbers, pairs, words, tables, lengths, out, partials, statistics, counters,
    q_stride, table_stride, out_stride, num_heads, num_splits, min_tiles, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same over e4m3 numbers, multiplied as float16. Everything is transposed, so that the query heads are what is
    padded least: to 8. Values are loaded as words of two neighbours, and those of even dimensions multiplied apart from
    the odd ones: words of 16 bits can be transposed on their way to the matrix units, and bytes cannot. The scales of a
    token's key and value are one word too."""
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    # Lengths and tables are inputs of the whole step, which no kernel within it writes.
    length = tl.load(lengths + row).to(tl.int32)
    first, end, active = _share(length, num_splits, min_tiles, TOKENS, SPLIT)
    wait_for_inputs(PDL)
    if SPLIT:  # noqa: SIM102 (known when compiling; `active` is not)
        if tl.program_id(2) >= active:
            return
    member = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    pair = tl.arange(0, PADDED // 2)
    token = tl.arange(0, TOKENS)
    own_inside = (member < GROUP)[:, None] & (column < DIM)[None, :]
    own = (group * GROUP + member)[:, None] * DIM + column[None, :]
    query = tl.trans(as_half(tl.load(q + row * q_stride + own, mask=own_inside, other=0.0)))
    table = tables + row * table_stride

    peak = tl.full([ROWS], _LEAST, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    even_sums = tl.zeros([PADDED // 2, ROWS], dtype=tl.float32)
    odd_sums = tl.zeros([PADDED // 2, ROWS], dtype=tl.float32)
    # The sums are in units of the largest scale of a value so far: shares times scales fit in float16 then.
    unit = tl.full([], 2.0**-126, dtype=tl.float32)
    for tile in range(first, end):
        position = tile * TOKENS + token
        known = position < length
        block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int32).to(tl.int64)
        inner = group * BLOCK_SIZE + position % BLOCK_SIZE
        word = tl.load(words + block * (KV_HEADS * BLOCK_SIZE) + inner, mask=known, other=0)
        at = block * (2 * KV_HEADS * BLOCK_SIZE) + inner
        keys_at = numbers + (at * DIM)[:, None] + column[None, :]
        keys = tl.load(keys_at, mask=known[:, None] & (column < DIM)[None, :], other=0.0)
        values_at = pairs + ((at + KV_HEADS * BLOCK_SIZE) * (DIM // 2))[:, None] + pair[None, :]
        values = tl.load(values_at, mask=known[:, None] & (pair < DIM // 2)[None, :], other=0)
        scores = tl.dot(keys.to(tl.float16), query) * (key_scales(word) * scale)[:, None]
        scores = tl.where(known[:, None], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=0))
        shrink = tl.exp2(peak - highest)
        shares = tl.exp2(scores - highest[None, :])
        total = total * shrink + tl.sum(shares, axis=0)
        largest = tl.maximum(unit, tl.max(value_scales(word), axis=0))
        shares = (shares * (value_scales(word) * inverse(largest))[:, None]).to(tl.float16)
        shrink *= unit * inverse(largest)
        even_values, odd_values = _halves(values, NATIVE)
        even_sums = tl.dot(tl.trans(even_values), shares, even_sums * shrink[None, :])
        odd_sums = tl.dot(tl.trans(odd_values), shares, odd_sums * shrink[None, :])
        peak, unit = highest, largest

    sums = tl.reshape(tl.join(tl.trans(even_sums), tl.trans(odd_sums)), [ROWS, PADDED]) * unit
    _finish(
        sums, total, peak, out + row * out_stride, partials, statistics, counters, row, group * GROUP,
        group * GROUP + GROUP, num_heads, active, HEADS, DIM, PADDED, ROWS, SPLIT, SPLITS,
    )  # fmt: skip


class SplitPlan(NamedTuple):
    num_splits: int
    """At most so many for a sequence."""
    min_tokens: int
    """No split is shorter, but a sequence's last."""


def split_plan(num_programs: int, max_context: int) -> SplitPlan:
    """`num_programs` there would be without splits; `max_context` is the longest the launch must be ready for."""
    fill = _FULL_CHIP // num_programs
    wanted = max(MAX_SPLITS if num_programs <= _FEW_PROGRAMS else fill, cdiv(max_context, _LONG))
    min_tokens = _TOKENS if num_programs <= _FEW_PROGRAMS else _MIN_TOKENS if fill >= 2 else 1024
    most = 1 if num_programs > MAX_COUNTERS else MAX_SPLITS
    return SplitPlan(max(1, min(wanted, most, cdiv(max_context, min_tokens))), min_tokens)


def decode_attention(
    qkv: Tensor,
    heads: HeadShape,
    kv: LayerCache,
    block_tables: Tensor,
    lengths: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """[rows, heads * head dim]: row i of qkv is the last token of sequence i, whose keys and values are in the cache.

    The width of `block_tables` bounds the lengths. A row of length 0 gives zeros. Rows of qkv, tables and out may be
    apart; the cache is contiguous, its block size a multiple of 16.
    """
    rows, block_size = qkv.shape[0], block_size_of(kv)
    if out is None:
        out = torch.empty(rows, heads.q_size, dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return out
    numbers = numbers_in(kv)
    if block_size % _TOKENS or not numbers.is_contiguous() or qkv.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the block size must be a multiple of 16, rows and the cache contiguous")
    plan = split_plan(rows * heads.num_kv_heads, block_tables.shape[1] * block_size)
    is_split = plan.num_splits > 1
    if is_split:
        partials = torch.empty(
            rows, heads.num_heads, MAX_SPLITS, heads.head_dim, dtype=torch.float32, device=qkv.device
        )
        statistics = torch.empty(rows, heads.num_heads, MAX_SPLITS, 2, dtype=torch.float32, device=qkv.device)
        counters = zeroed_counters(qkv.device)
    else:
        partials = statistics = counters = out
    group = heads.num_heads // heads.num_kv_heads
    grid, padded = (heads.num_kv_heads, rows, plan.num_splits), next_power_of_2(heads.head_dim)
    shape = {
        "KV_HEADS": heads.num_kv_heads, "GROUP": group, "HEADS": next_power_of_2(group),
        "DIM": heads.head_dim, "BLOCK_SIZE": block_size, "SPLIT": is_split, "SPLITS": MAX_SPLITS,
    }  # fmt: skip
    if isinstance(kv, Fp8Cache):
        _decode_fp8_kernel[grid](
            qkv, kv.numbers, kv.numbers.view(torch.int16), kv.scales.view(torch.int32), block_tables, lengths, out,
            partials, statistics, counters, qkv.stride(0), block_tables.stride(0), out.stride(0), heads.num_heads,
            plan.num_splits, cdiv(plan.min_tokens, _FP8_TOKENS), heads.scale * _LOG2_E,
            **shape, ROWS=max(8, next_power_of_2(group)), PADDED=max(32, padded), TOKENS=_FP8_TOKENS,
            NATIVE=out.device.type != "cpu", num_warps=_FP8_WARPS, num_stages=_FP8_STAGES, **launch_options(),
        )  # fmt: skip
        return out
    programs = rows * heads.num_kv_heads
    stages = 3 if programs <= _FEW_PROGRAMS else 7 if programs <= _RESIDENT and not is_split else 5
    is_turned = not is_split and group <= _LEAST_TURNED
    _decode_kernel[grid](
        qkv, numbers, block_tables, lengths, out, partials, statistics, counters,
        qkv.stride(0), block_tables.stride(0), out.stride(0), heads.num_heads, plan.num_splits,
        cdiv(plan.min_tokens, _TOKENS), heads.scale * _LOG2_E,
        **shape, ROWS=max(_LEAST_TURNED if is_turned else _LEAST_ROWS, next_power_of_2(group)),
        PADDED=max(16, padded), TOKENS=_TOKENS, TURNED=is_turned,
        PRECISION="tf32x3" if qkv.dtype == torch.float32 else "tf32", num_warps=1, num_stages=stages,
        **launch_options(),
    )  # fmt: skip
    return out
