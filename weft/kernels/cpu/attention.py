"""Attention of a few query rows over one kv head of the paged cache, read where it lies."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from weft.kernels.cpu.compiled import WIDTH
from weft.kernels.cpu.emit import FLOAT, INDEX, LINE, VECTOR, call, join, load, loop, multiply_add, store
from weft.kernels.cpu.jit import export, inner, intrinsic, ir, noinline, types
from weft.kernels.cpu.job import KEYS, KV_FLOAT16
from weft.kernels.cpu.raw_memory import (
    FLOATS,
    INTS,
    Bytes,
    Float,
    Floats,
    Ints,
    at,
    float_at,
    floats,
    half_at,
    prefetch,
    signed_bytes,
    store_float,
    store_half,
)
from weft.kernels.cpu.row_ops import exp
from weft.kernels.cpu.tile import dots

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


@noinline
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


_ZERO, _ONE, _HALF, _MOST = (np.float32(x) for x in (0, 1, 0.5, 127))
_NOTHING = np.float32(-np.inf)


@noinline
def pack_head(kind: int, x: Floats, head_dim: int, out: Bytes) -> None:
    """Write a key or a value of one head to a cache of halves, or of int8. A head with what is no number, or infinite,
    has a scale that is no number."""
    if kind == KV_FLOAT16:
        for i in range(head_dim):
            store_half(out, 2 * i, x[i])
    else:
        most, poison = _ZERO, _ZERO
        for i in range(head_dim):
            most = max(most, abs(x[i]))
            poison += x[i] * _ZERO
        inverse = _MOST / most if most > _ZERO else _ZERO
        for i in range(head_dim):
            out[i] = np.int8(np.int32(np.floor(x[i] * inverse + _HALF)))
        store_float(out, head_dim, most / _MOST + poison)


@noinline
def unpack_heads(
    kind: int,
    cache: Bytes,
    token_bytes: int,
    head_dim: int,
    table: Ints,
    block_size: int,
    first: int,
    count: int,
    out: Floats,
) -> None:
    """out [tokens, head dim] = a head's keys or values of `count` tokens from the sequence's `first` one on."""
    for t in range(count):
        block, offset = (first + t) // block_size, (first + t) % block_size
        row, target = at(cache, (table[block] * block_size + offset) * token_bytes), at(out, t * head_dim)
        if kind == KV_FLOAT16:
            for i in range(head_dim):
                target[i] = half_at(row, 2 * i)
        else:
            scale = float_at(row, head_dim)
            for i in range(head_dim):
                target[i] = np.float32(row[i]) * scale


# How many keys ahead of those in hand to ask memory for.
AHEAD = 32


@noinline
def fetch(
    source: Floats, token_stride: int, head_dim: int, table: Ints, block_size: int, position: int, stop: int
) -> None:
    """Ask for a head's keys or values in the block of a position, before they are wanted: the processor does not
    foresee rows that lie apart. A step of 32 sequences takes 329 ms of one core with this, and 374 without."""
    if position < stop:
        tokens = at(source, table[position // block_size] * block_size * token_stride)
        for t in range(block_size):
            for i in range(0, head_dim, LINE):
                prefetch(at(tokens, t * token_stride + i))


@inner
def fetch_first(
    source: Floats, token_stride: int, head_dim: int, table: Ints, block_size: int, first: int, stop: int
) -> None:
    """Ask for the blocks that no block before them asks for."""
    for position in range(first, first + max(AHEAD, block_size), block_size):
        fetch(source, token_stride, head_dim, table, block_size, position, stop)


@inner
def scores_of(
    queries: Floats,
    num_queries: int,
    keys: Floats,
    token_stride: int,
    head_dim: int,
    table: Ints,
    block_size: int,
    first: int,
    count: int,
    out: Floats,
) -> None:
    """out[row * KEYS + key] for `count` keys from the sequence's `first` one on."""
    done = 0
    while done < count:
        block, offset = (first + done) // block_size, (first + done) % block_size
        run = min(block_size - offset, count - done)
        here = (table[block] * block_size + offset) * token_stride
        following = first + done + max(AHEAD, block_size)
        fetch(keys, token_stride, head_dim, table, block_size, following, first + count)
        dots(at(keys, here), token_stride, run, queries, head_dim, num_queries, head_dim, at(out, done), KEYS)
        done += run


@noinline
def weights_of(scores: Floats, count: int, highest: Float) -> Float:
    """Turn a row's scores to weights, exp(score - highest), in place; their sum."""
    total = _ZERO
    for i in range(count):
        weight = exp(scores[i] - highest)
        scores[i] = weight
        total += weight
    return total


@intrinsic
def _highest_of_vectors(typing: Any, scores: Any, count: Any) -> Any:
    """LLVM vectorises no loop for a maximum where there may be NaNs; this one passes over them."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def body(index: Any, highest: list[Any]) -> list[Any]:
            return [call(builder, "maxnum", highest[0], load(builder, VECTOR, args[0], index))]

        lowest = ir.Constant(VECTOR, [float("-inf")] * VECTOR.count)
        (highest,) = loop(builder, INDEX(0), args[1], VECTOR.count, [lowest], body)
        elements = [builder.extract_element(highest, ir.IntType(32)(i)) for i in range(VECTOR.count)]
        return reduce(lambda a, b: call(builder, "maxnum", a, b), elements)

    return types.float32(FLOATS, types.int64), emit


@inner
def highest_of(scores: Floats, count: int) -> Float:
    whole = count - count % WIDTH
    highest = _highest_of_vectors(scores, whole)
    for i in range(whole, count):
        highest = max(highest, scores[i])
    return highest


@inner
def mix_values(
    weights: Floats,
    num_queries: int,
    values: Floats,
    token_stride: int,
    head_dim: int,
    table: Ints,
    block_size: int,
    first: int,
    count: int,
    out: Floats,
) -> None:
    """out[row] += the values of `count` keys from the sequence's `first` one on, weighted."""
    done = 0
    while done < count:
        block, offset = (first + done) // block_size, (first + done) % block_size
        run = min(block_size - offset, count - done)
        following = first + done + max(AHEAD, block_size)
        fetch(values, token_stride, head_dim, table, block_size, following, first + count)
        tokens = at(values, (table[block] * block_size + offset) * token_stride)
        mix(at(weights, done), KEYS, num_queries, tokens, token_stride, run, head_dim, out)
        done += run


_INT = types.int64


@export(
    types.void(
        FLOATS,
        _INT,
        _INT,
        _INT,
        _INT,
        _INT,
        _INT,
        _INT,
        INTS,
        _INT,
        _INT,
        _INT,
        _INT,
        FLOATS,
        FLOATS,
        FLOATS,
        FLOATS,
        FLOATS,
    )
)
def attend(
    queries: Floats,
    num_tokens: int,
    group: int,
    kind: int,
    keys_at: int,
    values_at: int,
    token_bytes: int,
    head_dim: int,
    table: Ints,
    block_size: int,
    first: int,
    stop: int,
    position: int,
    unpacked: Floats,
    scores: Floats,
    out: Floats,
    highest: Floats,
    totals: Floats,
) -> None:
    """Attention over a sequence's keys from `first` to `stop`.

    Query rows are `group` heads of a token, then those of the next; the first token stands at `position`, and a token
    sees no key past its own. out [rows, head dim] is not yet divided by `totals`; weights are relative to `highest`.
    Floats are read where they lie, others are `unpacked` [KEYS, head dim].
    """
    num_queries = num_tokens * group
    keys, values, token_stride = floats(keys_at), floats(values_at), token_bytes // 4
    if not kind:
        fetch_first(keys, token_stride, head_dim, table, block_size, first, stop)
    for q in range(num_queries):
        highest[q], totals[q] = _NOTHING, _ZERO
    for i in range(num_queries * head_dim):
        out[i] = _ZERO
    for start in range(first, stop, KEYS):
        count = min(KEYS, stop - start)
        if kind:
            here = signed_bytes(keys_at)
            unpack_heads(kind, here, token_bytes, head_dim, table, block_size, start, count, unpacked)
            dots(unpacked, head_dim, count, queries, head_dim, num_queries, head_dim, scores, KEYS)
        else:
            scores_of(queries, num_queries, keys, token_stride, head_dim, table, block_size, start, count, scores)
            fetch_first(values, token_stride, head_dim, table, block_size, start, start + count)
        for q in range(num_queries):
            row = at(scores, q * KEYS)
            seen = min(count, max(0, position + q // group + 1 - start))
            peak = max(highest[q], highest_of(row, seen))
            if start > first and peak > highest[q]:
                fade = exp(highest[q] - peak)
                totals[q] *= fade
                for j in range(q * head_dim, (q + 1) * head_dim):
                    out[j] *= fade
            highest[q] = peak
            totals[q] += weights_of(row, seen, peak)
            for i in range(seen, count):
                row[i] = _ZERO
        if kind:
            here = signed_bytes(values_at)
            unpack_heads(kind, here, token_bytes, head_dim, table, block_size, start, count, unpacked)
            mix(scores, KEYS, num_queries, unpacked, head_dim, count, head_dim, out)
        else:
            fetch_first(keys, token_stride, head_dim, table, block_size, start + KEYS, stop)
            mix_values(scores, num_queries, values, token_stride, head_dim, table, block_size, start, count, out)


@noinline
def join_parts(parts: Floats, stride: int, num_parts: int, head_dim: int, out: Floats) -> None:
    """One head's attention from parts [highest, total, unfinished sums...] over runs of its keys."""
    highest = parts[0]
    for i in range(1, num_parts):
        highest = max(highest, parts[i * stride])
    total = _ZERO
    for j in range(head_dim):
        out[j] = _ZERO
    for i in range(num_parts):
        part = at(parts, i * stride)
        fade = exp(part[0] - highest)
        total += fade * part[1]
        for j in range(head_dim):
            out[j] += fade * part[2 + j]
    share = _ONE / total
    for j in range(head_dim):
        out[j] *= share
