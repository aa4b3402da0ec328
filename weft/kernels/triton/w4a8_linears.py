"""Linear layers of 65 to 256 rows, rounded to e4m3, with weights of four bits as they are.

A number n of four bits, written into a byte, is the e4m3 number n / 512: to unpack words is to mask and shift them. A
program multiplies a block of 128 columns in FP8 and adds the product, times the scales of the block, to its sums in
float32. What zeros take away is, for each block, scale * zero * the sum of the row's numbers: one small product at the
end of a job.

The bytes of two neighbouring words are four numbers of which a matrix instruction takes neighbours for such: columns of
the rows are put in that order when they are rounded.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.fp8 import E4M3, E4M3_MAX, SMALLEST_SCALE
from weft.kernels.int_weights import BLOCK, MIDDLE, TILE, IntWeight
from weft.kernels.triton.elementwise import divided
from weft.kernels.triton.int_jobs import job_of, store_outputs, tiles_of, words_of
from weft.kernels.triton.launch import cdiv, is_last, launch_options, wait_for_inputs, zeroed_counters

MIN_ROWS, MAX_ROWS = 65, 256
_BLOCK, _TILE, _MIDDLE = tl.constexpr(BLOCK), tl.constexpr(TILE), tl.constexpr(MIDDLE)
_WORDS = tl.constexpr(TILE * BLOCK // 4)
_E4M3_MAX, _SMALLEST_SCALE = tl.constexpr(E4M3_MAX), tl.constexpr(SMALLEST_SCALE)
_BYTE = tl.constexpr(512.0)
"""A byte n stands for n / 512."""
_PADDING = 128
"""Rows of a tiling, or a divisor of them: rows that are only there to be read."""
_ZEROS_AT_ONCE = tl.constexpr(16)
"""Blocks whose zeros are multiplied at once."""
_MULTIPROCESSORS = 132
_LONG = 64
"""Blocks of a job that is worth sharing by two programs of one multiprocessor."""
_UNPACKING = """{
.reg .b32 mask, high;
mov.b32 mask, 0x0F0F0F0F;
and.b32 $0, $4, mask;
shr.u32 high, $4, 4;
and.b32 $1, high, mask;
and.b32 $2, $5, mask;
shr.u32 high, $5, 4;
and.b32 $3, high, mask;
}"""
"""Two pairs of words become the bytes of quarters 0 and 2, and of 1 and 3, of the first pair, and those of the second.
"""


class BlockRows(NamedTuple):
    """The input of a linear layer as e4m3 numbers in the order in which blocks of weights are multiplied."""

    numbers: Tensor
    """e4m3, [blocks, rows, BLOCK], with zeros behind the last column. There are more rows than scales, of no meaning: a
    program reads as many as it multiplies at most, and its places are neighbours."""
    scales: Tensor
    """float32, [rows, 1]."""
    sums: Tensor
    """float32, [blocks, rows]: of the numbers of a block. There are as many rows."""


class BlockConfig(NamedTuple):
    """The tiling of a product: jobs of `tiles` tiles of weights, gates and ups counted alike, and `rows` rows."""

    rows: int
    """A power of two."""
    tiles: int
    split_k: int
    """Programs that share a job."""
    warps: int
    stages: int
    at_once: int
    """Rows of one product of a block, which takes as many registers as the sums of these rows."""
    whole: int = 0
    """Jobs, the first ones, that programs do not share."""
    registers: int = 255
    """The most of a thread."""


def block_order(device: torch.device | str = "cpu") -> Tensor:
    """Return the column of each place of a block."""
    by_quarter = torch.arange(BLOCK, device=device).view(2, 2, 2, 2, 4, 2)
    # Halves of the block, its quarters in them, words of a step, their eights, threads, and neighbours.
    return by_quarter.permute(2, 3, 1, 4, 5, 0).flatten()


@triton.jit
def _eights(pointers, columns, num_columns):
    """Load places of blocks, [8, 4, WARPS, 16], from these columns and those half a block behind them."""
    HALF: tl.constexpr = _BLOCK // 2
    low = tl.load(pointers, mask=columns < num_columns, other=0.0)
    high = tl.load(pointers + HALF, mask=columns + HALF < num_columns, other=0.0)
    return tl.reshape(tl.join(low, high), [8, 4, low.shape[2], 16])


@triton.jit
def _block_rows_kernel(
    x, norm, out, scales, sums, num_columns, num_blocks, padded_rows, stride, eps,
    WARPS: tl.constexpr, CHUNKS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row is in chunks of 4 * WARPS blocks. A thread has an eighth of a block, 16 places, and its neighbours have the
    others: they load and store whole lines, and what they have stays with them. Eighths are the first dimension, as
    the compiler gives neighbouring threads what is next to each other in the first one."""
    HELD: tl.constexpr = 4 * WARPS
    row = tl.program_id(0).to(tl.int64)
    eighth = tl.arange(0, 8)[:, None, None]
    block = eighth * 0 + tl.arange(0, 4)[None, :, None] * WARPS + tl.arange(0, WARPS)[None, None, :]
    # The eight neighbours at these places of the order: the quarter is its lowest bit, and above the others in memory.
    column = (block * _BLOCK + (eighth % 2 * 4 + eighth // 2) * 8)[:, :, :, None] + tl.arange(0, 8)
    weights = ()
    if NORM:
        for chunk in tl.static_range(CHUNKS):
            columns = column + chunk * HELD * _BLOCK
            weights = weights + (_eights(norm + columns, columns, num_columns),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_inputs(PDL)
    values = ()
    for chunk in tl.static_range(CHUNKS):
        columns = column + chunk * HELD * _BLOCK
        values = values + (_eights(x + row * stride + columns, columns, num_columns),)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:
        squares = tl.zeros([8, 4, WARPS], dtype=tl.float32)
        for chunk in tl.static_range(CHUNKS):
            wide = values[chunk].to(tl.float32)  # type: ignore[var-annotated]
            squares += tl.sum(wide * wide, axis=3)
        spread = tl.rsqrt(tl.sum(squares) / num_columns + eps)
        normal = ()
        for chunk in tl.static_range(CHUNKS):
            once = (values[chunk].to(tl.float32) * spread).to(x.dtype.element_ty).to(tl.float32)
            normal = normal + ((once * weights[chunk].to(tl.float32)).to(x.dtype.element_ty),)  # noqa: RUF005
        values = normal
    most = tl.zeros([8, 4, WARPS], dtype=tl.float32)
    for chunk in tl.static_range(CHUNKS):
        most = tl.maximum(most, tl.max(tl.abs(values[chunk].to(tl.float32)), axis=3))
    # What is not negative has the order of its bits.
    largest = tl.max(most.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    scale = tl.maximum(largest / _E4M3_MAX, _SMALLEST_SCALE)
    tl.store(scales + row, scale)
    for chunk in tl.static_range(CHUNKS):
        scaled = divided(values[chunk].to(tl.float32), scale)
        # Adding what has the last bit of an e4m3 number of this size for its own last bit rounds to it. The numbers are
        # not read back from their bytes: ptxas 12.8 takes them from a register that it has not written.
        exponent = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.maximum(exponent, 0.015625) * 1572864.0
        rounded = (scaled + large) - large
        own = block + chunk * HELD
        of_block = tl.broadcast_to(tl.sum(tl.sum(rounded, axis=3), axis=0, keep_dims=True), own.shape)
        tl.store(sums + own * padded_rows + row, of_block, mask=(own < num_blocks) & (eighth == 0))
        first = (own.to(tl.int64) * padded_rows + row) * _BLOCK + eighth * 16
        place = first[:, :, :, None] + tl.arange(0, 16)
        tl.store(out + place, rounded.to(out.dtype.element_ty), mask=(own < num_blocks)[:, :, :, None])


def block_rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> BlockRows:
    """Return the rows of x, or of their RMSNorm, as e4m3 in the order of blocks."""
    num_rows, num_columns = x.shape
    num_blocks = cdiv(num_columns, BLOCK)
    padded_rows = cdiv(num_rows, _PADDING) * _PADDING
    out = torch.empty(num_blocks, padded_rows, BLOCK, dtype=E4M3, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    sums = torch.empty(num_blocks, padded_rows, dtype=torch.float32, device=x.device)
    rows = x if x.stride(1) == 1 else x.contiguous()
    warps = 4 if num_blocks <= 16 else 8
    if num_rows:
        _block_rows_kernel[(num_rows,)](
            rows, rows if norm is None else norm, out, scales, sums, num_columns, num_blocks, padded_rows,
            rows.stride(0), eps, WARPS=warps, CHUNKS=cdiv(num_blocks, 4 * warps), NORM=norm is not None,
            num_warps=warps, **launch_options(),
        )  # fmt: skip
    return BlockRows(out, scales, sums)


@triton.jit
def _weights(words, TILES: tl.constexpr, UNPACK: tl.constexpr):
    """Return a block of weights as e4m3, [rows of weights, places]. UNPACK is the hardware's way to unpack the four
    neighbouring words that are in the same registers of a thread, or empty."""
    if UNPACK == "":
        wide = words.to(tl.int32)
        even = tl.join((wide & 15).to(tl.int8), (wide >> 4 & 15).to(tl.int8))
        odd = tl.join((wide >> 8 & 15).to(tl.int8), (wide >> 12 & 15).to(tl.int8))
        split = tl.reshape(tl.join(even, odd), [2, TILES, 4, 8, 4, 2, 2, 2, 2, 2])
        laid = tl.permute(split, [1, 2, 5, 3, 0, 6, 8, 4, 7, 9])
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        joined = tl.join(tl.join(first, second), tl.join(third, fourth))
        split = tl.reshape(joined, [2, TILES, 4, 8, 4, 2, 2, 2, 2, 2])
        laid = tl.permute(split, [1, 2, 5, 3, 0, 9, 8, 4, 6, 7])
    return tl.reshape(laid, [TILES * _TILE, _BLOCK]).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _by_row(values, TILES: tl.constexpr):
    """Return values of the rows of tiles, [..., TILES * 32, 2] as they are stored, in the order of rows."""
    return tl.reshape(tl.permute(tl.reshape(values, [TILES, 4, 8, 2]), [0, 1, 3, 2]), [TILES * _TILE])


@triton.jit
def _taken(scales, zeros, tile, num_groups, begin, last, TILES: tl.constexpr, GROUP: tl.constexpr,
           KIND: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Return what is added for each sum of a block's numbers, -scale * zero, [rows of weights, blocks], and its rest
    behind the bits of TYPE; nothing for blocks from `last` on."""
    block = begin + tl.arange(0, _ZEROS_AT_ONCE)[:, None, None]
    tile_at = (tile.to(tl.int64) * num_groups * _TILE)[None, :, None]
    at = tile_at + block * _BLOCK // GROUP * _TILE + tl.arange(0, _TILE)[None, None, :]
    scale = tl.load(scales + at, mask=block < last, other=0.0).to(tl.float32)
    zero = tl.full(scale.shape, _MIDDLE, tl.float32)
    if KIND != "":
        zero = tl.load(zeros + at, mask=block < last, other=0.0).to(tl.float32)
    laid = tl.permute(tl.reshape(-scale * zero, [_ZEROS_AT_ONCE, TILES, 4, 8, 2]), [1, 2, 4, 3, 0])
    by_row = tl.reshape(laid, [TILES * _TILE, _ZEROS_AT_ONCE])
    high = by_row.to(TYPE)
    return high, (by_row - high.to(tl.float32)).to(TYPE)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_blocks", "num_groups", "whole"])
def _w4a8_kernel(
    x, x_scales, sums, numbers, scales, zeros, bias, residual, out, partials, counters,
    num_rows, padded_rows, num_outputs, num_tiles, num_blocks, num_groups, residual_stride, whole,
    GROUP: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, TILES: tl.constexpr, SPLIT_K: tl.constexpr,
    KIND: tl.constexpr, UNPACK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A job is TILES tiles of weights times ROWS rows, AT_ONCE of them in one product."""
    OWN: tl.constexpr = (TILES // 2 if GATED else TILES) * _TILE
    HEIGHT: tl.constexpr = TILES * _TILE
    SIZE: tl.constexpr = HEIGHT * ROWS
    TURNS: tl.constexpr = ROWS // AT_ONCE
    row_jobs = tl.cdiv(num_rows, ROWS)
    job, part, sharing, first, last = job_of(num_blocks, whole, SPLIT_K)
    tile = tiles_of(job // row_jobs, num_tiles, TILES, GATED)
    words_at = words_of(numbers, tile, num_blocks, 4)
    tile_at = (tile.to(tl.int64) * num_groups * _TILE)[:, None, None]
    pair = (tl.arange(0, 32) * 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
    scales_at = scales + tile_at + pair
    first_row = job % row_jobs * ROWS
    row = tl.arange(0, AT_ONCE)
    place = tl.arange(0, _BLOCK)
    x_at = x + first_row * _BLOCK + row[:, None] * _BLOCK + place[None, :]
    # The compiler has only operands of products on their way. Scales are loaded a block ahead.
    next_scale = tl.load(scales_at + first * _BLOCK // GROUP * _TILE)
    wait_for_inputs(PDL)

    y = ()
    for _ in tl.static_range(TURNS):
        y = y + (tl.zeros([HEIGHT, AT_ONCE], dtype=tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for block in range(first, last):
        scale = next_scale
        next_scale = tl.load(scales_at + tl.minimum(block + 1, last - 1) * _BLOCK // GROUP * _TILE)
        weights = _weights(tl.load(words_at + block * _WORDS), TILES, UNPACK)
        by_row = (_by_row(scale, TILES).to(tl.float32) * _BYTE)[:, None]
        summed = ()
        for turn in tl.static_range(TURNS):
            inputs = tl.load(x_at + block * padded_rows * _BLOCK + turn * (AT_ONCE * _BLOCK))
            product = tl.dot(weights, tl.trans(inputs))
            summed = summed + (y[turn] + product * by_row,)  # type: ignore[assignment]  # noqa: RUF005
        y = summed

    # The interpreter multiplies matrices of bfloat16 as if they were integers.
    TYPE: tl.constexpr = tl.float32 if UNPACK == "" else tl.bfloat16
    for begin in tl.range(first, last, _ZEROS_AT_ONCE, num_stages=3):
        taken, taken_rest = _taken(scales, zeros, tile, num_groups, begin, last, TILES, GROUP, KIND, TYPE)
        blocks = begin + tl.arange(0, _ZEROS_AT_ONCE)[:, None]
        less = ()
        for turn in tl.static_range(TURNS):
            at = blocks * padded_rows + first_row + turn * AT_ONCE + row[None, :]
            of_block = tl.load(sums + at, mask=blocks < last, other=0.0)
            high = of_block.to(TYPE)
            rest = (of_block - high.to(tl.float32)).to(TYPE)
            z = tl.dot(taken, high, y[turn])
            z = tl.dot(taken, rest, z)
            if KIND != "" or scales.dtype.element_ty != tl.bfloat16:
                z = tl.dot(taken_rest, high, z)
            less = less + (z,)  # type: ignore[assignment]  # noqa: RUF005
        y = less

    is_whole = (SPLIT_K == 1) | (sharing < 0)
    if SPLIT_K > 1:  # noqa: SIM102 (known when compiling)
        if sharing >= 0:
            within = row[None, :] * HEIGHT + tl.arange(0, HEIGHT)[:, None]
            parts_at = partials + (sharing - part) * SIZE + within
            for turn in tl.static_range(TURNS):
                is_row = (first_row + turn * AT_ONCE + row < num_rows)[None, :]
                tl.store(parts_at + part * SIZE + turn * (HEIGHT * AT_ONCE), y[turn], mask=is_row)
            is_whole = is_last(counters, job, SPLIT_K)
            if is_whole:
                total = ()
                for turn in tl.static_range(TURNS):
                    is_row = (first_row + turn * AT_ONCE + row < num_rows)[None, :]
                    z = tl.zeros([HEIGHT, AT_ONCE], dtype=tl.float32)
                    for each in range(SPLIT_K):
                        at = parts_at + each * SIZE + turn * (HEIGHT * AT_ONCE)
                        z += tl.load(at, mask=is_row, other=0.0, cache_modifier=".cg")
                    total = total + (z,)  # type: ignore[assignment]  # noqa: RUF005
                y = total

    if is_whole:
        own = job // row_jobs * OWN + tl.arange(0, OWN)[:, None]
        for turn in tl.static_range(TURNS):
            rows = (first_row + turn * AT_ONCE + row)[None, :]
            z = y[turn] * tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)
            store_outputs(
                z, None, bias, residual, out, own, rows, num_rows, num_outputs, residual_stride, OWN, BIAS, GATED, ADD
            )


def w4a8_config(rows: int, num_tiles: int, num_blocks: int, gated: bool) -> BlockConfig:
    """Return the tiling of a product, as measured on the linear layers of a 7B model: programs of four warps, two of
    which share a multiprocessor."""
    tiles = 2 if gated else 1
    padded = 256 if rows > 128 and not gated and num_tiles >= _MULTIPROCESSORS else 128
    jobs = cdiv(num_tiles, tiles) * cdiv(rows, padded)
    # A job a multiprocessor, as often as all have one. The others are shared by as many programs as these leave room,
    # but short ones by no more than one a multiprocessor.
    turns, rest = divmod(jobs, _MULTIPROCESSORS)
    programs = 2 * _MULTIPROCESSORS if turns % 2 == 0 and (turns or num_blocks >= _LONG) else _MULTIPROCESSORS
    split_k = max(1, min(programs // max(1, rest), num_blocks // 4))
    return BlockConfig(padded, tiles, split_k, 4, 3 if padded == 256 else 4, 64 if gated else 128, whole=jobs - rest)


def is_for(num_rows: int, weight: IntWeight) -> bool:
    """Return whether this many rows are multiplied by a weight here."""
    return (
        weight.row_scales is not None
        and MIN_ROWS <= num_rows <= MAX_ROWS
        and weight.bits == 4
        and weight.minima is None
        and weight.order is None
        and (weight.group_size % BLOCK == 0 or weight.group_size >= weight.shape[1])
    )


def product(
    x: BlockRows,
    weight: IntWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool = False,
    config: BlockConfig | None = None,
) -> None:
    """Multiply rows into `out`, or add to the residual, which is `out` then."""
    num_rows, padded_rows = len(x.scales), x.numbers.shape[1]
    if num_rows == 0:
        return
    num_tiles, num_blocks, _ = weight.numbers.shape
    config = config or w4a8_config(num_rows, num_tiles, num_blocks, gated)
    rows, tiles, split_k, warps, stages, at_once, whole, registers = config
    num_outputs = out.shape[1]
    jobs = cdiv(num_rows, rows) * cdiv(num_outputs, TILE * (tiles // 2 if gated else tiles))
    whole = min(whole, jobs)
    programs = whole + (jobs - whole) * split_k
    partials = torch.empty((programs - whole) * tiles * TILE * rows if split_k > 1 else 0, device=out.device)
    # Tensors without memory stand for those of a GPU.
    is_interpreted = out.device.type == "cpu"
    _w4a8_kernel[(programs,)](
        x.numbers, x.scales, x.sums, weight.numbers, weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out if bias is None else bias, out if residual is None else residual, out, partials,
        zeroed_counters(out.device),
        num_rows, padded_rows, num_outputs, num_tiles, num_blocks, weight.num_groups,
        0 if residual is None else residual.stride(0), whole,
        GROUP=weight.group_size, ROWS=rows, AT_ONCE=at_once, TILES=tiles, SPLIT_K=split_k,
        KIND="" if weight.zeros is None else "zeros", UNPACK="" if is_interpreted else _UNPACKING,
        BIAS=bias is not None, GATED=gated, ADD=residual is not None,
        num_warps=warps, num_stages=stages, maxnreg=registers, **launch_options(),
    )  # fmt: skip


def linear(x: BlockRows, weight: IntWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product as this type."""
    out = torch.empty(len(x.scales), weight.shape[0], dtype=dtype, device=x.numbers.device)
    product(x, weight, bias, None, out)
    return out


def gate_up(x: BlockRows, weight: IntWeight, dtype: torch.dtype) -> Tensor:
    """Return SiLU(gates) * ups as this type. The gates are the first half of the weight, of whole tiles."""
    out = torch.empty(len(x.scales), weight.shape[0] // 2, dtype=dtype, device=x.numbers.device)
    product(x, weight, None, None, out, gated=True)
    return out


def linear_add(x: BlockRows, weight: IntWeight, bias: Tensor | None, residual: Tensor) -> None:
    product(x, weight, bias, residual, residual)
