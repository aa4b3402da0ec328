"""Attention of a few query rows over one kv head of the paged cache, read where it lies."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from weft.kernels.cpu.emit import INDEX, LINE, VECTOR, WIDTH, call, load, loop
from weft.kernels.cpu.jit import inner, intrinsic, ir, types
from weft.kernels.cpu.memory import FLOATS, Float, Floats, Ints, at, prefetch
from weft.kernels.cpu.mix import mix
from weft.kernels.cpu.rows import exp
from weft.kernels.cpu.tile import dots

# Keys whose scores are held at once.
KEYS = 128
# Query rows (tokens times the heads that share a kv head) that read them together.
QUERIES = 16
# How many keys ahead of those in hand to ask memory for.
AHEAD = 32

_ZERO, _ONE = np.float32(0), np.float32(1)
_NOTHING = np.float32(-np.inf)


@inner
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


@inner
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


@inner
def attend(
    queries: Floats,
    num_tokens: int,
    group: int,
    keys: Floats,
    values: Floats,
    token_stride: int,
    head_dim: int,
    table: Ints,
    block_size: int,
    first: int,
    stop: int,
    position: int,
    scores: Floats,
    out: Floats,
    highest: Floats,
    totals: Floats,
) -> None:
    """Attention over a sequence's keys from `first` to `stop`.

    Query rows are `group` heads of a token, then those of the next; the first token stands at `position`, and a token
    sees no key past its own. out [rows, head dim] is not yet divided by `totals`; weights are relative to `highest`.
    """
    num_queries = num_tokens * group
    fetch_first(keys, token_stride, head_dim, table, block_size, first, stop)
    for q in range(num_queries):
        highest[q], totals[q] = _NOTHING, _ZERO
    for i in range(num_queries * head_dim):
        out[i] = _ZERO
    for start in range(first, stop, KEYS):
        count = min(KEYS, stop - start)
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
        fetch_first(keys, token_stride, head_dim, table, block_size, start + KEYS, stop)
        mix_values(scores, num_queries, values, token_stride, head_dim, table, block_size, start, count, out)


@inner
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
