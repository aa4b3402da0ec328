"""Waiting for a condition. Tests order events with these, never with a sleep: see tests/test_suite.py.

A test that waits for less than it needs fails when conditions are looked at all the time (TEST_WAITS=eager), and one
that waits for what soon is over when tests go on a while later (TEST_WAITS=late), whatever the machine does meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator

from tests import virtual_time

PATIENCE = 300.0
"""Seconds after which a test gives up: long, because a busy machine is no failure."""
WAITS = os.environ.get("TEST_WAITS", "")
assert WAITS in ("", "eager", "late"), f"TEST_WAITS={WAITS}: eager or late"
_POLL, _MOST, _LATER = 0.005, 0.1, 0.1


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as `condition` holds, while other tasks of the loop go on."""
    # On the clock that jumps time passes only when all tasks wait: what a test sees does not depend on the machine.
    waits = "" if isinstance(asyncio.get_running_loop(), virtual_time.Loop) else WAITS
    for pause in pauses(condition, what, waits):
        await asyncio.sleep(pause)


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as `condition` holds, for a test without an event loop of its own."""
    for pause in pauses(condition, what):
        time.sleep(pause)


def pauses(condition: Callable[[], object], what: str, waits: str = WAITS) -> Iterator[float]:
    """Yield how long to wait before a condition is looked at again: twice as long as it took to look. One that
    asks a server would otherwise take the time from what it waits for."""
    deadline = time.monotonic() + PATIENCE
    while True:
        began = time.monotonic()
        if condition():
            if waits == "late":
                yield _LATER
            return
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"{what} did not come about within {PATIENCE:g} s")
        yield 0.0 if waits == "eager" else min(_MOST, max(_POLL, 2 * (now - began)))
