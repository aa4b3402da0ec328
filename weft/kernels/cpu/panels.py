"""Products of quantised weights with quantised rows, a panel and a few rows at a time.

Written as LLVM instructions: four products of bytes are added to each lane of a register at once where the processor
can (VNNI on x86, the dot products of Arm), and the sums of a block of 32 columns become floats only then. A row's
result does not depend on what it is computed beside: sums of whole numbers are exact, and blocks follow in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from weft.kernels.cpu.compiled import FEATURES, IS_ARM
from weft.kernels.cpu.emit import (
    FLOAT,
    INDEX,
    float_of_half,
    load,
    loop,
    multiply_add,
    prefetch,
    splat,
    store,
)
from weft.kernels.cpu.jit import cgutils, export, inner, intrinsic, ir, noinline, types
from weft.kernels.cpu.job import LANES
from weft.kernels.cpu.raw_memory import (
    BYTES,
    FLOATS,
    Bytes,
    Float,
    Floats,
    at,
    float_at,
    half_at,
    signed_bytes,
)
from weft.kernels.panel_format import BLOCK, FORMATS, INPUT_GROUP, PanelFormat

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_NUMBERS = ir.VectorType(_I8, 4 * LANES)
_SUMS = ir.VectorType(_I32, LANES)
_VALUES = ir.VectorType(FLOAT, LANES)
IS_SIGNED = IS_ARM
"""Arm's dot products are of signed numbers, x86's of unsigned ones with signed ones."""
_VNNI = {8: "avxvnni", 16: "avx512vnni"}
"""LLVM's name of x86's dot products for registers of so many numbers."""
_PAIRS = ir.VectorType(_I16, 2 * LANES)
_HAS_VNNI = _VNNI.get(LANES) in FEATURES
_PAIR_PRODUCTS = {
    4: ("ssse3", "llvm.x86.ssse3.pmadd.ub.sw.128"),
    8: ("avx2", "llvm.x86.avx2.pmadd.ub.sw"),
    16: ("avx512bw", "llvm.x86.avx512.pmaddubs.w.512"),
}
"""For registers of so many numbers: the feature, and LLVM's name, of products of bytes that are added in pairs."""
BY_NIBBLES = not IS_ARM and not _HAS_VNNI and _PAIR_PRODUCTS[LANES][0] in FEATURES
"""Sums of 16 bits hold products of four bits with eight, half a block of them: 16 x 15 x 127 is less than 2^15."""
_AHEAD_BYTES = 2048
_INT = types.int64


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _dots_of_four(builder: Any, total: Any, numbers: Any, inputs: Any) -> Any:
    """Add to each lane the products of four numbers with as many inputs, both vectors of bytes."""
    if IS_ARM and "dotprod" in FEATURES:
        return _call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", _SUMS, total, numbers, inputs)
    if _HAS_VNNI:
        # As older versions of LLVM declare it; newer ones take this for vectors of bytes.
        words = [builder.bitcast(each, _SUMS) for each in (numbers, inputs)]
        return _call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", _SUMS, total, *words)
    # Bytes in pairs of 16 bits: the even ones and the odd ones.
    wide = ir.VectorType(_I16, 2 * LANES)
    eight = ir.Constant(wide, [8] * (2 * LANES))
    left, right = builder.bitcast(numbers, wide), builder.bitcast(inputs, wide)
    odd = builder.ashr(left, eight) if IS_SIGNED else builder.lshr(left, eight)
    low = builder.shl(left, eight)
    even = builder.ashr(low, eight) if IS_SIGNED else builder.lshr(low, eight)
    for one, other in ((even, builder.ashr(builder.shl(right, eight), eight)), (odd, builder.ashr(right, eight))):
        total = builder.add(total, _sums_of_pairs(builder, one, other))
    return total


def _sums_of_pairs(builder: Any, left: Any, right: Any) -> Any:
    """Multiply numbers of 16 bits, and add neighbours."""
    names = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
    if not IS_ARM and (LANES < 16 or "avx512bw" in FEATURES):
        return _call(builder, names[LANES], _SUMS, left, right)
    wide = ir.VectorType(_I32, 2 * LANES)
    products = builder.mul(builder.sext(left, wide), builder.sext(right, wide))
    evens, odds = (ir.Constant(ir.VectorType(_I32, LANES), [2 * i + odd for i in range(LANES)]) for odd in (0, 1))
    return builder.add(
        builder.shuffle_vector(products, products, evens), builder.shuffle_vector(products, products, odds)
    )


def _sums_of_nibbles(builder: Any, nibbles: list[Any], inputs: list[Any]) -> Any:
    """The sums of their products in pairs of columns, of half a block."""
    name = _PAIR_PRODUCTS[LANES][1]
    return reduce(builder.add, [_call(builder, name, _PAIRS, *pair) for pair in zip(nibbles, inputs, strict=False)])


def _panel_product(panel_format: PanelFormat, num_inputs: int) -> Callable[..., Any]:
    """out[t * out_stride + lane] = the product of a panel's rows with quantised input t."""
    size = LANES * BLOCK * panel_format.bits // 8
    block_bytes = LANES * panel_format.bytes_per_row
    num_groups = BLOCK // panel_format.group_size
    stored = ir.VectorType(_I16 if panel_format.half_scales else FLOAT, LANES)
    stored_bytes = LANES * panel_format.scale_bytes

    @intrinsic
    def product(
        typing: Any, panel: Any, num_blocks: Any, x: Any, scales: Any, sums: Any, out: Any, out_stride: Any
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel, num_blocks, x, scales, sums, out, out_stride = args

            def from_panel(kind: Any, offset: Any) -> Any:
                pointer = builder.gep(panel, [offset])
                return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)

            def numbers_at(start: Any) -> list[Any]:
                """The block's numbers, four columns of every row in a vector."""
                width = 4 * LANES
                loaded = [from_panel(_NUMBERS, builder.add(start, INDEX(i))) for i in range(0, size, width)]
                if panel_format.bits == 8:
                    return loaded
                low_half = ir.Constant(_NUMBERS, [15] * width)
                pairs = ir.VectorType(_I16, width // 2)
                four = ir.Constant(pairs, [4] * (width // 2))
                shifted = [builder.bitcast(builder.lshr(builder.bitcast(v, pairs), four), _NUMBERS) for v in loaded]
                return [builder.and_(vector, low_half) for vector in (*loaded, *shifted)]

            def nibbles_of(numbers: list[Any]) -> list[tuple[list[Any], int]]:
                """The numbers by their low four bits and, of eight, their high ones, and what those are worth."""
                if panel_format.bits == 4:
                    return [(numbers, 1)]
                low_half, four = (ir.Constant(_NUMBERS, [value] * (4 * LANES)) for value in (15, 4))
                low = [builder.and_(vector, low_half) for vector in numbers]
                return [(low, 1), ([builder.lshr(vector, four) for vector in numbers], 16)]

            def per_row(start: Any, place: int) -> Any:
                value = from_panel(stored, builder.add(start, INDEX(size + place * stored_bytes)))
                return float_of_half(builder, value) if panel_format.half_scales else value

            def block(index: Any, totals: list[Any]) -> list[Any]:
                start = builder.mul(index, INDEX(block_bytes))
                if num_inputs <= 2:
                    for line in range(0, block_bytes, 64):
                        prefetch(builder, builder.gep(panel, [builder.add(start, INDEX(_AHEAD_BYTES + line))]))
                numbers = nibbles_of(numbers_at(start)) if BY_NIBBLES else numbers_at(start)
                row_scales = [per_row(start, group) for group in range(num_groups)]
                minima = [per_row(start, num_groups + group) for group in range(num_groups)]
                return [one_input(t, index, numbers, row_scales, minima, total) for t, total in enumerate(totals)]

            def one_input(
                t: int, index: Any, numbers: Any, row_scales: list[Any], minima: list[Any], total: Any
            ) -> Any:
                place = builder.mul(builder.add(builder.mul(num_blocks, INDEX(t)), index), INDEX(2))
                products = [half_products(builder.add(place, INDEX(half)), half, numbers) for half in (0, 1)]
                half_sums = sums_at(place)
                if num_groups == 1:
                    (value, scale), (other, other_scale) = products
                    products = [(multiply_add(builder, other, other_scale, builder.fmul(value, scale)), None)]
                    half_sums = [reduce(builder.fadd, half_sums)]
                for group, (value, scale) in enumerate(products):
                    both = row_scales[group] if scale is None else builder.fmul(row_scales[group], scale)
                    total = multiply_add(builder, value, both, total)
                    total = multiply_add(builder, minima[group], splat(builder, half_sums[group], LANES), total)
                return total

            def sums_at(place: Any) -> list[Any]:
                """The sums of a block's halves, or where Arm adds them at once that of both."""
                if IS_ARM and num_groups == 1:
                    both = load(builder, ir.VectorType(FLOAT, 2), sums, place)
                    return [_call(builder, "llvm.vector.reduce.fadd.v2f32", FLOAT, FLOAT(-0.0), both)]
                return [load(builder, FLOAT, sums, builder.add(place, INDEX(half))) for half in (0, 1)]

            def in_all_lanes(kind: Any, count: int, pointer: Any) -> list[Any]:
                """So many neighbours, each in every lane of a register."""
                there = builder.bitcast(pointer, kind.as_pointer())
                if IS_ARM:
                    # Its instructions take one lane of a register for all of another's.
                    loaded = load(builder, ir.VectorType(kind, count), there, INDEX(0))
                    lanes = [ir.Constant(ir.VectorType(_I32, LANES), [i] * LANES) for i in range(count)]
                    return [builder.shuffle_vector(loaded, loaded, lane) for lane in lanes]
                return [splat(builder, load(builder, kind, there, INDEX(i)), LANES) for i in range(count)]

            def half_products(place: Any, half: int, numbers: Any) -> tuple[Any, Any]:
                """The products of half a block, as floats, and the input's scale there."""
                first, count = builder.mul(place, INDEX(INPUT_GROUP)), INPUT_GROUP // 4
                words = in_all_lanes(_I32, count, builder.gep(x, [first]))
                inputs = [builder.bitcast(word, _NUMBERS) for word in words]
                products = ir.Constant(_SUMS, [0] * LANES)
                if BY_NIBBLES:
                    for nibbles, worth in numbers:
                        pair_sums = _sums_of_nibbles(builder, nibbles[half * count :], inputs)
                        worths = ir.Constant(_PAIRS, [worth] * (2 * LANES))
                        products = builder.add(products, _sums_of_pairs(builder, pair_sums, worths))
                else:
                    for i, four in enumerate(inputs):
                        products = _dots_of_four(builder, products, numbers[half * count + i], four)
                value = builder.sitofp(products, _VALUES)
                # Both halves' scales are loaded at once where they are lanes of a register.
                first_half = builder.gep(scales, [builder.sub(place, INDEX(half))])
                return value, in_all_lanes(FLOAT, 2, first_half)[half]

            totals = [ir.Constant(_VALUES, [0.0] * LANES)] * num_inputs
            for t, total in enumerate(loop(builder, INDEX(0), num_blocks, 1, totals, block)):
                store(builder, total, out, builder.mul(out_stride, INDEX(t)))
            return context.get_dummy_value()

        return types.void(BYTES, _INT, BYTES, FLOATS, FLOATS, FLOATS, _INT), emit

    return product


def _linear_of(kind: int, panel_format: PanelFormat) -> Callable[..., None]:
    """Products of several panels with any number of inputs, by tiles of inputs."""
    by_8, by_4, by_2, by_1 = (_panel_product(panel_format, count) for count in (8, 4, 2, 1))
    row_bytes = panel_format.bytes_per_row
    num_scales = BLOCK // INPUT_GROUP

    @export(
        types.void(BYTES, _INT, _INT, BYTES, FLOATS, FLOATS, _INT, FLOATS, _INT, FLOATS), name=f"panel_linear_{kind}"
    )
    def linear(
        panels: Bytes, num_rows: int, num_blocks: int, x: Bytes, scales: Floats, sums: Floats, num_inputs: int,
        out: Floats, out_stride: int, scratch: Floats,
    ) -> None:  # fmt: skip
        for first in range(0, num_rows, LANES):
            panel = at(panels, first * num_blocks * row_bytes)
            count = min(LANES, num_rows - first)
            t = 0
            while t < num_inputs:
                place = t * num_blocks * num_scales
                tile_x, tile_scales, tile_sums = at(x, place * INPUT_GROUP), at(scales, place), at(sums, place)
                target, stride = at(out, t * out_stride + first), out_stride
                if count < LANES:
                    target, stride = scratch, LANES
                left = num_inputs - t
                if left >= 8:
                    by_8(panel, num_blocks, tile_x, tile_scales, tile_sums, target, stride)
                    done = 8
                elif left >= 4:
                    by_4(panel, num_blocks, tile_x, tile_scales, tile_sums, target, stride)
                    done = 4
                elif left >= 2:
                    by_2(panel, num_blocks, tile_x, tile_scales, tile_sums, target, stride)
                    done = 2
                else:
                    by_1(panel, num_blocks, tile_x, tile_scales, tile_sums, target, stride)
                    done = 1
                if count < LANES:
                    # The last panel has rows that are nobody's.
                    for i in range(done):
                        for row in range(count):
                            out[(t + i) * out_stride + first + row] = scratch[i * LANES + row]
                t += done

    return linear


_linear_1, _linear_2, _linear_3, _linear_4 = (_linear_of(*each) for each in enumerate(FORMATS, 1))
_ROW_BYTES = tuple(panel_format.bytes_per_row for panel_format in FORMATS)


@intrinsic
def _quantise_group(typing: Any, x: Any, numbers: Any, scale: Any, total: Any) -> Any:
    """Round a group of floats to whole numbers of eight bits; their scale, and the sum of what they stand for."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, numbers, scale, total = args
        values, words = ir.VectorType(FLOAT, INPUT_GROUP), ir.VectorType(_I32, INPUT_GROUP)
        suffix = f"v{INPUT_GROUP}f32"
        given = load(builder, values, x, INDEX(0))
        sizes = _call(builder, f"llvm.fabs.{suffix}", values, given)
        most = _call(builder, f"llvm.vector.reduce.fmax.{suffix}", FLOAT, sizes)
        # NaN where one of them is, or is infinite, so that it is seen in what comes of it.
        nothing = builder.fmul(given, ir.Constant(values, [0.0] * INPUT_GROUP))
        poison = _call(builder, f"llvm.vector.reduce.fadd.{suffix}", FLOAT, FLOAT(0.0), nothing)
        whole = builder.fcmp_ordered(">", most, FLOAT(0.0))
        inverse = builder.select(whole, builder.fdiv(FLOAT(127.0), most), FLOAT(0.0))
        scaled = builder.fmul(given, splat(builder, inverse, INPUT_GROUP))
        half = ir.Constant(values, [0.5] * INPUT_GROUP)
        rounded = builder.fptosi(_call(builder, f"llvm.floor.{suffix}", values, builder.fadd(scaled, half)), words)
        target = builder.bitcast(numbers, ir.VectorType(_I8, INPUT_GROUP).as_pointer())
        builder.store(builder.trunc(rounded, ir.VectorType(_I8, INPUT_GROUP)), target, align=1)
        count = _call(builder, f"llvm.vector.reduce.add.v{INPUT_GROUP}i32", _I32, rounded)
        step = builder.fadd(builder.fdiv(most, FLOAT(127.0)), poison)
        store(builder, step, scale, INDEX(0))
        store(builder, builder.fmul(step, builder.sitofp(count, FLOAT)), total, INDEX(0))
        return context.get_dummy_value()

    return types.void(FLOATS, BYTES, FLOATS, FLOATS), emit


@noinline
def quantise(x: Floats, size: int, numbers: Bytes, scales: Floats, sums: Floats) -> None:
    """Make a row of floats the input of a quantised weight: whole numbers, and the scales and sums of their groups."""
    for group in range(size // INPUT_GROUP):
        first = group * INPUT_GROUP
        _quantise_group(at(x, first), at(numbers, first), at(scales, group), at(sums, group))


@inner
def rest_of(x: Floats, numbers: Bytes, scales: Floats, size: int, out: Floats) -> None:
    """Write what a row of floats has more than its whole numbers stand for."""
    for group in range(size // INPUT_GROUP):
        scale = scales[group]
        for i in range(group * INPUT_GROUP, (group + 1) * INPUT_GROUP):
            out[i] = x[i] - np.float32(numbers[i]) * scale


@inner
def panel_linear(
    kind: int, weight: int, first: int, count: int, num_blocks: int, x: Bytes, scales: Floats, sums: Floats,
    num_inputs: int, target: Floats, out_stride: int, scratch: Floats,
) -> None:  # fmt: skip
    """target[t * out_stride + i] = the product of row first + i of the weight of FORMATS[kind - 1] at this address with
    input t. The first row begins a panel. `scratch` has room for `job.SCRATCH_FLOATS`."""
    panels = signed_bytes(weight + first * num_blocks * _ROW_BYTES[kind - 1])
    if kind == 1:
        _linear_1(panels, count, num_blocks, x, scales, sums, num_inputs, target, out_stride, scratch)
    elif kind == 2:
        _linear_2(panels, count, num_blocks, x, scales, sums, num_inputs, target, out_stride, scratch)
    elif kind == 3:
        _linear_3(panels, count, num_blocks, x, scales, sums, num_inputs, target, out_stride, scratch)
    else:
        _linear_4(panels, count, num_blocks, x, scales, sums, num_inputs, target, out_stride, scratch)


@noinline
def unpack_row(kind: int, weight: Bytes, row: int, num_blocks: int, out: Floats) -> None:
    """The floats that a row of a weight of FORMATS[kind - 1] stands for."""
    row_bytes = _ROW_BYTES[kind - 1]
    lane = row % LANES
    panel = at(weight, (row - lane) * num_blocks * row_bytes)
    num_groups = 2 if kind == 4 else 1
    for block in range(num_blocks):
        start = at(panel, block * LANES * row_bytes)
        stored = at(start, LANES * (BLOCK // 2 if kind <= 2 else BLOCK))
        for column in range(BLOCK):
            group = column * num_groups // BLOCK
            if kind <= 2:
                byte = start[column % 16 // 4 * 4 * LANES + lane * 4 + column % 4]
                number = (byte >> (column // 16 * 4)) & 15
            else:
                number = np.int64(start[column // 4 * 4 * LANES + lane * 4 + column % 4])
                if not IS_SIGNED:
                    number &= 255
            scale = _stored(kind, stored, group * LANES + lane)
            minimum = _stored(kind, stored, (num_groups + group) * LANES + lane)
            out[block * BLOCK + column] = np.float32(number) * scale + minimum


@inner
def _stored(kind: int, pointer: Bytes, index: int) -> Float:
    return half_at(pointer, 2 * index) if kind % 2 else float_at(pointer, 4 * index)
