"""A few threads that run native functions together. Between jobs they sleep, and cost nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from weft.kernels.cpu.jit import inner
from weft.kernels.cpu.raw_memory import Ints, at, fetch_add, give_way, ints, load_acquire, pause

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


Job = Callable[[int], None]
"""Called by each thread with its number. It must meet the others at its end: see `crew.wait_for_all`."""


class Team:
    """The calling thread and its helpers."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._cells = np.zeros(CELLS, np.int64)
        self._job: Job | None = None
        self._closed = False
        self._busy = threading.Lock()
        self._wake = [threading.Lock() for _ in range(num_threads - 1)]
        for thread, wake in enumerate(self._wake, start=1):
            wake.acquire()
            threading.Thread(target=self._help, args=(thread, wake), name=f"weft-cpu-{thread}", daemon=True).start()

    @property
    def cells_address(self) -> int:
        return int(self._cells.ctypes.data)

    @property
    def claims(self) -> int:
        """Where the next job's claims begin. Stands still between jobs."""
        return int(self._cells[CLAIMS])

    def run(self, make_job: Callable[[], Job]) -> None:
        """Make a job once no other runs, and run it on every thread."""
        with self._busy:
            if self._closed:
                raise RuntimeError("The team of threads is closed.")
            job = self._job = make_job()
            for wake in self._wake:
                wake.release()
            job(0)

    def close(self) -> None:
        with self._busy:
            self._job, self._closed = None, True
            for wake in self._wake:
                wake.release()
            self._wake = []

    def _help(self, thread: int, wake: threading.Lock) -> None:
        while True:
            wake.acquire()
            job = self._job
            if job is None:
                return
            job(thread)
