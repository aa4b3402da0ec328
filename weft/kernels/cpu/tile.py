"""Dot products of a few rows with a few others: the one inner loop of every matrix product and of attention scores.

Written as LLVM instructions, so that the sums stay in registers: a tile of 4 by 4 does 16 multiply-adds for 8 loads,
and reaches 38 of the 40 GFlop/s that a Neoverse-N1 core has. A sum is taken in the same order in a tile of every
shape, so a row's result does not depend on what it is computed beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.kernels.cpu.emit import (
    FLOAT,
    INDEX,
    LINE,
    VECTOR,
    join,
    load,
    load_halves,
    loop,
    multiply_add,
    prefetch,
    store,
)
from weft.kernels.cpu.jit import export, intrinsic, ir, types
from weft.kernels.cpu.raw_memory import BYTES, FLOATS, Bytes, Floats, at


def _pair_sums(builder: Any, a: Any, b: Any, width: int) -> Any:
    """The first `width` sums of neighbours in a, and then in b."""
    number = ir.IntType(32)
    evens, odds = (ir.Constant(ir.VectorType(number, width), [2 * i + odd for i in range(width)]) for odd in (0, 1))
    return builder.fadd(builder.shuffle_vector(a, b, evens), builder.shuffle_vector(a, b, odds))


def _sums_of(builder: Any, vectors: list[Any]) -> Any:
    """A vector of the sums of each vector's elements: neighbours, and then neighbours' sums, however many there are."""
    count = len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_pair_sums(builder, a, b, a.type.count) for a, b in pairs]
    (sums,) = vectors
    while sums.type.count > count:
        sums = _pair_sums(builder, sums, sums, sums.type.count // 2)
    return sums


def _tile(num_rows: int, num_others: int, ahead: int = 0, *, of_halves: bool = False) -> Callable[..., Any]:
    """out[j * out_stride + i] = the dot product of row i with other j, over `size` elements. The rows may be of halves.

    `ahead` is for rows that come from memory, one after the other: how many floats further on to ask for them. The
    processor foresees four rows at once poorly: 12 GB/s a core, and 18 for one row at a time with requests ahead.
    """
    # Vectors taken from each row in a turn, so that turns with a request ahead take whole cache lines.
    line = 2 * LINE if of_halves else LINE
    unroll = max(1, line // (num_rows * VECTOR.count)) if ahead else 1

    def of_row(builder: Any, count: int, pointer: Any, index: Any) -> Any:
        if of_halves:
            return load_halves(builder, count, pointer, index)
        return load(builder, VECTOR if count > 1 else FLOAT, pointer, index)

    @intrinsic
    def tile(
        typing: Any, rows: Any, row_stride: Any, others: Any, other_stride: Any, size: Any, out: Any, out_stride: Any
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, row_stride, others, other_stride, size, out, out_stride = args
            if of_halves:
                rows = builder.bitcast(rows, ir.IntType(16).as_pointer())
            lefts = [builder.gep(rows, [builder.mul(row_stride, INDEX(i))]) for i in range(num_rows)]
            rights = [builder.gep(others, [builder.mul(other_stride, INDEX(j))]) for j in range(num_others)]

            def accumulate(index: Any, sums: list[Any]) -> list[Any]:
                left = [of_row(builder, width, pointer, index) for pointer in lefts]
                right = [load(builder, VECTOR, pointer, index) for pointer in rights]
                pairs = [(left[i], right[j]) for j in range(num_others) for i in range(num_rows)]
                return [multiply_add(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            def turn(index: Any, sums: list[Any]) -> list[Any]:
                for begin in range(0, num_rows * unroll * width if ahead else 0, line):
                    there = builder.add(builder.mul(index, INDEX(num_rows)), INDEX(ahead + begin))
                    prefetch(builder, builder.gep(rows, [there]))
                for vector in range(unroll):
                    sums = accumulate(builder.add(index, INDEX(vector * width)), sums)
                return sums

            def accumulate_last(index: Any, columns: list[Any]) -> list[Any]:
                """One element of each row, where vectors have been summed: a column for each other."""
                left = join(builder, [of_row(builder, 1, pointer, index) for pointer in lefts])
                right = [join(builder, [load(builder, FLOAT, pointer, index)] * num_rows) for pointer in rights]
                return [multiply_add(builder, left, *pair) for pair in zip(right, columns, strict=True)]

            width = VECTOR.count
            turns = builder.and_(size, INDEX(-width * unroll))
            whole = builder.and_(size, INDEX(-width))
            sums = [ir.Constant(VECTOR, [0.0] * width)] * (num_rows * num_others)
            sums = loop(builder, INDEX(0), turns, width * unroll, sums, turn)
            if unroll > 1:
                sums = loop(builder, turns, whole, width, sums, accumulate)
            columns = [_sums_of(builder, sums[j * num_rows : (j + 1) * num_rows]) for j in range(num_others)]
            columns = loop(builder, whole, size, 1, columns, accumulate_last)
            for j, column in enumerate(columns):
                store(builder, column, out, builder.mul(out_stride, INDEX(j)))
            return context.get_dummy_value()

        stride = types.int64
        rows_kind = BYTES if of_halves else FLOATS
        return types.void(rows_kind, stride, FLOATS, stride, types.int64, FLOATS, stride), emit

    return tile


_INT = types.int64
_tile_4x4, _tile_4x3, _tile_4x2, _tile_4x1 = (_tile(4, count) for count in (4, 3, 2, 1))
_tile_1x4, _tile_1x3, _tile_1x2, _tile_1x1 = (_tile(1, count) for count in (4, 3, 2, 1))
_stream_4x4, _stream_4x3 = (_tile(4, count, ahead=4096) for count in (4, 3))
_stream_1x2, _stream_1x1 = (_tile(1, count, ahead=512) for count in (2, 1))
_halves_4x4, _halves_4x3, _halves_4x2, _halves_4x1 = (
    _tile(4, count, ahead=4096, of_halves=True) for count in (4, 3, 2, 1)
)


@export(types.void(FLOATS, _INT, _INT, FLOATS, _INT, _INT, _INT, FLOATS, _INT))
def dots(
    rows: Floats,
    row_stride: int,
    num_rows: int,
    others: Floats,
    other_stride: int,
    num_others: int,
    size: int,
    out: Floats,
    out_stride: int,
) -> None:
    """out[j * out_stride + i] = the dot product of row i with other j. The rows should fit in the nearest cache."""
    whole = num_rows - num_rows % 4
    for j in range(0, num_others, 4):
        right = at(others, j * other_stride)
        column = at(out, j * out_stride)
        count = min(4, num_others - j)
        for i in range(0, whole, 4):
            left = at(rows, i * row_stride)
            if count == 4:
                _tile_4x4(left, row_stride, right, other_stride, size, at(column, i), out_stride)
            elif count == 3:
                _tile_4x3(left, row_stride, right, other_stride, size, at(column, i), out_stride)
            elif count == 2:
                _tile_4x2(left, row_stride, right, other_stride, size, at(column, i), out_stride)
            else:
                _tile_4x1(left, row_stride, right, other_stride, size, at(column, i), out_stride)
        for i in range(whole, num_rows):
            left = at(rows, i * row_stride)
            if count == 4:
                _tile_1x4(left, row_stride, right, other_stride, size, at(column, i), out_stride)
            elif count == 3:
                _tile_1x3(left, row_stride, right, other_stride, size, at(column, i), out_stride)
            elif count == 2:
                _tile_1x2(left, row_stride, right, other_stride, size, at(column, i), out_stride)
            else:
                _tile_1x1(left, row_stride, right, other_stride, size, at(column, i), out_stride)


@export(types.void(FLOATS, _INT, FLOATS, _INT, _INT, FLOATS, _INT))
def stream_dots(
    rows: Floats, num_rows: int, others: Floats, num_others: int, size: int, out: Floats, out_stride: int
) -> None:
    """Compute what `dots` does for the rows of a matrix that is still in memory: it asks for them ahead of the first
    others' tile."""
    if num_others == 0:
        return
    if num_others == 1:
        for i in range(num_rows):
            _stream_1x1(at(rows, i * size), size, others, size, size, at(out, i), out_stride)
        return
    if num_others == 2:
        for i in range(num_rows):
            _stream_1x2(at(rows, i * size), size, others, size, size, at(out, i), out_stride)
        return
    whole = num_rows - num_rows % 4
    first = min(num_others, 4)
    for i in range(0, whole, 4):
        if first == 4:
            _stream_4x4(at(rows, i * size), size, others, size, size, at(out, i), out_stride)
        else:
            _stream_4x3(at(rows, i * size), size, others, size, size, at(out, i), out_stride)
    dots(at(rows, whole * size), size, num_rows - whole, others, size, first, size, at(out, whole), out_stride)
    dots(
        rows,
        size,
        num_rows,
        at(others, first * size),
        size,
        num_others - first,
        size,
        at(out, first * out_stride),
        out_stride,
    )


@export(types.void(BYTES, _INT, FLOATS, _INT, _INT, FLOATS, _INT))
def half_dots(
    rows: Bytes, num_rows: int, others: Floats, num_others: int, size: int, out: Floats, out_stride: int
) -> None:
    """Compute what `stream_dots` does for rows of halves. Their number is a multiple of four."""
    for i in range(0, num_rows, 4):
        left = at(rows, 2 * i * size)
        for j in range(0, num_others, 4):
            right, column = at(others, j * size), at(out, j * out_stride + i)
            count = min(4, num_others - j)
            if count == 4:
                _halves_4x4(left, size, right, size, size, column, out_stride)
            elif count == 3:
                _halves_4x3(left, size, right, size, size, column, out_stride)
            elif count == 2:
                _halves_4x2(left, size, right, size, size, column, out_stride)
            else:
                _halves_4x1(left, size, right, size, size, column, out_stride)
