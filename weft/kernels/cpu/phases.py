"""The phases of a decoder's step, each as what one thread does with one piece of it.

Between two phases all threads meet. A piece is a token, some output rows of a matrix, or an item of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from weft.kernels.cpu import attention, row_ops
from weft.kernels.cpu.jit import inner, noinline
from weft.kernels.cpu.job import (
    ARRIVALS,
    CLAIMS,
    DOWN,
    GATE_UP,
    ITEM,
    KEYS,
    LANES,
    MOST_ROWS,
    OUTPUT,
    QKV,
    QUERIES,
    Here,
)
from weft.kernels.cpu.low_rank import expand, shrink
from weft.kernels.cpu.panels import panel_linear, quantise, rest_of, unpack_row
from weft.kernels.cpu.raw_memory import (
    Floats,
    Ints,
    at,
    fetch_add,
    floats,
    give_way,
    ints,
    load_acquire,
    pause,
    record_at,
    signed_bytes,
)
from weft.kernels.cpu.tile import stream_dots
from weft.kernels.panel_format import BLOCK, INPUT_GROUP

item_at = record_at(ITEM)

# Some 20 us: longer than the threads of an idle machine differ, and shorter than its scheduler's slices.
_SPINS = 1000


@noinline
def wait_for_all(cells: Ints, num_threads: int) -> None:
    """Return when every thread has called this as often as the caller has."""
    arrivals = at(cells, ARRIVALS)
    target = (fetch_add(arrivals, 1) // num_threads + 1) * num_threads
    spins = 0
    while load_acquire(arrivals) < target:
        spins += 1
        pause()
        if spins > _SPINS:
            # The others may be waiting for this very core.
            give_way()


def spread(work: Callable[..., None]) -> Callable[..., int]:
    """Return work on all pieces, made from work on one: work(here, piece) for each, by one thread.

    Native code that passed `work` as an argument could not be cached: it would hold the function's address.
    """
    work = inner(work)

    @inner
    def run(here: Any, num_pieces: int, base: int) -> Any:
        cells, num_threads = ints(here.job.cells), here.job.num_threads
        while True:
            piece = fetch_add(at(cells, CLAIMS), 1) - base
            if piece >= num_pieces:
                break
            work(here, piece)
        wait_for_all(cells, num_threads)
        return base + num_pieces + num_threads

    return run


_ONE = np.float32(1)
# A quarter of a megabyte: the second-level caches of server cores have one or two.
_CACHED_FLOATS = 65536


@spread
def embed(here: Here, token: int) -> None:
    job = here.job
    size, row = job.hidden_size, ints(job.tokens)[token]
    target = at(floats(job.residual), token * size)
    if job.embedding_kind:
        unpack_row(job.embedding_kind, signed_bytes(job.embedding), row, size // BLOCK, target)
    else:
        row_ops.copy(floats(job.embedding + 4 * size * row), target, size)


@spread
def place_embeds(here: Here, index: int) -> None:
    """Put a row of input embeds in the place of a token's embedding."""
    job = here.job
    size = job.hidden_size
    target = at(floats(job.residual), ints(job.embeds_at)[index] * size)
    row_ops.copy(at(floats(job.embeds), index * size), target, size)


@inner
def _norm(job: Any, weight: int, source: int, out: int, target: int) -> None:
    """Norm a row of the residual, to a row of what lies at the address `out`."""
    size = job.hidden_size
    x = at(floats(job.residual), source * size)
    row_ops.rms_norm(x, floats(weight), job.eps, at(floats(out), target * size), size)


@inner
def _quantise_row(job: Any, x: Floats, size: int, row: int) -> None:
    """Make the floats at x the quantised input of that number."""
    numbers, first = at(signed_bytes(job.numbers), row * size), row * (size // INPUT_GROUP)
    quantise(x, size, numbers, at(floats(job.scales), first), at(floats(job.sums), first))


@inner
def _quantise(job: Any, kind: int, x: int, size: int, row: int) -> None:
    """Make a row of what lies at the address x the input of a weight of that kind, where it is quantised."""
    if kind:
        _quantise_row(job, at(floats(x), row * size), size, row)


@spread
def attention_norm(here: Here, token: int) -> None:
    job, kind, size = here.job, here.layer.qkv_kind, here.job.hidden_size
    _norm(job, here.layer.attention_norm, token, job.x, token)
    _quantise(job, kind, job.x, size, token)
    if kind:
        # What is left of it is an input of its own, behind those of all tokens: see `quantised.finely_rounded`.
        numbers, scales = (
            at(signed_bytes(job.numbers), token * size),
            at(floats(job.scales), token * size // INPUT_GROUP),
        )
        rest = floats(here.scratch)
        rest_of(at(floats(job.x), token * size), numbers, scales, size, rest)
        _quantise_row(job, rest, size, job.num_tokens + token)


@spread
def mlp_norm(here: Here, token: int) -> None:
    _norm(here.job, here.layer.mlp_norm, token, here.job.x, token)
    _quantise(here.job, here.layer.gate_up_kind, here.job.x, here.job.hidden_size, token)


@spread
def final_norm(here: Here, output: int) -> None:
    _norm(here.job, here.job.norm, ints(here.job.outputs)[output], here.job.x, output)
    _quantise(here.job, here.job.head_kind, here.job.x, here.job.hidden_size, output)


@spread
def quantise_attended(here: Here, token: int) -> None:
    job = here.job
    _quantise(job, here.layer.output_kind, job.attended, job.num_heads * job.head_dim, token)


@spread
def quantise_gated(here: Here, token: int) -> None:
    _quantise(here.job, here.layer.down_kind, here.job.gated, here.job.intermediate_size, token)


@spread
def hidden_norm(here: Here, output: int) -> None:
    """The same for hidden states that are wanted themselves."""
    _norm(here.job, here.job.norm, ints(here.job.hidden_at)[output], here.job.hidden, output)


@inner
def _piece_rows(job: Any, num_rows: int, row_size: int) -> Any:
    """Rows of a matrix that a thread takes at a time: enough for one stream of memory to get going, few enough to stay
    in a core's own cache while all tokens pass, and as many pieces for every thread: three or more. Whole panels."""
    most = max(LANES, min(MOST_ROWS, _CACHED_FLOATS // row_size))
    turns = max(3, -(-num_rows // (most * job.num_threads)))
    return (num_rows // (turns * job.num_threads) + LANES) // LANES * LANES


@inner
def num_pieces(job: Any, num_rows: int, row_size: int) -> Any:
    piece_rows = _piece_rows(job, num_rows, row_size)
    return (num_rows + piece_rows - 1) // piece_rows


@noinline
def _linear(
    here: Here, kind: int, weight: int, x: int, y: int, num_tokens: int, in_size: int, out_size: int, first: int,
    count: int,
) -> None:  # fmt: skip
    """y[:, first : first + count] of x times the weight transposed; of a quantised weight, of the quantised x."""
    job = here.job
    if kind:
        panel_linear(
            kind, weight, first, count, in_size // BLOCK, signed_bytes(job.numbers), floats(job.scales),
            floats(job.sums), num_tokens, floats(y + 4 * first), out_size, floats(here.scratch),
        )  # fmt: skip
    else:
        matrix = floats(weight + 4 * first * in_size)
        stream_dots(matrix, count, floats(x), num_tokens, in_size, floats(y + 4 * first), out_size)


@inner
def _add_bias(bias: int, y: int, num_tokens: int, out_size: int, first: int, count: int) -> None:
    if bias:
        for token in range(num_tokens):
            row_ops.add(floats(bias + 4 * first), floats(y + 4 * (token * out_size + first)), count)


@inner
def _add_to_residual(job: Any, first: int, count: int) -> None:
    for token in range(job.num_tokens):
        start = token * job.hidden_size + first
        row_ops.add(at(floats(job.y), start), at(floats(job.residual), start), count)


@spread
def shrink_qkv(here: Here, run: int) -> None:
    shrink(here, run, QKV, here.job.x, here.job.hidden_size)


@spread
def qkv(here: Here, piece: int) -> None:
    job, layer = here.job, here.layer
    out_size = (job.num_heads + 2 * job.num_kv_heads) * job.head_dim
    piece_rows = _piece_rows(job, out_size, job.hidden_size)
    first = piece * piece_rows
    count = min(piece_rows, out_size - first)
    num_tokens, num_inputs = job.num_tokens, job.num_tokens * (2 if layer.qkv_kind else 1)
    _linear(here, layer.qkv_kind, layer.qkv, job.x, job.qkv, num_inputs, job.hidden_size, out_size, first, count)
    for token in range(num_inputs - num_tokens):
        y = at(floats(job.qkv), token * out_size + first)
        row_ops.add(at(y, num_tokens * out_size), y, count)
    _add_bias(layer.qkv_bias, job.qkv, job.num_tokens, out_size, first, count)
    expand(here, QKV, job.qkv, out_size, first, count)


@spread
def rotate_and_store(here: Here, token: int) -> None:
    """Norm and turn a token's queries and keys, scale its queries, and write its keys and values to the cache."""
    job, layer = here.job, here.layer
    dim, scale = job.head_dim, job.scale
    q_size, kv_size = job.num_heads * dim, 2 * job.num_kv_heads * dim
    row = at(floats(job.qkv), token * (q_size + kv_size))
    rotation = at(floats(job.rotations), ints(job.positions)[token] * dim)
    for head in range(job.num_heads + job.num_kv_heads):
        x = at(row, head * dim)
        norm = layer.q_norm if head < job.num_heads else layer.k_norm
        if norm:
            row_ops.rms_norm(x, floats(norm), job.eps, x, dim)
        row_ops.rotate(x, rotation, dim)
    for i in range(q_size):
        row[i] *= scale
    slot = ints(job.slots)[token]
    if job.kv_kind:
        for head in range(2 * job.num_kv_heads):
            there = layer.kv_cache + (slot * 2 * job.num_kv_heads + head) * job.kv_head_bytes
            attention.pack_head(job.kv_kind, at(row, q_size + head * dim), dim, signed_bytes(there))
    else:
        row_ops.copy(at(row, q_size), at(floats(layer.kv_cache), slot * kv_size), kv_size)


@spread
def attend(here: Here, piece: int) -> None:
    """One item of attention, for one kv head."""
    job = here.job
    item = item_at(here.items, piece // job.num_kv_heads)
    kv_head = piece % job.num_kv_heads
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    q_size, kv_size = job.num_heads * dim, 2 * job.num_kv_heads * dim
    most = max(QUERIES, group)
    queries = floats(here.scratch)
    out = at(queries, most * dim)
    highest = at(out, most * dim)
    totals = at(highest, most)
    unpacked = at(totals, most)
    scores = at(unpacked, KEYS * dim)
    for t in range(item.num_tokens):
        source = at(floats(job.qkv), (item.token + t) * (q_size + kv_size) + kv_head * group * dim)
        row_ops.copy(source, at(queries, t * group * dim), group * dim)
    half_bytes = job.num_kv_heads * job.kv_head_bytes
    keys = here.layer.kv_cache + kv_head * job.kv_head_bytes
    table = at(ints(job.tables), item.sequence * job.table_stride)
    attention.attend(
        queries, item.num_tokens, group,
        job.kv_kind, keys, keys + half_bytes, 2 * half_bytes, dim, table, job.block_size,
        item.first, item.stop, item.position,
        unpacked, scores, out, highest, totals,
    )  # fmt: skip
    for q in range(item.num_tokens * group):
        head = kv_head * group + q % group
        if item.part < 0:
            target = at(floats(job.attended), (item.token + q // group) * q_size + head * dim)
            row_ops.scale(at(out, q * dim), _ONE / totals[q], target, dim)
        else:
            target = at(floats(job.parts), (item.part * job.num_heads + head) * (dim + 2))
            target[0], target[1] = highest[q], totals[q]
            row_ops.copy(at(out, q * dim), at(target, 2), dim)


@spread
def join(here: Here, piece: int) -> None:
    """Join the parts of a token's attention, from its first item on."""
    job = here.job
    item = item_at(here.items, piece)
    if item.part < 0 or item.first > 0:
        return
    num_parts = 1
    while piece + num_parts < job.num_items and item_at(here.items, piece + num_parts).token == item.token:
        num_parts += 1
    dim, num_heads = job.head_dim, job.num_heads
    stride = num_heads * (dim + 2)
    for head in range(num_heads):
        part = at(floats(job.parts), item.part * stride + head * (dim + 2))
        target = at(floats(job.attended), (item.token * num_heads + head) * dim)
        attention.join_parts(part, stride, num_parts, dim, target)


@spread
def shrink_output(here: Here, run: int) -> None:
    shrink(here, run, OUTPUT, here.job.attended, here.job.num_heads * here.job.head_dim)


@spread
def output(here: Here, piece: int) -> None:
    job, layer = here.job, here.layer
    in_size, size = job.num_heads * job.head_dim, job.hidden_size
    piece_rows = _piece_rows(job, size, in_size)
    first = piece * piece_rows
    count = min(piece_rows, size - first)
    _linear(here, layer.output_kind, layer.output, job.attended, job.y, job.num_tokens, in_size, size, first, count)
    _add_bias(layer.output_bias, job.y, job.num_tokens, size, first, count)
    expand(here, OUTPUT, job.y, size, first, count)
    _add_to_residual(job, first, count)


@spread
def shrink_gate_up(here: Here, run: int) -> None:
    shrink(here, run, GATE_UP, here.job.x, here.job.hidden_size)


@spread
def gate_up(here: Here, piece: int) -> None:
    """Rows of the gate and the same ones of up, so that one thread has both."""
    job, layer = here.job, here.layer
    size = job.intermediate_size
    piece_rows = _piece_rows(job, size, job.hidden_size)
    first = piece * piece_rows
    count = min(piece_rows, size - first)
    weight, kind, num_tokens = layer.gate_up, layer.gate_up_kind, job.num_tokens
    _linear(here, kind, weight, job.x, job.gate_up, num_tokens, job.hidden_size, 2 * size, first, count)
    _linear(here, kind, weight, job.x, job.gate_up, num_tokens, job.hidden_size, 2 * size, size + first, count)
    expand(here, GATE_UP, job.gate_up, 2 * size, first, count)
    expand(here, GATE_UP, job.gate_up, 2 * size, size + first, count)
    for token in range(job.num_tokens):
        gate = at(floats(job.gate_up), token * 2 * size + first)
        row_ops.silu_mul(gate, at(gate, size), at(floats(job.gated), token * size + first), count)


@spread
def shrink_down(here: Here, run: int) -> None:
    shrink(here, run, DOWN, here.job.gated, here.job.intermediate_size)


@spread
def down(here: Here, piece: int) -> None:
    job, layer = here.job, here.layer
    piece_rows = _piece_rows(job, job.hidden_size, job.intermediate_size)
    first = piece * piece_rows
    count = min(piece_rows, job.hidden_size - first)
    in_size, size = job.intermediate_size, job.hidden_size
    _linear(here, layer.down_kind, layer.down, job.gated, job.y, job.num_tokens, in_size, size, first, count)
    expand(here, DOWN, job.y, job.hidden_size, first, count)
    _add_to_residual(job, first, count)


@spread
def head(here: Here, piece: int) -> None:
    job = here.job
    piece_rows = _piece_rows(job, job.vocab_size, job.hidden_size)
    first = piece * piece_rows
    count = min(piece_rows, job.vocab_size - first)
    kind, num_outputs, size = job.head_kind, job.num_outputs, job.vocab_size
    _linear(here, kind, job.head, job.x, job.logits, num_outputs, job.hidden_size, size, first, count)
