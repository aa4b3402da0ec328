"""The events of an answer that goes on without its client, who may come back and read on from any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, ClassVar

WAITING = b": waiting\n\n"
"""A comment: clients read over it."""


class EventLog:
    """Takes what a response would send. The events are numbered from 0 on, in their order."""

    started = True
    """Errors are told as events: the client has had its answer."""
    running: ClassVar[set[asyncio.Task[None]]] = set()
    """The event loop alone would let a task go that nobody waits for."""

    def __init__(self, answer: bytes, *, keeps_events: bool, save: Callable[[], Awaitable[None]]) -> None:
        """`answer`: what the client gets at once; empty: it reads the events. `save` is awaited before the beginning
        and the end are told."""
        self.answer = answer
        self.keeps_events = keeps_events
        self.ended = False
        self.is_cancelled = False
        """A client wants no more of it."""
        self.save = save
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work whose events these are, while no client waits for it."""
        self._task = asyncio.create_task(work)
        self.running.add(self._task)
        self._task.add_done_callback(self.running.discard)

    async def cancel(self) -> None:
        """End the work, and return when it has ended."""
        if self._task is not None and not self._task.done():
            self.is_cancelled = True
            self._task.cancel()
            await asyncio.wait({self._task})

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send nothing."""

    def write(self, body: bytes) -> None:
        """Take one event or several."""
        if self.keeps_events:
            # JSON has no line ends, so these are between events.
            self._events += [event + b"\n\n" for event in body.split(b"\n\n") if event]
            self.num_bytes += len(body)
        self._wake()

    async def end(self, body: bytes) -> None:
        await self.save()
        self.ended = True
        self.write(body)

    async def follow(self, first: int, keep_alive_s: float) -> AsyncIterator[bytes]:
        """Yield the events from this number on, to the last; a comment where there is none for so long (0: none)."""
        while True:
            if first < len(self._events):
                # What has come together is sent together.
                yield b"".join(self._events[first:])
                first = len(self._events)
            elif self.ended:
                return
            else:
                changed = self._changed
                try:
                    await asyncio.wait_for(changed.wait(), keep_alive_s or None)
                except TimeoutError:
                    yield WAITING

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
