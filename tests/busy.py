"""A command beside two processes that keep both cores busy: python -m tests.busy [--runs N] COMMAND...

A test that waits for time instead of a condition fails here. `make test-busy` runs the suite so, with RUNS=10 ten times
in a row, up to the first that fails. A line of figures for each run comes at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

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


class Run(NamedTuple):
    code: int
    seconds: float
    summary: str
    """The last line that the command wrote, which is pytest's summary."""

    def line(self, number: int) -> str:
        outcome = "passed" if self.code == 0 else f"exit code {self.code}"
        return f"run {number}: {outcome}, {self.seconds:.0f} s beside {NUM_BUSY} busy processes: {self.summary}"


def run_beside(command: list[str]) -> Run:
    """Run the command to its end. What it writes is passed on as it comes."""
    began = time.monotonic()
    summary = ""
    with busy_machine(), subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            line = b""
            for data in _output(running, running.stdout.fileno()):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                *whole, line = (line + data).split(b"\n")
                summary = next((text for one in reversed(whole) if (text := one.decode().strip())), summary)
            code = running.wait()
        except BaseException:
            running.terminate()
            raise
    return Run(code, time.monotonic() - began, line.decode().strip() or summary)


def _output(running: subprocess.Popen[bytes], fd: int) -> Iterator[bytes]:
    """Yield what a process writes up to its end, also where one that it left behind could still write."""
    while True:
        ready, _, _ = select.select([fd], [], [], 1.0)
        data = os.read(fd, 1 << 16) if ready else b""
        if data:
            yield data
        elif ready or running.poll() is not None:
            return


def run_all(command: list[str], num_runs: int) -> int:
    """Run the command so often, or up to its first failure, and tell of every run at the end."""
    runs: list[Run] = []
    try:
        while len(runs) < num_runs and not any(run.code for run in runs):
            runs.append(run_beside(command))
    finally:
        for number, run in enumerate(runs, 1):
            print(run.line(number), flush=True)
    return runs[-1].code


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.busy")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    return run_all(asked.command, asked.runs)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
