"""A command beside two processes that keep both cores busy: python -m tests.busy COMMAND...

A test that waits for time instead of a condition fails here. `make test-busy` runs the suite so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

NUM_BUSY = 2
BUSY = """
import os, sys

parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""It ends with its parent as well, however that ended."""


@contextlib.contextmanager
def busy_machine() -> Iterator[list[subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for _ in range(NUM_BUSY):
            process = subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())])
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def run_beside(command: list[str]) -> int:
    """Run the command to its end; returns its exit code."""
    with busy_machine():
        began = time.monotonic()
        with subprocess.Popen(command) as running:
            try:
                code = running.wait()
            except BaseException:
                running.terminate()
                raise
            finally:
                seconds = time.monotonic() - began
                print(f"{seconds:.0f} s beside {NUM_BUSY} busy processes", flush=True)
    return code


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(run_beside(sys.argv[1:]))
