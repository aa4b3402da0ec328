"""The watchdog of the event loop measures how long the loop stood still, and finds out what held it.

The loop sets a deadline for itself ten times a second. A thread looks whether it was missed, and if so notes the task
that runs and the line where it is: when the loop runs again it is too late to see. Tasks are named after the endpoints
that they serve (`name_task`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from weft import logs
from weft.observe.metrics import Histogram

log = logging.getLogger(__name__)

TICK_S = 0.1
STALL_S = 0.05
"""No work on the event loop may take longer."""
LOGGED_S = 0.25
"""A longer stall leaves a line in the log."""
STALL_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_PACKAGE = str(Path(__file__).parents[1])


def name_task(name: str) -> None:
    """Name the running task after the endpoint that it serves."""
    task = asyncio.current_task()
    if task is not None:
        task.set_name(name[:100])


class LoopWatchdog:
    """The watchdog of one event loop. It is used on that loop, as a context manager."""

    def __init__(self) -> None:
        self.stalls = Histogram(STALL_SECONDS)
        self._loop: asyncio.AbstractEventLoop
        self._thread_id = 0
        self._due = 0.0
        self._cpu = 0.0
        self._seen = ("", "")
        """The name of the task that held the loop, and its line."""
        self._stopped = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoopWatchdog:
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._set_deadline()
        threading.Thread(target=self._watch, name="weft-watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def _set_deadline(self) -> None:
        self._cpu = time.process_time()
        self._due = time.monotonic() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        late = time.monotonic() - self._due
        if late > STALL_S:
            self.stalls.observe(late)
        if late > LOGGED_S:
            endpoint, line = self._seen
            fields = {
                "seconds": late,
                "cpu_seconds": time.process_time() - self._cpu,
                "endpoint": endpoint or "unknown",
                "line": line or "unknown",
            }
            logs.event(log, logging.WARNING, "the event loop stood still", fields)
        self._seen = ("", "")
        self._set_deadline()

    def _watch(self) -> None:
        while not self._stopped.wait(TICK_S):
            if time.monotonic() > self._due + STALL_S and not self._seen[1]:
                task = asyncio.current_task(self._loop)
                frame = sys._current_frames().get(self._thread_id)
                self._seen = (task.get_name() if task is not None else "", _line(frame))


def _line(frame: FrameType | None) -> str:
    """Return the innermost line of Weft's own code."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return f"weft{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
