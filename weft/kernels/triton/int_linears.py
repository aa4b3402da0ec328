"""Linear layers with weights of four or eight bits.

A program multiplies tiles of weights by a block of rows: `out` is computed transposed, so that the weights are the
operand that matrix units take from registers, where they are unpacked. Their layout (`int_weights`) is the one in
which the units hold them: nothing is exchanged between threads. Where there are too few tiles for the chip the inner
dimension is cut, and the program that ends last adds the parts in their order.

For the rows of long prompts a weight is written out once, as floats or as e4m3, and multiplied as such. Weights for
inputs of e4m3 are multiplied in `w4a8_linears` by fewer rows than that.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.fp8 import E4M3, Fp8Weight
from weft.kernels.int_weights import BLOCK, MIDDLE, TILE, IntWeight
from weft.kernels.triton import fp8_linears, w4a8_linears
from weft.kernels.triton.elementwise import rms_norm, silu_mul
from weft.kernels.triton.int_jobs import job_of, store_outputs, tiles_of, words_of
from weft.kernels.triton.launch import cdiv, is_last, launch_options, wait_for_inputs, zeroed_counters

MAX_ROWS = 256
"""Rows up to which weights are multiplied as they are. For 512 rows and the queries, keys and values of a 7B model that
takes 115 us on an H200, and 104 to write the weight out and multiply it by the library."""
_MOST_WRITTEN_OUT = 1 << 16
"""Rows of the largest weight that is written out. A head has more, and logits are never of many rows."""
_BLOCK, _TILE, _MIDDLE = tl.constexpr(BLOCK), tl.constexpr(TILE), tl.constexpr(MIDDLE)
_WORDS = tl.constexpr(TILE * BLOCK // 4)
_MULTIPROCESSORS = 132


@cache
def _unpacking(dtype: torch.dtype, bits: int, minima: bool) -> str:
    """Write the instructions that make four pairs of floats of two words, or of two pairs of words.

    The exponent at which the last bit of a float is a one is put before each number, and taken away with the zero; then
    scales are multiplied. With minima and of eight bits a constant is taken away, and minima are added to the products.
    A bfloat16 has seven bits behind its first: of eight, the sign is taken away by itself. Of a float16 it is turned,
    which adds 128.
    """
    is_bf16, is_byte = dtype == torch.bfloat16, bits == 8
    kind, one, magic, taken = (
        ("bf16x2", 0x3F803F80, 0x43004300, 0xC300C300) if is_bf16 else ("f16x2", 0x3C003C00, 0x64006400, 0xE400E400)
    )
    has_sign, first_scale = is_byte and is_bf16, 6 if is_byte else 5
    mask, combine = 0x000F000F, "0xEA"
    if has_sign:
        mask = 0x007F007F
    elif is_byte:
        mask, combine, magic, taken = 0x00FF00FF, "0x6A", 0x64806480, 0xE480E480
    lines = [".reg .b32 word, bits, one, none, taken;", f"mov.b32 bits, {magic};", f"mov.b32 one, {one};"]
    lines += ["mov.b32 none, 0x80008000;", f"mov.b32 taken, {taken};"]
    for at in range(4):
        words, shift = (4 + at // 2, at % 2 * 8) if is_byte else (4, 4 * at)
        scale, added = f"${first_scale + at}", f"${first_scale + 4 + at}"
        lines += [f"shr.u32 word, ${words}, {shift};", f"lop3.b32 ${at}, word, {mask}, bits, {combine};"]
        if has_sign:
            lines += ["lop3.b32 word, word, 0x00800080, taken, 0xEA;"]
        offset = "word" if has_sign else "taken" if is_byte or minima else added
        lines += [
            f"fma.rn.{kind} ${at}, ${at}, one, {offset};",
            f"fma.rn.{kind} ${at}, ${at}, {scale}, {added if minima else 'none'};",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


class IntConfig(NamedTuple):
    """The tiling of a product: jobs of `tiles` tiles of weights, gates and ups counted alike, and `rows` rows."""

    rows: int
    """A power of two."""
    tiles: int
    split_k: int
    """Programs that share a job."""
    warps: int
    stages: int
    registers: int = 255
    """The most of a thread."""
    whole: int = 0
    """Jobs, the first ones, that programs do not share."""
    ahead: int = 2
    """Blocks of weights that a program of few rows has on their way, the first of them before its inputs are there."""


@triton.jit
def _by_word(values, TILES: tl.constexpr):
    """Repeat values of rows for the words that a thread has of each."""
    return tl.reshape(tl.broadcast_to(values[None, :, :, :, None], [2, TILES, 128, 2, 4]), [2, TILES, 128, 8])


@triton.jit
def _load(at, inside, THREADS: tl.constexpr):
    """Return what is there. With `inside`, zeros where that is false, straight into the registers of the threads that
    multiply it: the compiler gives them the first dimension to share, and THREADS is theirs."""
    if inside is None:
        values = tl.load(at)
    elif THREADS == 2:
        values = tl.permute(tl.load(tl.permute(at, [2, 0, 1, 3]), mask=inside, other=0), [1, 2, 0, 3])
    elif len(at.shape) == 4:
        values = tl.permute(tl.load(tl.permute(at, [1, 0, 2, 3]), mask=inside, other=0), [1, 0, 2, 3])
    else:
        values = tl.permute(tl.load(tl.permute(at, [1, 0, 2]), mask=inside, other=0), [1, 0, 2])
    return values


@triton.jit
def _load_group_values(at, block, inside, GROUP: tl.constexpr):
    if GROUP >= _BLOCK:
        values = _load(at + block * _BLOCK // GROUP * _TILE, inside, 1)
    else:
        values = _load(at + block * (_TILE * (_BLOCK // GROUP)), inside, 1)
    return values


@triton.jit
def _group_values(values, GROUP: tl.constexpr):
    """Return the values of the groups that the four quarters of a block belong to."""
    if GROUP >= _BLOCK:
        first, second, third, fourth = values, values, values, values
    elif GROUP == _BLOCK // 2:
        first, third = tl.split(values)
        second, fourth = first, third
    else:
        even, odd = tl.split(tl.reshape(values, [values.shape[0], 128, 2, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _numbers(words, scale, added, AT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    number = words.to(tl.int32) >> BITS * AT & ((1 << BITS) - 1)
    if BITS == 8:
        number = (number ^ 128) - 128
    value, scale, added = number.to(tl.float32), scale.to(tl.float32), added.to(tl.float32)
    if KIND == "minima":
        return value * scale + added
    return ((value - added) if BITS == 4 else value) * scale


@triton.jit
def _load_block(words_at, scales_at, added_at, block, inside, GROUP: tl.constexpr, BITS: tl.constexpr,
                KIND: tl.constexpr):  # fmt: skip
    """Return the words of a block, and its groups' scales and what they have beside them; zeros where the block is not
    inside. KIND says what that is: "zeros", "minima" or nothing."""
    words = _load(words_at + block * (_WORDS * (BITS // 4)), inside, 2)
    others = words
    if BITS == 8:
        others = _load(words_at + block * (_WORDS * 2) + _WORDS, inside, 2)
    scales = _load_group_values(scales_at, block, inside, GROUP)
    added = scales
    if KIND != "":
        added = _load_group_values(added_at, block, inside, GROUP)
    return words, others, scales, added


@triton.jit
def _weights(loaded, GROUP: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
             UNPACK: tl.constexpr):  # fmt: skip
    """Return the four quarters of a block of weights, as the threads hold them. UNPACK is the hardware's way to unpack
    numbers, or empty."""
    words, others, scales, added = loaded
    scale0, scale1, scale2, scale3 = _group_values(scales, GROUP)
    added0 = tl.full(scale0.shape, _MIDDLE, scale0.dtype)
    added1, added2, added3 = added0, added0, added0
    if KIND != "":
        added0, added1, added2, added3 = _group_values(added, GROUP)
    if UNPACK == "":
        first = _numbers(words, _by_word(scale0, TILES), _by_word(added0, TILES), 0, BITS, KIND)
        second = _numbers(words, _by_word(scale1, TILES), _by_word(added1, TILES), 1, BITS, KIND)
        third = _numbers(others, _by_word(scale2, TILES), _by_word(added2, TILES), 2 % (16 // BITS), BITS, KIND)
        fourth = _numbers(others, _by_word(scale3, TILES), _by_word(added3, TILES), 3 % (16 // BITS), BITS, KIND)
        TYPE: tl.constexpr = scale0.dtype
        first, second, third, fourth = first.to(TYPE), second.to(TYPE), third.to(TYPE), fourth.to(TYPE)
    else:
        if BITS == 4 and KIND != "minima":
            # What the exponent of whole numbers adds is taken away with the zero.
            MAGIC: tl.constexpr = -128 if scale0.dtype == tl.bfloat16 else -1024
            added0, added1, added2, added3 = MAGIC - added0, MAGIC - added1, MAGIC - added2, MAGIC - added3
        scale = (
            _by_word(scale0, TILES), _by_word(scale1, TILES), _by_word(scale2, TILES), _by_word(scale3, TILES),
        )  # fmt: skip
        offset = (
            _by_word(added0, TILES), _by_word(added1, TILES), _by_word(added2, TILES), _by_word(added3, TILES),
        )  # fmt: skip
        if BITS == 4:
            first, second, third, fourth = tl.inline_asm_elementwise(
                UNPACK,
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                [words, scale[0], scale[1], scale[2], scale[3], offset[0], offset[1], offset[2], offset[3]],
                dtype=(scale0.dtype, scale0.dtype, scale0.dtype, scale0.dtype),
                is_pure=True,
                pack=2,
            )
        else:
            first, second, third, fourth = tl.inline_asm_elementwise(
                UNPACK,
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                [words, others, scale[0], scale[1], scale[2], scale[3], offset[0], offset[1], offset[2], offset[3]],
                dtype=(scale0.dtype, scale0.dtype, scale0.dtype, scale0.dtype),
                is_pure=True,
                pack=2,
            )
    return first, second, third, fourth


@triton.jit
def _quarter_tile(weights, TILES: tl.constexpr):
    """Return a quarter as [rows, columns] of weights."""
    laid = tl.permute(tl.reshape(weights, [2, TILES, 4, 8, 4, 2, 2, 2]), [1, 2, 5, 3, 0, 6, 4, 7])
    return tl.reshape(laid, [TILES * _TILE, _BLOCK // 4])


@triton.jit
def _whole_tile(quarters, TILES: tl.constexpr):
    """Return four quarters as [rows, columns] of weights."""
    joined = tl.join(tl.join(quarters[0], quarters[1]), tl.join(quarters[2], quarters[3]))
    laid = tl.permute(tl.reshape(joined, [2, TILES, 4, 8, 4, 2, 2, 2, 2, 2]), [1, 2, 5, 3, 9, 8, 0, 6, 4, 7])
    return tl.reshape(laid, [TILES * _TILE, _BLOCK])


@triton.jit
def _add_quarter(y, weights, x_at, column, k, is_row, TILES: tl.constexpr, EVEN_K: tl.constexpr):
    """Add the product of a quarter and its columns of x to y."""
    inputs = tl.load(x_at + column, mask=is_row & (EVEN_K | (column < k)), other=0.0)
    return tl.dot(_quarter_tile(weights, TILES), tl.trans(inputs), y)


@triton.jit
def _values_of(values, tile, num_groups, GROUP: tl.constexpr):
    """Return the places of the first group's scales, or what they have beside them, of tiles; of the first block's
    groups where it has several."""
    within = (tl.arange(0, 128) // 4 * 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
    tile_at = (tile.to(tl.int64) * num_groups * _TILE)[:, None, None]
    if GROUP >= _BLOCK:
        places = values + tile_at + within
    else:
        PER: tl.constexpr = _BLOCK // GROUP
        places = values + (tile_at + within * PER)[:, :, :, None] + tl.arange(0, PER)[None, None, None, :]
    return places


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_blocks", "num_groups", "whole"])
def _int_kernel(
    x, numbers, scales, added, bias, residual, out, partials, counters,
    num_rows, num_outputs, k, num_tiles, num_blocks, num_groups, x_stride, residual_stride, whole,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, UNPACK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A job is TILES tiles of weights times ROWS rows. `num_outputs` counts columns of `out`. Gated, the second half of
    a job's tiles are the ups of the first."""
    OWN: tl.constexpr = (TILES // 2 if GATED else TILES) * _TILE
    SIZE: tl.constexpr = TILES * _TILE * ROWS
    row_jobs = tl.cdiv(num_rows, ROWS)
    job, part, sharing, first, last = job_of(num_blocks, whole, SPLIT_K)
    is_sharing = sharing >= 0
    tile = tiles_of(job // row_jobs, num_tiles, TILES, GATED)
    words_at = words_of(numbers, tile, num_blocks, BITS)
    scales_at = _values_of(scales, tile, num_groups, GROUP)
    added_at = _values_of(added, tile, num_groups, GROUP)
    row = job % row_jobs * ROWS + tl.arange(0, ROWS)
    x_at = x + row.to(tl.int64)[:, None] * x_stride
    is_row = (row < num_rows)[:, None]
    rows = row[None, :]
    y = tl.zeros([TILES * _TILE, ROWS], dtype=tl.float32)
    total = None
    if ROWS >= 16:
        wait_for_inputs(PDL)
        for block in range(first, last):
            loaded = _load_block(words_at, scales_at, added_at, block, None, GROUP, BITS, KIND)
            weights = _whole_tile(_weights(loaded, GROUP, TILES, BITS, KIND, UNPACK), TILES)
            column = block * _BLOCK + tl.arange(0, _BLOCK)[None, :]
            inputs = tl.load(x_at + column, mask=is_row & (EVEN_K | (column < k)), other=0.0)
            y = tl.dot(weights, tl.trans(inputs), y)
    else:
        held = ()
        for turn in tl.static_range(AHEAD):
            block = first + turn
            loaded = _load_block(words_at, scales_at, added_at, block, block < last, GROUP, BITS, KIND)
            held = held + (loaded,)  # type: ignore[assignment]  # noqa: RUF005 (the compiler knows no other way)
        wait_for_inputs(PDL)
        if ADD:
            added_to = job // row_jobs * OWN + tl.arange(0, OWN)[:, None]
            is_added_to = (added_to < num_outputs) & (rows < num_rows)
            total = tl.load(residual + rows * residual_stride + added_to, mask=is_added_to, other=0.0)
        # The matrix units for so few rows take operands in the order of quarters; four sums do not wait for each other.
        y1, y2, y3 = tl.zeros_like(y), tl.zeros_like(y), tl.zeros_like(y)
        for begin in range(first, last, AHEAD):
            coming = ()
            for turn in tl.static_range(AHEAD):
                block = begin + turn
                quarters = _weights(held[turn], GROUP, TILES, BITS, KIND, UNPACK)
                later = block + AHEAD
                loaded = _load_block(words_at, scales_at, added_at, later, later < last, GROUP, BITS, KIND)
                coming = coming + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
                column = block * _BLOCK + tl.arange(0, _BLOCK // 4)[None, :]
                is_there = is_row & (block < last)
                y = _add_quarter(y, quarters[0], x_at, column, k, is_there, TILES, EVEN_K)
                y1 = _add_quarter(y1, quarters[1], x_at, column + _BLOCK // 4, k, is_there, TILES, EVEN_K)
                y2 = _add_quarter(y2, quarters[2], x_at, column + _BLOCK // 2, k, is_there, TILES, EVEN_K)
                y3 = _add_quarter(y3, quarters[3], x_at, column + 3 * _BLOCK // 4, k, is_there, TILES, EVEN_K)
            held = coming
        y = (y + y1) + (y2 + y3)

    is_whole = (SPLIT_K == 1) | (sharing < 0)
    if SPLIT_K > 1:  # noqa: SIM102 (known when compiling)
        if is_sharing:
            within = tl.arange(0, ROWS)[None, :] * (TILES * _TILE) + tl.arange(0, TILES * _TILE)[:, None]
            parts_at = partials + (sharing - part) * SIZE + within
            tl.store(parts_at + part * SIZE, y, mask=rows < num_rows)
            is_whole = is_last(counters, job, SPLIT_K)
            if is_whole:
                y = tl.zeros([TILES * _TILE, ROWS], dtype=tl.float32)
                for each in range(SPLIT_K):
                    y += tl.load(parts_at + each * SIZE, mask=rows < num_rows, other=0.0, cache_modifier=".cg")

    if is_whole:
        own = job // row_jobs * OWN + tl.arange(0, OWN)[:, None]
        store_outputs(
            y, total, bias, residual, out, own, rows, num_rows, num_outputs, residual_stride, OWN, BIAS, GATED, ADD
        )


@triton.jit
def _dequantise_kernel(
    numbers, scales, added, row_scales, out, num_rows, num_columns, num_blocks, num_groups,
    GROUP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, UNPACK: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(1), tl.program_id(0)
    tiles = tile + tl.arange(0, 1)
    loaded = _load_block(
        words_of(numbers, tiles, num_blocks, BITS), _values_of(scales, tiles, num_groups, GROUP),
        _values_of(added, tiles, num_groups, GROUP), block, None, GROUP, BITS, KIND,
    )  # fmt: skip
    quarters = _weights(loaded, GROUP, 1, BITS, KIND, UNPACK)
    row = tile * _TILE + tl.arange(0, _TILE)[:, None]
    column = block * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    weights = _whole_tile(quarters, 1)
    if SCALED:
        weights = weights.to(tl.float32) * (1.0 / tl.load(row_scales + row, mask=row < num_rows, other=1.0))
    # The kernel before this one may still read what is overwritten.
    wait_for_inputs(PDL)
    tl.store(
        out + row.to(tl.int64) * num_columns + column,
        weights.to(out.dtype.element_ty),
        mask=(row < num_rows) & (column < num_columns),
    )


def int_config(rows: int, num_tiles: int, num_blocks: int, gated: bool, bits: int = 4) -> IntConfig:
    """Return the tiling of a product, as measured in steps of a 7B model on an H200: programs that leave room for
    others on a multiprocessor, and large tiles for more rows than 64. What two programs share is in the L2 cache."""
    if rows > 64:
        pairs = cdiv(num_tiles, 2)
        # Of eight bits the stages of 256 rows do not fit the shared memory.
        padded = 256 if bits == 4 and rows > 128 and pairs >= _MULTIPROCESSORS * 2 // 3 else 128
        jobs = pairs * cdiv(rows, padded)
        # One job a multiprocessor, as often as all have one; the others are shared.
        rest = jobs % _MULTIPROCESSORS
        split_k = max(1, min(_MULTIPROCESSORS // max(1, rest), num_blocks // 4))
        return IntConfig(padded, 2, split_k, 8, 3, whole=jobs - rest)
    padded = next(each for each in (8, 32, 64) if rows <= each)
    tiles = 2 if gated else 1
    jobs = cdiv(num_tiles, tiles)
    neighbours, registers = (3, 168) if padded == 64 or (padded == 8 and gated) else (4, 128)
    split_k = min(neighbours * _MULTIPROCESSORS // jobs, num_blocks // (4 if padded == 8 else 8))
    # Gates and ups of eight bits do not leave room for more than a block of each.
    ahead = 1 if gated and bits == 8 else 2
    return IntConfig(padded, tiles, max(1, split_k), 4, 2 if padded == 8 else 3, registers, ahead=ahead)


def dequantised(weight: IntWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight as floats, its columns in the order of its groups. Of e4m3 they are to be multiplied by the
    scales of the rows."""
    num_rows, num_columns = weight.shape
    num_tiles, num_blocks, _ = weight.numbers.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=weight.numbers.device)
    scaled = dtype == E4M3
    _dequantise_kernel[(num_blocks, num_tiles)](
        *_values(weight), weight.row_scales if scaled else out, out,
        num_rows, num_columns, num_blocks, weight.num_groups,
        **_kind(weight), SCALED=scaled, num_warps=4, **launch_options(),
    )  # fmt: skip
    return out


def product(
    x: Tensor,
    weight: IntWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool = False,
    config: IntConfig | None = None,
) -> None:
    """Multiply rows, their columns in the weight's order, into `out`, or add to the residual, which is `out` then."""
    num_rows, k = x.shape
    if num_rows == 0:
        return
    num_tiles, num_blocks, _ = weight.numbers.shape
    config = config or int_config(num_rows, num_tiles, num_blocks, gated, weight.bits)
    rows, tiles, split_k, warps, stages, registers, whole, ahead = config
    num_outputs = out.shape[1]
    jobs = cdiv(num_rows, rows) * cdiv(num_outputs, TILE * (tiles // 2 if gated else tiles))
    whole = min(whole, jobs)
    programs = whole + (jobs - whole) * split_k
    partials = torch.empty((programs - whole) * tiles * TILE * rows if split_k > 1 else 0, device=out.device)
    _int_kernel[(programs,)](
        x, *_values(weight), out if bias is None else bias, out if residual is None else residual, out, partials,
        zeroed_counters(out.device),
        num_rows, num_outputs, k, num_tiles, num_blocks, weight.num_groups, x.stride(0),
        0 if residual is None else residual.stride(0), whole,
        **_kind(weight), ROWS=rows, TILES=tiles, SPLIT_K=split_k, EVEN_K=k % BLOCK == 0,
        BIAS=bias is not None, GATED=gated, ADD=residual is not None, AHEAD=ahead,
        num_warps=warps, num_stages=stages, maxnreg=registers, **launch_options(),
    )  # fmt: skip


def _values(weight: IntWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of a weight, its scales, and what is beside them: anything where that is nothing."""
    beside = weight.zeros if weight.minima is None else weight.minima
    return weight.numbers, weight.scales, weight.scales if beside is None else beside


def _kind(weight: IntWeight) -> dict[str, int | str]:
    """Return what kernels for such weights are compiled for."""
    kind = "minima" if weight.minima is not None else "zeros" if weight.zeros is not None else ""
    # Tensors without memory stand for those of a GPU.
    is_interpreted = weight.numbers.device.type == "cpu"
    unpack = "" if is_interpreted else _unpacking(weight.scales.dtype, weight.bits, kind == "minima")
    return {"GROUP": weight.group_size, "BITS": weight.bits, "KIND": kind, "UNPACK": unpack}


def linear(x: Tensor, weight: IntWeight, bias: Tensor | None) -> Tensor:
    if w4a8_linears.is_for(len(x), weight):
        return w4a8_linears.linear(w4a8_linears.block_rows(x), weight, bias, x.dtype)
    if is_rounded(weight, len(x)):
        return fp8_linears.linear(fp8_linears.quantise_rows(x), rounded(weight), bias, x.dtype)
    x = _in_order(x, weight)
    if len(x) > MAX_ROWS and weight.shape[0] <= _MOST_WRITTEN_OUT:
        return F.linear(x, dequantised(weight, x.dtype), bias)
    out = torch.empty(len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    for rows, results in zip(x.split(MAX_ROWS), out.split(MAX_ROWS), strict=True):
        product(rows, weight, bias, None, results)
    return out


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: IntWeight, bias: Tensor | None) -> Tensor:
    if w4a8_linears.is_for(len(x), weight):
        return w4a8_linears.linear(w4a8_linears.block_rows(x, norm, eps), weight, bias, x.dtype)
    if is_rounded(weight, len(x)):
        return fp8_linears.linear(fp8_linears.quantise_rows(x, norm, eps), rounded(weight), bias, x.dtype)
    return linear(rms_norm(x, norm, eps), weight, bias)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: IntWeight) -> Tensor:
    width = weight.shape[0] // 2
    if width % TILE or len(x) > MAX_ROWS:
        return silu_mul(norm_linear(x, norm, eps, weight, None))
    if w4a8_linears.is_for(len(x), weight):
        return w4a8_linears.gate_up(w4a8_linears.block_rows(x, norm, eps), weight, x.dtype)
    x = rms_norm(x, norm, eps)
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    product(_in_order(x, weight), weight, None, None, out, gated=True)
    return out


def linear_add(x: Tensor, weight: IntWeight, bias: Tensor | None, residual: Tensor) -> None:
    if w4a8_linears.is_for(len(x), weight):
        w4a8_linears.linear_add(w4a8_linears.block_rows(x), weight, bias, residual)
        return
    if is_rounded(weight, len(x)):
        fp8_linears.linear_add(fp8_linears.quantise_rows(x), rounded(weight), bias, residual)
        return
    x = _in_order(x, weight)
    if len(x) <= MAX_ROWS:
        product(x, weight, bias, residual, residual)
        return
    residual.addmm_(x, dequantised(weight, x.dtype).t())
    if bias is not None:
        residual.add_(bias)


def is_rounded(weight: IntWeight, num_rows: int) -> bool:
    """Return whether this many rows are multiplied by the weight as e4m3."""
    return num_rows > MAX_ROWS and weight.row_scales is not None


def rounded(weight: IntWeight) -> Fp8Weight:
    """Return the weight as e4m3, written out."""
    assert weight.row_scales is not None
    return Fp8Weight(dequantised(weight, E4M3), weight.row_scales)


def _in_order(x: Tensor, weight: IntWeight) -> Tensor:
    """Return x with its columns in the weight's order, contiguous in a row."""
    if weight.order is not None:
        return x.index_select(1, weight.order)
    return x if x.stride(1) == 1 else x.contiguous()
