"""A few threads that run native functions together. Between jobs they sleep, and cost nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from weft.kernels.cpu.crew import CELLS, CLAIMS

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
