"""Causal attention of runs of new tokens over the paged cache, which holds their own keys and values already.

How many tokens each sequence has is known on the device only: the host launches as many programs as the number of rows
can need, and each looks up what it is for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.kernels.batch import AttentionBatch, HeadShape
from weft.kernels.kv_cache import Fp8Cache, LayerCache, block_size_of, numbers_in
from weft.kernels.triton.decode_attention import as_half, decode_attention, inverse, key_scales, value_scales
from weft.kernels.triton.launch import (
    awaits_slow_kernels,
    cdiv,
    has_gluon,
    launch_options,
    next_power_of_2,
    wait_for_inputs,
)
from weft.switches import is_on

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"


_LOG2_E = 1.4426950408889634
_LEAST = tl.constexpr(-1.0e30)
_MANY_ROWS = 768
_WIDE_ROWS = 384
"""Rows from which the kernel of compute capability 9 is used. It takes half the time where the context is long, and as
much where it is short; only prompts of some 50 tokens, which leave most of its tiles empty, take longer."""


class PrefillConfig(NamedTuple):
    """The tiling of a launch: one program takes `queries` queries of one head."""

    queries: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None
    """The most of a thread; None: as many as there are."""


@triton.jit
def _find(query_starts, num_sequences, rank, BLOCK_M: tl.constexpr):
    """The sequence and the tile of queries that come at this rank: the last sequence first, and of each its last tile,
    which has the most to read. Past all of them: -1, and how far past."""
    WINDOW: tl.constexpr = 32
    passed = 0
    before = 0
    total = 0
    for begin in range(0, num_sequences, WINDOW):
        sequence = num_sequences - 1 - begin - tl.arange(0, WINDOW)
        start = tl.load(query_starts + sequence, mask=sequence >= 0, other=0).to(tl.int32)
        stop = tl.load(query_starts + sequence + 1, mask=sequence >= 0, other=0).to(tl.int32)
        tiles = tl.cdiv(stop - start, BLOCK_M)
        ends = total + tl.cumsum(tiles, axis=0)
        is_passed = (ends <= rank) & (sequence >= 0)
        passed += tl.sum(is_passed.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(is_passed, ends, 0), axis=0))
        total += tl.sum(tiles, axis=0)
    return num_sequences - 1 - passed, rank - before


@triton.jit
def _attend(
    sums, total, peak, unit, query, query_position, head_kv, head_words, table, length, first, end, block_stride,
    token_stride, words_stride, scale, value_offset, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens first..end of the cache. Unmasked, all of them are known to every query. Scaled, the sums are in units of
    the largest scale of a value so far, as in a decode."""
    column = tl.arange(0, PADDED)
    for start in range(first, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=position < length, other=0)
        else:
            block = tl.load(table + position // BLOCK_SIZE)
        # Block numbers fit in 32 bits, and a product of two such is one instruction.
        block = block.to(tl.int32).to(tl.int64)
        at = head_kv + block * block_stride + (position % BLOCK_SIZE) * token_stride
        at = at[:, None] + column[None, :]
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
        if SCALED:
            word_at = head_words + block * words_stride + position % BLOCK_SIZE
            if MASKED:  # noqa: SIM108 (known when compiling)
                word = tl.load(word_at, mask=position < length, other=0)
            else:
                word = tl.load(word_at)
            keys, values = keys.to(tl.float16), values.to(tl.float16)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if SCALED:
            scores *= key_scales(word)[None, :]
        if MASKED:
            scores = tl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        shrink = tl.exp2(peak - highest)
        shares = tl.exp2(scores * scale - highest[:, None])
        total = total * shrink + tl.sum(shares, axis=1)
        if SCALED:
            largest = tl.maximum(unit, tl.max(value_scales(word), axis=0))
            shares *= (value_scales(word) * inverse(largest))[None, :]
            shrink *= unit * inverse(largest)
            unit = largest
        sums = tl.dot(shares.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
        peak = highest
    return sums, total, peak, unit


@triton.jit(do_not_specialize=["tables", "lengths", "query_starts", "table_stride", "num_rows", "num_sequences"])
def _prefill_kernel(
    q, kv, words, tables, lengths, query_starts, out, num_rows, num_sequences,
    q_stride, block_stride, token_stride, table_stride, out_stride, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    wait_for_inputs(PDL)
    sequence, rank = _find(query_starts, num_sequences, tl.program_id(1), BLOCK_M)
    origin = tl.load(query_starts)
    column = tl.arange(0, PADDED)
    if sequence < 0:
        # Rows that no sequence owns lie behind the last one's. What is computed from them must not be NaN.
        spare = tl.load(query_starts + num_sequences) - origin + rank * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (spare < num_rows)[:, None] & (column < DIM)[None, :]
        nothing = tl.zeros([BLOCK_M, PADDED], dtype=out.dtype.element_ty)
        tl.store(out + spare[:, None] * out_stride + head * DIM + column[None, :], nothing, mask=inside)
        return
    start = tl.load(query_starts + sequence)
    count = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    length = tl.load(lengths + sequence).to(tl.int32)
    tile = tl.cdiv(count, BLOCK_M) - 1 - rank
    own = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_position = length - count + own
    inside = (own < count)[:, None] & (column < DIM)[None, :]
    row = start - origin + own
    query = tl.load(q + row[:, None] * q_stride + head * DIM + column[None, :], mask=inside, other=0.0)
    if SCALED:
        query = as_half(query)
    table = tables + sequence.to(tl.int64) * table_stride
    head_kv = kv + (head // GROUP) * HEAD_STRIDE
    head_words = words + (head // GROUP) * BLOCK_SIZE

    peak = tl.full([BLOCK_M], _LEAST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED], dtype=tl.float32)
    unit = tl.full([], 2.0**-126, dtype=tl.float32)
    # Every query of the tile knows the tokens up to its first one's position.
    shared = (length - count + tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(length - count + (tile + 1) * BLOCK_M, length)
    sums, total, peak, unit = _attend(
        sums, total, peak, unit, query, query_position, head_kv, head_words, table, length, 0, shared, block_stride,
        token_stride, KV_HEADS * BLOCK_SIZE, scale, KV_HEADS * HEAD_STRIDE, DIM, PADDED, BLOCK_N, BLOCK_SIZE, SCALED,
        False, PRECISION,
    )  # fmt: skip
    sums, total, peak, unit = _attend(
        sums, total, peak, unit, query, query_position, head_kv, head_words, table, length, shared, end, block_stride,
        token_stride, KV_HEADS * BLOCK_SIZE, scale, KV_HEADS * HEAD_STRIDE, DIM, PADDED, BLOCK_N, BLOCK_SIZE, SCALED,
        True, PRECISION,
    )  # fmt: skip
    if SCALED:
        sums *= unit
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + row[:, None] * out_stride + head * DIM + column[None, :], result.to(out.dtype.element_ty), mask=inside
    )


_FEW_QUERIES = PrefillConfig(64, 64, 4, 3)


def prefill_config(num_rows: int, itemsize: int, head_dim: int, is_fp8: bool) -> PrefillConfig:
    """Return the tiling, as measured on an H200: 64 queries for 1 to 16 prompts of 32 to 2,048 tokens, the best or
    within 12 % of it; where there are enough of them for the chip twice as many, which read the cache half as often,
    in programs of so few registers that two share a multiprocessor: one multiplies while the other's softmax is
    computed."""
    if itemsize == 4:
        return PrefillConfig(64, 32, 8, 2)
    if num_rows >= _MANY_ROWS and head_dim == 128 and not is_fp8:
        return PrefillConfig(128, 64, 8, 3, 128)
    return _FEW_QUERIES


def prefill_attention(
    qkv: Tensor,
    heads: HeadShape,
    kv: LayerCache,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """[rows of qkv, heads * head dim]. The new tokens of sequence i, at least none, are the last of its lengths[i]
    cached ones and stand in the rows query_starts[i]..query_starts[i + 1] of qkv, counted so that query_starts[0] is
    its first row. Rows behind the last sequence's give zeros. Nothing but shapes is read on the host. The cache is
    contiguous."""
    num_rows, num_sequences, block_size = qkv.shape[0], block_tables.shape[0], block_size_of(kv)
    if out is None:
        out = torch.empty(num_rows, heads.q_size, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    is_fp8 = isinstance(kv, Fp8Cache)
    numbers = numbers_in(kv)
    words = kv.scales.view(torch.int32) if isinstance(kv, Fp8Cache) else numbers
    if not numbers.is_contiguous() or qkv.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("rows and the cache must be contiguous")
    is_wide = num_rows >= _WIDE_ROWS and not is_fp8 and _is_wide(qkv, heads, numbers)
    if is_wide and not awaits_slow_kernels():
        from weft.kernels.triton.wide_prefill import wide_prefill_attention

        scale = heads.scale * _LOG2_E
        wide_prefill_attention(qkv, heads, numbers, block_tables, lengths, query_starts, scale, out)
        return out
    config = _FEW_QUERIES if is_wide else prefill_config(num_rows, qkv.itemsize, heads.head_dim, is_fp8)
    # Enough for the sequences' tiles and those of the rows behind, however the rows are shared out.
    most_tiles = cdiv(num_rows, config.queries) + num_sequences
    _prefill_kernel[(heads.num_heads, most_tiles)](
        qkv, numbers, words, block_tables, lengths, query_starts, out, num_rows, num_sequences, qkv.stride(0),
        numbers.stride(0), heads.head_dim if is_fp8 else heads.kv_size, block_tables.stride(0), out.stride(0),
        heads.scale * _LOG2_E,
        GROUP=heads.num_heads // heads.num_kv_heads, KV_HEADS=heads.num_kv_heads, DIM=heads.head_dim,
        PADDED=max(16, next_power_of_2(heads.head_dim)),
        HEAD_STRIDE=heads.head_dim * (block_size if is_fp8 else 1), BLOCK_M=config.queries, BLOCK_N=config.tokens,
        BLOCK_SIZE=block_size, SCALED=is_fp8, PRECISION="tf32x3" if qkv.itemsize == 4 else "tf32",
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers, **launch_options(),
    )  # fmt: skip
    return out


def _is_wide(qkv: Tensor, heads: HeadShape, numbers: Tensor) -> bool:
    """Return whether there is the kernel for compute capability 9: it computes the same, faster."""
    return (
        (qkv.dtype, heads.head_dim, numbers.shape[1]) == (numbers.dtype, 128, 16)
        and qkv.itemsize == 2
        and has_gluon()
        and is_on("wide-prefill")
    )


_LIBRARY_TOKENS = range(1024, 8193, 256)
"""Lengths at which the library pays. It plans every length anew, for some 40 ms: so not every length."""


def attention(qkv: Tensor, heads: HeadShape, kv: LayerCache, batch: AttentionBatch) -> Tensor:
    """Causal attention of each sequence's new tokens over its cached ones; [tokens, heads * head dim]. Launches depend
    on shapes only: a captured step may be replayed with other tables, lengths and starts."""
    # The library does not read the cache. Keys that are rounded there must be seen so by their own step too: an answer
    # would else depend on how much of its prompt was cached, and on its chunks.
    is_exact = isinstance(kv, Tensor) and qkv.dtype.itemsize == 2
    if batch.is_one_prompt and len(qkv) in _LIBRARY_TOKENS and is_exact and is_on("library-attention"):
        return _prompt_attention(qkv, heads)
    decodes, tables, lengths = batch.num_decodes, batch.block_tables, batch.lengths
    out = torch.empty(qkv.shape[0], heads.q_size, dtype=qkv.dtype, device=qkv.device)
    if decodes:
        decode_attention(qkv[:decodes], heads, kv, tables[:decodes], lengths[:decodes], out[:decodes])
    if decodes < len(tables):
        starts = batch.query_starts[decodes:]
        prefill_attention(qkv[decodes:], heads, kv, tables[decodes:], lengths[decodes:], starts, out[decodes:])
    return out


def _prompt_attention(qkv: Tensor, heads: HeadShape) -> Tensor:
    """Compute the attention of one prompt over itself: the cache is not read."""
    sizes = [heads.q_size, heads.kv_size // 2, heads.kv_size // 2]
    query, key, value = (
        part.view(1, len(qkv), -1, heads.head_dim).transpose(1, 2) for part in torch.split(qkv, sizes, dim=1)
    )
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=heads.num_heads != heads.num_kv_heads
        )
    return out.transpose(1, 2).reshape(len(qkv), heads.q_size)
