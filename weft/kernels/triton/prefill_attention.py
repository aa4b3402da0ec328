"""Causal attention of runs of new tokens over the paged cache, which holds their own keys and values already."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.batch import HeadShape
from weft.kernels.triton.launch import launch_options, wait_for_inputs

_LOG2_E = 1.4426950408889634
_LEAST = tl.constexpr(-1.0e30)
_FULL_CHIP = 264
"""Programs of 128 queries that keep an H200 busy: two on each multiprocessor."""


@triton.jit
def _attend(
    sums, total, peak, query, query_position, head_kv, table, length, first, end, block_stride, token_stride, scale,
    value_offset, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens first..end of the cache. Unmasked, all of them are known to every query."""
    column = tl.arange(0, PADDED)
    for start in range(first, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=position < length, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        at = (head_kv + block * block_stride + (position % BLOCK_SIZE) * token_stride)[:, None] + column[None, :]
        if MASKED:
            mask = (position < length)[:, None] & (column < DIM)[None, :]
            keys = tl.load(at, mask=mask, other=0.0)
            values = tl.load(at + value_offset, mask=mask, other=0.0)
        elif DIM == PADDED:
            keys = tl.load(at)
            values = tl.load(at + value_offset)
        else:
            keys = tl.load(at, mask=(column < DIM)[None, :], other=0.0)
            values = tl.load(at + value_offset, mask=(column < DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - highest)
        shares = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(shares, axis=1)
        sums = tl.dot(shares.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
        peak = highest
    return sums, total, peak


@triton.jit(do_not_specialize=["tables", "lengths", "query_starts", "table_stride"])
def _prefill_kernel(
    q, kv, tables, lengths, query_starts, out,
    q_stride, block_stride, token_stride, table_stride, out_stride, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # The last queries have the most to read: they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    wait_for_inputs(PDL)
    query_start = tl.load(query_starts + sequence).to(tl.int64)
    count = tl.load(query_starts + sequence + 1).to(tl.int32) - query_start.to(tl.int32)
    if tile * BLOCK_M >= count:
        return
    length = tl.load(lengths + sequence).to(tl.int32)
    own = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_position = length - count + own
    column = tl.arange(0, PADDED)
    inside = (own < count)[:, None] & (column < DIM)[None, :]
    row = query_start + own
    query = tl.load(q + row[:, None] * q_stride + head * DIM + column[None, :], mask=inside, other=0.0)
    table = tables + sequence * table_stride
    head_kv = kv + (head // GROUP) * DIM

    peak = tl.full([BLOCK_M], _LEAST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED], dtype=tl.float32)
    # Every query of the tile knows the tokens up to its first one's position.
    shared = (length - count + tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(length - count + (tile + 1) * BLOCK_M, length)
    sums, total, peak = _attend(
        sums, total, peak, query, query_position, head_kv, table, length, 0, shared, block_stride, token_stride, scale,
        KV_HEADS * DIM, DIM, PADDED, BLOCK_N, BLOCK_SIZE, False, PRECISION,
    )  # fmt: skip
    sums, total, peak = _attend(
        sums, total, peak, query, query_position, head_kv, table, length, shared, end, block_stride, token_stride,
        scale, KV_HEADS * DIM, DIM, PADDED, BLOCK_N, BLOCK_SIZE, True, PRECISION,
    )  # fmt: skip
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + row[:, None] * out_stride + head * DIM + column[None, :], result.to(out.dtype.element_ty), mask=inside
    )


def prefill_attention(
    qkv: Tensor,
    heads: HeadShape,
    kv: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    max_queries: int,
    out: Tensor | None = None,
) -> Tensor:
    """[tokens, heads * head dim]. Sequence i's new tokens are rows query_starts[i]..query_starts[i + 1] of qkv, at most
    `max_queries`, and the last ones of its lengths[i] cached tokens. The cache is contiguous."""
    num_sequences, block_size = block_tables.shape[0], kv.shape[1]
    if out is None:
        out = torch.empty(qkv.shape[0], heads.q_size, dtype=qkv.dtype, device=qkv.device)
    if num_sequences == 0 or max_queries == 0:
        return out
    if not kv.is_contiguous() or qkv.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows and the cache must be contiguous")
    is_wide = qkv.dtype == torch.float32
    padded = max(16, triton.next_power_of_2(heads.head_dim))
    is_large = triton.cdiv(max_queries, 128) * heads.num_heads * num_sequences >= _FULL_CHIP
    block_m = 128 if is_large and max_queries > 64 and not is_wide else 64
    _prefill_kernel[(heads.num_heads, triton.cdiv(max_queries, block_m), num_sequences)](
        qkv, kv, block_tables, lengths, query_starts, out,
        qkv.stride(0), kv.stride(0), kv.stride(1), block_tables.stride(0), out.stride(0), heads.scale * _LOG2_E,
        GROUP=heads.num_heads // heads.num_kv_heads, KV_HEADS=heads.num_kv_heads, DIM=heads.head_dim, PADDED=padded,
        BLOCK_M=block_m, BLOCK_N=32 if is_wide else 64, BLOCK_SIZE=block_size,
        PRECISION="tf32x3" if is_wide else "tf32",
        num_warps=8 if block_m == 128 or is_wide else 4, num_stages=2 if is_wide else 3, **launch_options(),
    )  # fmt: skip
    return out
