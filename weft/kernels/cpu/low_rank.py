"""The products of LoRA adapters in a step: each adapter's matrices are read once for all tokens that have it.

A token's result does not depend on what it is computed beside: sums are taken in the order of columns, then of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.kernels.cpu import row_ops
from weft.kernels.cpu.emit import INDEX, VECTOR, load, load_halves, loop, multiply_add, prefetch, splat, store
from weft.kernels.cpu.jit import inner, intrinsic, ir, noinline, types
from weft.kernels.cpu.job import FIRST_PART, LANES, PART_FIELDS, PARTS, PLACE_FIELDS, PLACES, RUN, Here
from weft.kernels.cpu.raw_memory import BYTES, FLOATS, Bytes, Floats, at, floats, ints, record_at, signed_bytes
from weft.kernels.cpu.tile import half_dots, stream_dots

run_at = record_at(RUN)


@inner
def _place(here: Here, run: Any, place: int) -> Any:
    """The fields of a weight, as `job.PLACE_FIELDS` counts them."""
    return at(ints(run.places), (here.layer.index * PLACES + place) * PLACE_FIELDS)


@noinline
def shrink(here: Here, index: int, place: int, x: int, in_size: int) -> None:
    """Multiply an adapter's first matrix with the rows of its tokens in what lies at the address x."""
    job, run = here.job, run_at(here.runs, index)
    fields = _place(here, run, place)
    rank = fields[0]
    if rank == 0:
        return
    tokens = at(ints(job.run_tokens), run.first)
    source = at(floats(x), tokens[0] * in_size)
    # Tokens ascend.
    if tokens[run.num_tokens - 1] - tokens[0] != run.num_tokens - 1:
        source = floats(here.scratch)
        for i in range(run.num_tokens):
            row_ops.copy(at(floats(x), tokens[i] * in_size), at(source, i * in_size), in_size)
    target = at(floats(job.shrunk), run.first * job.shrunk_stride)
    if fields[1]:
        half_dots(
            signed_bytes(fields[2]), (rank + 3) // 4 * 4, source, run.num_tokens, in_size, target, job.shrunk_stride
        )
    else:
        stream_dots(floats(fields[2]), rank, source, run.num_tokens, in_size, target, job.shrunk_stride)


def _panel_sums(num_rows: int, *, of_halves: bool) -> Callable[..., Any]:
    """Make the intrinsic that adds the panel's columns times the ranks of each of one or two rows to `out`. It asks
    meanwhile for the panel at `following`."""
    kind = ir.IntType(16 if of_halves else 32)

    @intrinsic
    def sums(typing: Any, panel: Any, following: Any, rank: Any, ranks: Any, out: Any, more: Any, more_out: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel, following = (builder.bitcast(each, kind.as_pointer()) for each in args[:2])
            rank = args[2]
            rows = [args[3:5], args[5:7]][:num_rows]

            def add_rank(index: Any, totals: list[Any]) -> list[Any]:
                lanes = builder.mul(index, INDEX(LANES))
                prefetch(builder, builder.gep(following, [lanes]))
                column = load_halves(builder, LANES, panel, lanes) if of_halves else load(builder, VECTOR, panel, lanes)
                factors = [splat(builder, builder.load(builder.gep(ranks, [index])), LANES) for ranks, _ in rows]
                return [multiply_add(builder, each, column, total) for each, total in zip(factors, totals, strict=True)]

            nothing = ir.Constant(VECTOR, [0.0] * LANES)
            totals = loop(builder, INDEX(0), rank, 1, [nothing] * num_rows, add_rank)
            for (_, out), total in zip(rows, totals, strict=True):
                store(builder, builder.fadd(load(builder, VECTOR, out, INDEX(0)), total), out, INDEX(0))
            return context.get_dummy_value()

        return types.void(BYTES, BYTES, types.int64, FLOATS, FLOATS, FLOATS, FLOATS), emit

    return sums


_add_one, _add_two = (_panel_sums(count, of_halves=False) for count in (1, 2))
_add_one_of_halves, _add_two_of_halves = (_panel_sums(count, of_halves=True) for count in (1, 2))


@inner
def _add_to_one(is_half: int, panel: Bytes, following: Bytes, rank: int, ranks: Floats, out: Floats) -> None:
    if is_half:
        _add_one_of_halves(panel, following, rank, ranks, out, ranks, out)
    else:
        _add_one(panel, following, rank, ranks, out, ranks, out)


@noinline
def _expand_panel(
    here: Here, run: Any, is_half: int, panel: Bytes, following: Bytes, rank: int, first_rank: int, y: Floats,
    out_size: int, low: int, high: int,
) -> None:  # fmt: skip
    """Add to y[:, low : high] of the run's tokens, where y begins at the panel's first output."""
    job = here.job
    tokens = at(ints(job.run_tokens), run.first)
    ranks = at(floats(job.shrunk), run.first * job.shrunk_stride + first_rank)
    whole = run.num_tokens if high - low == LANES else 0
    for t in range(0, whole - 1, 2):
        row, out = at(ranks, t * job.shrunk_stride), at(y, tokens[t] * out_size)
        more = at(row, job.shrunk_stride)
        if is_half:
            _add_two_of_halves(panel, following, rank, row, out, more, at(y, tokens[t + 1] * out_size))
        else:
            _add_two(panel, following, rank, row, out, more, at(y, tokens[t + 1] * out_size))
    if whole % 2:
        row, out = at(ranks, (whole - 1) * job.shrunk_stride), at(y, tokens[whole - 1] * out_size)
        _add_to_one(is_half, panel, following, rank, row, out)
    for t in range(whole, run.num_tokens):
        row, out, lanes = at(ranks, t * job.shrunk_stride), at(y, tokens[t] * out_size), floats(here.scratch)
        row_ops.copy(at(out, low), at(lanes, low), high - low)
        _add_to_one(is_half, panel, following, rank, row, lanes)
        row_ops.copy(at(lanes, low), at(out, low), high - low)


@noinline
def expand(here: Here, place: int, y: int, out_size: int, first: int, count: int) -> None:
    """Add to y[:, first : first + count] what the adapters' second matrices make of the shrunk rows."""
    job = here.job
    for index in range(job.num_runs):
        run = run_at(here.runs, index)
        fields = _place(here, run, place)
        after = _place(here, run_at(here.runs, min(index + 1, job.num_runs - 1)), place)
        for part in range(PARTS if fields[0] else 0):
            offset = FIRST_PART + part * PART_FIELDS
            begin, end, first_rank, rank = fields[offset], fields[offset + 1], fields[offset + 2], fields[offset + 3]
            low, high = max(first, begin), min(first + count, end)
            if rank == 0 or low >= high:
                continue
            panels = signed_bytes(fields[offset + 4])
            following = signed_bytes(after[offset + 4]) if after[offset + 3] == rank else panels
            panel_bytes = rank * LANES * (2 if fields[1] else 4)
            for panel in range((low - begin) // LANES, (high - begin + LANES - 1) // LANES):
                start, skipped = begin + panel * LANES, panel * panel_bytes
                _expand_panel(
                    here, run, fields[1], at(panels, skipped), at(following, skipped), rank, first_rank,
                    at(floats(y), start), out_size, max(low - start, 0), min(high - start, LANES),
                )  # fmt: skip
