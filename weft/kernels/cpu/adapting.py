"""What LoRA adapters add to the linear layers of some tokens. Others are not touched, and each token's sums are taken
in the same order whoever is beside it."""

from __future__ import annotations

from typing import Any

from weft.kernels.cpu import rows
from weft.kernels.cpu.jit import inner
from weft.kernels.cpu.job import Here
from weft.kernels.cpu.memory import at, floats, ints
from weft.kernels.cpu.tile import dots

# The places of `AdaptedLayer`, in its order.
QKV, OUTPUT, GATE_UP, DOWN = range(4)
_PLACES, _FIELDS = 4, 3


@inner
def _place(here: Here, run: Any, place: int) -> Any:
    """Rank, and the addresses of both matrices; the rank is 0 where the adapter has nothing."""
    return at(ints(run.places), (here.layer.index * _PLACES + place) * _FIELDS)


@inner
def shrink(here: Here, index: int, place: int, x: int, in_size: int) -> None:
    """An adapter's first matrix times the rows of its tokens in what lies at the address x."""
    job, run = here.job, here.runs[index]
    fields = _place(here, run, place)
    rank = fields[0]
    if rank:
        source = at(floats(x), run.token * in_size)
        target = at(floats(job.shrunk), run.token * job.shrunk_stride)
        dots(floats(fields[1]), in_size, rank, source, in_size, run.num_tokens, in_size, target, job.shrunk_stride)


@inner
def expand(here: Here, place: int, y: int, out_size: int, first: int, count: int) -> None:
    """Add to y[:, first : first + count] what the adapters' second matrices make of that."""
    job = here.job
    for index in range(job.num_runs):
        run = here.runs[index]
        fields = _place(here, run, place)
        rank = fields[0]
        if rank:
            shrunk = at(floats(job.shrunk), run.token * job.shrunk_stride)
            added = floats(here.scratch)
            matrix = at(floats(fields[2]), first * rank)
            dots(matrix, rank, count, shrunk, job.shrunk_stride, run.num_tokens, rank, added, count)
            for t in range(run.num_tokens):
                rows.add(at(added, t * count), floats(y + 4 * ((run.token + t) * out_size + first)), count)
