"""Room for another model: how many may be loaded, how much they may take together, and which of them has to go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from weft.backends.contract import Need
from weft.errors import OutOfMemory
from weft.frontend.slot import Slot

log = logging.getLogger(__name__)

GIB = 1 << 30


class Room:
    def __init__(self, max_loaded: int, limit_bytes: int, slots: Callable[[], Iterable[Slot]]) -> None:
        """0: no limit but what is free."""
        self._max_loaded = max_loaded
        self._limit_bytes = limit_bytes
        self._slots = slots
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()

    def changed(self) -> None:
        """A model may have become idle, or be gone."""
        self._change.set()

    async def make(self, slot: Slot, ask: Callable[[], Awaitable[Need]]) -> None:
        """Returns when the model may be loaded; it holds its memory from then on. Idle models are unloaded for it,
        those not used for longest first. While there are only busy ones it waits, and who comes later waits behind it.

        Raises OutOfMemory when it is too large for the limit by itself.
        """
        await ask()
        slot.waits_for_room = True
        async with self._turn:
            while True:
                self._change.clear()
                # Again, with the memory as it is now; what had to be fetched was fetched before it was its turn.
                need = await ask()
                self._check_size(slot, need)
                shortage = self._shortage(slot, need)
                if not shortage:
                    slot.need, slot.holds_memory, slot.waits_for_room = need, True, False
                    return
                slot.stage = f"waiting for room: {shortage}"
                if not await self.unload_one(f"for {slot.name}: {shortage}", keep=slot):
                    await self._change.wait()

    async def unload_one(self, why: str, *, keep: Slot) -> bool:
        """The idle model that was not used for longest; false when there is none but the one to keep."""
        idle = [slot for slot in self._slots() if slot.is_idle and slot is not keep]
        if not idle:
            return False
        victim = min(idle, key=lambda slot: slot.last_used)
        log.info("the model %s is unloaded %s", victim.name, why)
        await victim.unload()
        return True

    def _check_size(self, slot: Slot, need: Need) -> None:
        if self._limit_bytes and need.num_bytes > self._limit_bytes:
            raise OutOfMemory(
                f"{slot.name} takes {need.num_bytes / GIB:.2f} GiB by its plan, and all models together may take "
                f"{self._limit_bytes / GIB:.2f} GiB.",
                hint="The setting is --max-models-memory.",
            )

    def _shortage(self, slot: Slot, need: Need) -> str:
        """Why it cannot be loaded now; empty: it can, or unloading others would not help."""
        others = [other for other in self._slots() if other is not slot and other.holds_memory]
        if self._max_loaded and len(others) >= self._max_loaded:
            return f"{len(others)} of {self._max_loaded} models are loaded"
        held = sum(other.need.num_bytes for other in others)
        if self._limit_bytes and held + need.num_bytes > self._limit_bytes:
            wanted, limit = (held + need.num_bytes) / GIB, self._limit_bytes / GIB
            return f"{wanted:.2f} GiB are wanted of {limit:.2f}"
        return need.problem if held else ""
