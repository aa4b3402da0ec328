"""Connections to a server that are kept, and used again."""

from __future__ import annotations

import asyncio
from typing import Self

from tests.waiting import PATIENCE
from weft.bench.http import Address, Connection


class Connections:
    """A context manager that closes those that it has kept."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[Connection] = []

    async def ask(self, request: bytes) -> tuple[int, str]:
        """Return the status and the body of the answer. Raises ConnectionError and TimeoutError."""
        async with asyncio.timeout(PATIENCE):
            self._idle = [connection for connection in self._idle if connection.is_open]
            if self._idle:
                pieces: list[bytes] = []
                try:
                    return await self._ask_on(self._idle.pop(), request, pieces)
                except ConnectionError:
                    # The server closes those that were idle for some seconds, perhaps while a request is on its way.
                    if pieces:
                        raise
            return await self._ask_on(await Connection.open(self.address), request, [])

    async def _ask_on(self, connection: Connection, request: bytes, pieces: list[bytes]) -> tuple[int, str]:
        status = await connection.ask(request, pieces.append)
        if connection.is_open:
            self._idle.append(connection)
        return status, b"".join(pieces).decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
