"""Waiting for a condition. Tests order events with these, never with a sleep: see tests/test_suite.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE = 300.0
"""Seconds after which a test gives up: long, because a busy machine is no failure."""
_POLL, _MOST = 0.005, 0.1


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as `condition` holds, while other tasks of the loop go on."""
    for pause in _pauses(condition, what):
        await asyncio.sleep(pause)


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as `condition` holds, for a test without an event loop of its own."""
    for pause in _pauses(condition, what):
        time.sleep(pause)


def _pauses(condition: Callable[[], object], what: str) -> Iterator[float]:
    """Yield how long to wait before a condition is looked at again: twice as long as it took to look. One that
    asks a server would otherwise take the time from what it waits for."""
    deadline = time.monotonic() + PATIENCE
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"{what} did not come about within {PATIENCE:g} s")
        yield min(_MOST, max(_POLL, 2 * (now - began)))
