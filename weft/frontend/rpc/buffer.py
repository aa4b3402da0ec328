"""Fewer messages for the same text: an answer's chunks, joined."""

from __future__ import annotations

import asyncio
import contextlib


class ChunkBuffer:
    """The first chunk leaves at once. Later ones leave together: when `size` of them are held, when the oldest has
    waited for `interval_s`, or at the end. One task puts, and one iterates over the texts to send.
    """

    def __init__(self, size: int, interval_s: float) -> None:
        self._size = size
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._held: list[str] = []
        self._due = 0.0
        """When the oldest held chunk must leave, by the event loop's clock."""
        self._begun = False
        self._ended = False
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._room: asyncio.Future[None] = self._loop.create_future()

    def put(self, chunk: str) -> asyncio.Future[None] | None:
        """When the buffer is full, returns what to await before the next chunk: a slow reader holds up nothing but
        its own answer."""
        if not self._held:
            self._due = self._loop.time() + self._interval_s
        self._held.append(chunk)
        self._some.set()
        if len(self._held) < self._size:
            return None
        self._enough.set()
        self._room = self._loop.create_future()
        return self._room

    def end(self) -> None:
        """No more chunks will come."""
        self._ended = True
        self._some.set()
        self._enough.set()

    def __aiter__(self) -> ChunkBuffer:
        return self

    async def __anext__(self) -> str:
        await self._some.wait()
        if self._begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._due):
                    await self._enough.wait()
        if not self._held:
            raise StopAsyncIteration
        self._begun = True
        text = "".join(self._held)
        self._held.clear()
        if not self._room.done():
            self._room.set_result(None)
        if not self._ended:
            self._some.clear()
            self._enough.clear()
        return text
