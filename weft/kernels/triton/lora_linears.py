"""LoRA for the tokens of a step that have different adapters, or none: two kernels for each linear layer.

The tokens are grouped by the slots of their adapters. A program takes a tile of one slot's weights, while the kernel
before it may still be running, and multiplies all the slot's rows by it; the weights of slots without rows are not
read. What is in a slot and how many rows it has is known on the device alone, so one CUDA graph serves any adapters.

`lora_shrink` cuts the inner dimension among programs. The kernel behind it adds their parts in their order: a result
does not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.batch import AdapterGroups
from weft.kernels.triton.elementwise import silu_times
from weft.kernels.triton.launch import cdiv, launch_options, wait_for_inputs
from weft.kernels.weights import SlotLowRank

_ROWS = tl.constexpr(16)
"""Rows that are multiplied together: the least that the matrix units take."""
_MAX_ROWS = tl.constexpr(64)
"""Rows of a slot that one program takes."""
_MAX_K, _MAX_N, _MAX_GATES = 1024, 128, 64
_SHRINK_BYTES, _EXPAND_BYTES = 32 << 10, 16 << 10
"""Columns of inputs, outputs and gates of a tile, and its bytes, at most. Measured on an H200: many small programs are
faster than few large ones, and so is a chain of products that is not cut too often."""


@triton.jit
def _rows_of(starts, group):
    """Return where this program's rows of a group begin and end. There may be none."""
    begin = tl.load(starts + group).to(tl.int32) + tl.program_id(2) * _MAX_ROWS
    end = tl.load(starts + group + 1).to(tl.int32)
    return begin, tl.minimum(end, begin + _MAX_ROWS)


@triton.jit
def _tokens_at(order, first, end):
    """Return the places of up to _ROWS rows in the order of groups, those of their tokens, and which there are."""
    at = first + tl.arange(0, _ROWS)
    return at, tl.load(order + at, mask=at < end, other=0).to(tl.int64), (at < end)[:, None]


@triton.jit
def _ranks_of(
    partials, at, inside, part, num_tokens, dtype: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the product of rows and one part's `shrink`, from the parts that the programs of `lora_shrink` left."""
    ranks_at = partials + at[:, None] * (PARTS * RANK) + part * RANK + tl.arange(0, RANK)[None, :]
    ranks = tl.zeros([_ROWS, RANK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        ranks += tl.load(ranks_at + split * num_tokens * (PARTS * RANK), mask=inside, other=0.0)
    return ranks.to(dtype)


@triton.jit(do_not_specialize=["order", "starts", "num_tokens"])
def _shrink_kernel(
    x, weights, order, starts, partials, num_tokens, k, x_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    split = tl.program_id(0) // PARTS
    slot = tl.program_id(1)
    begin, end = _rows_of(starts, slot + 1)
    rank = tl.arange(0, RANK)
    column = split * BLOCK_K + tl.arange(0, BLOCK_K)
    tile_at = weights + ((slot * PARTS + part) * RANK + rank).to(tl.int64)[:, None] * k + column[None, :]
    if EVEN_K:
        tile = tl.load(tile_at, mask=begin < end, other=0.0)
    else:
        tile = tl.load(tile_at, mask=(begin < end) & (column < k)[None, :], other=0.0)
    at, token, inside = _tokens_at(order, begin, end)
    wait_for_inputs(PDL)
    for first in range(begin, end, _ROWS):
        x_at = x + token[:, None] * x_stride + column[None, :]
        if EVEN_K:
            rows = tl.load(x_at, mask=inside, other=0.0)
        else:
            rows = tl.load(x_at, mask=inside & (column < k)[None, :], other=0.0)
        ranks = tl.dot(rows, tl.trans(tile), input_precision=PRECISION)
        own = (split * num_tokens + at)[:, None] * (PARTS * RANK) + part * RANK + rank[None, :]
        tl.store(partials + own, ranks, mask=inside)
        at, token, inside = _tokens_at(order, first + _ROWS, end)


@triton.jit(do_not_specialize=["order", "starts", "num_tokens"])
def _expand_add_kernel(
    partials, weights, order, starts, y, num_tokens, first_end, second_end, num_outputs, y_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The tiles of one part of the outputs follow those of the part before; none is in two parts."""
    tile = tl.program_id(0)
    slot = tl.program_id(1)
    first_tiles = tl.cdiv(first_end, BLOCK_N)
    both_tiles = first_tiles + tl.cdiv(second_end - first_end, BLOCK_N)
    part = (tile >= first_tiles).to(tl.int32) + (tile >= both_tiles).to(tl.int32)
    begin_n = tl.where(part == 0, 0, tl.where(part == 1, first_end, second_end))
    begin_n += (tile - tl.where(part == 0, 0, tl.where(part == 1, first_tiles, both_tiles))) * BLOCK_N
    end_n = tl.where(part == 0, first_end, tl.where(part == 1, second_end, num_outputs))
    begin, end = _rows_of(starts, slot + 1)
    output = begin_n + tl.arange(0, BLOCK_N)
    is_output = (output < end_n)[None, :]
    outputs_at = (slot.to(tl.int64) * num_outputs + output)[:, None] * RANK
    expand = tl.load(
        weights + outputs_at + tl.arange(0, RANK)[None, :], mask=(begin < end) & (output < end_n)[:, None], other=0.0
    )
    at, token, inside = _tokens_at(order, begin, end)
    wait_for_inputs(PDL)
    for first in range(begin, end, _ROWS):
        ranks = _ranks_of(partials, at, inside, part, num_tokens, expand.dtype, PARTS, RANK, SPLITS)
        y_at = y + token[:, None] * y_stride + output[None, :]
        before = tl.load(y_at, mask=inside & is_output, other=0.0)
        added = tl.dot(ranks, tl.trans(expand), input_precision=PRECISION).to(before.dtype)
        tl.store(y_at, (before.to(tl.float32) + added.to(tl.float32)).to(before.dtype), mask=inside & is_output)
        at, token, inside = _tokens_at(order, first + _ROWS, end)


@triton.jit(do_not_specialize=["order", "starts", "num_tokens"])
def _expand_gate_kernel(
    gate_up, partials, weights, order, starts, out, num_tokens, width, gate_up_stride,
    RANK: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Group 0 are the tokens without an adapter."""
    group = tl.program_id(1)
    begin, end = _rows_of(starts, group)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = (output < width)[None, :]
    has_adapter = group > 0
    outputs_at = ((group - 1).to(tl.int64) * (2 * width) + output)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    is_read = has_adapter & (begin < end) & (output < width)[:, None]
    expand_gate = tl.load(weights + outputs_at, mask=is_read, other=0.0)
    expand_up = tl.load(weights + outputs_at + width * RANK, mask=is_read, other=0.0)
    at, token, inside = _tokens_at(order, begin, end)
    wait_for_inputs(PDL)
    for first in range(begin, end, _ROWS):
        gate_at = gate_up + token[:, None] * gate_up_stride + output[None, :]
        gate = tl.load(gate_at, mask=inside & is_output, other=0.0)
        up = tl.load(gate_at + width, mask=inside & is_output, other=0.0)
        if has_adapter:
            ranks = _ranks_of(partials, at, inside, 0, num_tokens, expand_gate.dtype, 2, RANK, SPLITS)
            added = tl.dot(ranks, tl.trans(expand_gate), input_precision=PRECISION).to(gate.dtype)
            gate = (gate.to(tl.float32) + added.to(tl.float32)).to(gate.dtype)
            ranks = _ranks_of(partials, at, inside, 1, num_tokens, expand_up.dtype, 2, RANK, SPLITS)
            added = tl.dot(ranks, tl.trans(expand_up), input_precision=PRECISION).to(up.dtype)
            up = (up.to(tl.float32) + added.to(tl.float32)).to(up.dtype)
        hidden = silu_times(gate, up).to(out.dtype.element_ty)
        tl.store(out + token[:, None] * width + output[None, :], hidden, mask=inside & is_output)
        at, token, inside = _tokens_at(order, first + _ROWS, end)


def lora_shrink(x: Tensor, weight: SlotLowRank, groups: AdapterGroups) -> Tensor:
    """Return the parts [splits, tokens, parts * rank] of the product; rows of tokens without an adapter are not
    written."""
    num_tokens, k = x.shape
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    block_k = min(_MAX_K, max(16, _SHRINK_BYTES // (x.itemsize * weight.rank)))
    splits, width = cdiv(k, block_k), weight.shrink.shape[1]
    partials = torch.empty(splits, num_tokens, width, dtype=torch.float32, device=x.device)
    _shrink_kernel[(splits * len(weight.ends), len(weight.shrink), _chunks(num_tokens))](
        x, weight.shrink, groups.order, groups.starts, partials, num_tokens, k, x.stride(0),
        PARTS=len(weight.ends), RANK=weight.rank, BLOCK_K=block_k, EVEN_K=k % block_k == 0, PRECISION=_precision(x),
        num_warps=2, num_stages=1, **launch_options(),
    )  # fmt: skip
    return partials


def lora_expand_add(ranks: Tensor, weight: SlotLowRank, groups: AdapterGroups, y: Tensor) -> None:
    """Add the product of `lora_shrink`'s parts and `expand` to y, whose rows are contiguous."""
    if y.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    ends, parts = weight.ends, len(weight.ends)
    block_n = min(_MAX_N, max(16, _EXPAND_BYTES // (y.itemsize * weight.rank)))
    tiles = sum(cdiv(end - begin, block_n) for begin, end in zip((0, *ends), ends, strict=False))
    _expand_add_kernel[(tiles, len(weight.expand), _chunks(len(y)))](
        ranks, weight.expand, groups.order, groups.starts, y, len(y), ends[0], ends[min(1, parts - 1)], ends[-1],
        y.stride(0), PARTS=parts, RANK=weight.rank, BLOCK_N=block_n, SPLITS=len(ranks), PRECISION=_precision(y),
        num_warps=1, num_stages=1, **launch_options(),
    )  # fmt: skip


def lora_expand_gate(gate_up: Tensor, ranks: Tensor, weight: SlotLowRank, groups: AdapterGroups) -> Tensor:
    """Return SiLU·mul of gate_up [tokens, 2 * width] with the low-rank product added."""
    if gate_up.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    num_tokens, width = len(gate_up), weight.ends[0]
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block_n = min(_MAX_GATES, max(16, _EXPAND_BYTES // (2 * gate_up.itemsize * weight.rank)))
    _expand_gate_kernel[(cdiv(width, block_n), len(weight.expand) + 1, _chunks(num_tokens))](
        gate_up, ranks, weight.expand, groups.order, groups.starts, out, num_tokens, width, gate_up.stride(0),
        RANK=weight.rank, BLOCK_N=block_n, SPLITS=len(ranks), PRECISION=_precision(gate_up),
        num_warps=1, num_stages=1, **launch_options(),
    )  # fmt: skip
    return out


def _chunks(num_tokens: int) -> int:
    return int(cdiv(num_tokens, _MAX_ROWS.value))


def _precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
