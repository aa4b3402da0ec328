"""Waiting for a condition. Tests order events with these, never with a sleep: see tests/test_suite.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds after which a test gives up: long, because a busy machine is no failure."""
_POLL = 0.005


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as `condition` holds, while other tasks of the loop go on."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about within {PATIENCE:g} s")
        await asyncio.sleep(_POLL)


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as `condition` holds, for a test without an event loop of its own."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about within {PATIENCE:g} s")
        time.sleep(_POLL)
