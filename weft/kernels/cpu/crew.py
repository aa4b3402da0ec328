"""How threads that run one function share its work: by claiming pieces of it, and by waiting for one another.

A job is a row of spreads. In each, every thread claims pieces until one claim is past the last piece; so the counter
of claims ends at a known number, and the next spread begins there. Nothing is ever set back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.kernels.cpu.jit import inner
from weft.kernels.cpu.memory import Ints, at, fetch_add, give_way, ints, load_acquire, pause

# Cells a cache line or two apart, in int64s.
CELLS = 48
CLAIMS, ARRIVALS = 16, 32

# Some 20 us: longer than the threads of an idle machine differ, and shorter than its scheduler's slices.
_SPINS = 1000


@inner
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
    """From work on one piece, work on them all: for every piece work(here, piece), each by one thread.

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
