"""Whether a peer answers, asked every now and then: readiness tells the truth, and comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from weft.backends.contract import Health
from weft.backends.remote.faults import Lost, Refused
from weft.backends.remote.line import Line
from weft.errors import RequestTimeout

log = logging.getLogger(__name__)

PROBE_S = 5.0
PROBE_WHEN_LOST_S = 1.0
JITTER = 0.2
"""Of the time between two probes: many that watch one peer must not ask it all at once."""
TIMEOUT_S = 5.0


class Watch:
    def __init__(self, line: Line, path: str) -> None:
        """`path` is what is asked for."""
        self._line = line
        self._path = path
        self._look = asyncio.Event()
        self._task = asyncio.create_task(self._keep_watch(), name="weft-remote-watch")
        self.health = Health(True)
        self.num_returns = 0
        """How often the peer came back."""

    def suspect(self, why: Lost) -> None:
        """A request was not answered."""
        self._found(str(why), gone=isinstance(why, Refused))
        self.look()

    def look(self) -> None:
        """Ask soon."""
        self._look.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep_watch(self) -> None:
        while True:
            await self._pause()
            self._found(await self._trouble())

    async def _pause(self) -> None:
        seconds = PROBE_S if self.health.ready else PROBE_WHEN_LOST_S
        seconds *= random.uniform(1 - JITTER, 1 + JITTER)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._look.wait()
        if self._look.is_set():
            self._look.clear()
            await asyncio.sleep(min(seconds, PROBE_WHEN_LOST_S))

    async def _trouble(self) -> str:
        """Why the peer is not ready; empty: it is."""
        try:
            answer = await self._line.ask(self._path, timeout_s=TIMEOUT_S)
        except (Lost, RequestTimeout) as error:
            return str(error)
        return "" if answer.status == 200 else f"it answers with status {answer.status}"

    def _found(self, trouble: str, *, gone: bool = False) -> None:
        if trouble and self.health.ready:
            log.warning("the remote engine at %s is not there: %s", self._line.shown, trouble)
        elif not trouble and not self.health.ready:
            log.warning("the remote engine at %s is there again", self._line.shown)
            self.num_returns += 1
        if trouble:
            self.health = Health(False, "the remote engine does not answer", gone=gone or self.health.gone)
        else:
            self.health = Health(True)
