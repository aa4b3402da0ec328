"""Weighted sums of rows, for a few rows of weights at once: what attention does with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.kernels.cpu.emit import FLOAT, INDEX, VECTOR, join, load, loop, multiply_add, store
from weft.kernels.cpu.jit import inner, intrinsic, types
from weft.kernels.cpu.memory import FLOATS, Floats, at

# Columns of a tile: 4 vectors, so that 4 rows of weights make 16 sums.
_COLUMNS = 4 * VECTOR.count


def _mix_tile(num_outs: int) -> Callable[..., Any]:
    """out[i * out_stride + j] += the sum over t of weights[i * weight_stride + t] * rows[t * row_stride + j], for
    _COLUMNS columns."""

    @intrinsic
    def tile(
        typing: Any, weights: Any, weight_stride: Any, rows: Any, row_stride: Any, count: Any, out: Any, out_stride: Any
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, weight_stride, rows, row_stride, count, out, out_stride = args
            width = VECTOR.count
            columns = [INDEX(column) for column in range(0, _COLUMNS, width)]
            outs = [builder.gep(out, [builder.mul(out_stride, INDEX(i))]) for i in range(num_outs)]
            factors = [builder.gep(weights, [builder.mul(weight_stride, INDEX(i))]) for i in range(num_outs)]

            def add_row(index: Any, sums: list[Any]) -> list[Any]:
                row = builder.gep(rows, [builder.mul(index, row_stride)])
                values = [load(builder, VECTOR, row, column) for column in columns]
                following = []
                for i, pointer in enumerate(factors):
                    factor = join(builder, [load(builder, FLOAT, pointer, index)] * width)
                    for k, value in enumerate(values):
                        following.append(multiply_add(builder, factor, value, sums[i * len(values) + k]))
                return following

            places = [(pointer, column) for pointer in outs for column in columns]
            sums = [load(builder, VECTOR, *place) for place in places]
            sums = loop(builder, INDEX(0), count, 1, sums, add_row)
            for (pointer, column), total in zip(places, sums, strict=True):
                store(builder, total, pointer, column)
            return context.get_dummy_value()

        stride = types.int64
        return types.void(FLOATS, stride, FLOATS, stride, types.int64, FLOATS, stride), emit

    return tile


_mix_4, _mix_3, _mix_2, _mix_1 = (_mix_tile(count) for count in (4, 3, 2, 1))


@inner
def mix(
    weights: Floats,
    weight_stride: int,
    num_outs: int,
    rows: Floats,
    row_stride: int,
    num_rows: int,
    size: int,
    out: Floats,
) -> None:
    """out [outs, size] += weights [outs, rows] times rows [rows, size]."""
    whole = size - size % _COLUMNS
    for i in range(0, num_outs, 4):
        factors = at(weights, i * weight_stride)
        target = at(out, i * size)
        count = min(4, num_outs - i)
        for j in range(0, whole, _COLUMNS):
            if count == 4:
                _mix_4(factors, weight_stride, at(rows, j), row_stride, num_rows, at(target, j), size)
            elif count == 3:
                _mix_3(factors, weight_stride, at(rows, j), row_stride, num_rows, at(target, j), size)
            elif count == 2:
                _mix_2(factors, weight_stride, at(rows, j), row_stride, num_rows, at(target, j), size)
            else:
                _mix_1(factors, weight_stride, at(rows, j), row_stride, num_rows, at(target, j), size)
    for i in range(num_outs if whole < size else 0):
        for t in range(num_rows):
            factor = weights[i * weight_stride + t]
            for j in range(whole, size):
                out[i * size + j] += factor * rows[t * row_stride + j]
