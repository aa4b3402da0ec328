"""The process that tries grammars, seen from outside: started, asked, and ended when it is late.

llguidance bounds most of what a grammar may cost, but not all: `multipleOf` a number of eight digits takes it minutes,
and nothing can end a thread. A process is ended by the clock, and bounded in memory by the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import sys
from pathlib import Path

import msgspec

from weft.errors import EngineFault
from weft.text.grammars.words import Words

_CHILD = Path(__file__).with_name("child.py")
_LENGTH = struct.Struct("<I")
_START_SECONDS = 60.0
_MEMORY_BYTES = 4 * 2**30


class GrammarProcess:
    """One child process, of one event loop."""

    def __init__(self, words: Words, seconds: float) -> None:
        """`seconds`: for one grammar."""
        self._settings = {"words": words, "memory_bytes": _MEMORY_BYTES, "alarm_seconds": math.ceil(seconds) + 1}
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, grammar: str) -> str:
        """Why a grammar cannot be built; empty: it can. TimeoutError, or EOFError when it had to end for it."""
        if self._process is None:
            await self._start()
        return await self._exchange(grammar, self._seconds)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Reads to the end of its output as well, so that no pipe stays open.
            await process.communicate()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(_CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal reaches the server, which ends this process; it must not reach both.
            start_new_session=True,
        )
        try:
            await self._exchange(self._settings, _START_SECONDS)
        except (TimeoutError, EOFError) as error:
            raise EngineFault("The process that compiles grammars could not be started.") from error

    async def _exchange(self, message: object, seconds: float) -> str:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        body = msgspec.msgpack.encode(message)
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(_LENGTH.pack(len(body)) + body)
                await process.stdin.drain()
                head = await process.stdout.readexactly(_LENGTH.size)
                return msgspec.msgpack.decode(await process.stdout.readexactly(_LENGTH.unpack(head)[0]), type=str)
        except BaseException as error:
            # Also when whoever asked went away: the next to ask must not read this answer.
            await self.close()
            if isinstance(error, ConnectionError):
                raise EOFError from error
            raise
