"""uvicorn's HTTP protocol, with a short way for answers that come in very many small pieces.

A piece that is sent the usual way passes every layer of the application, and goes to the network in the middle of the
work on other answers. On the short way it costs a call, and the pieces that one round of the event loop brought are
written together: a step of the engine brings a piece to every answer, and several steps at once when this process is
behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "weft.short_way"


class Round:
    """The pieces that wait for the end of this round of the event loop, those of one answer joined."""

    def __init__(self) -> None:
        self._pieces: dict[asyncio.Transport, bytes] = {}

    def add(self, transport: asyncio.Transport, body: bytes) -> None:
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self.write)
        before = self._pieces.get(transport)
        self._pieces[transport] = body if before is None else before + body

    def write(self) -> None:
        pieces, self._pieces = self._pieces, {}
        for transport, body in pieces.items():
            # A connection that was lost meanwhile must not keep the others from their pieces.
            if not transport.is_closing():
                transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class ShortWay:
    """One answer's."""

    def __init__(self, cycle: RequestResponseCycle, this_round: Round) -> None:
        self._cycle = cycle
        self._round = this_round

    def write(self, body: bytes) -> bool:
        """Take a piece from the middle of the answer. False when it must be sent the usual way, which waits for a
        client that does not keep up."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self._round.add(cycle.transport, body)
        return True

    def flush(self) -> None:
        """To be called before anything is sent the usual way: it must not overtake what waits here."""
        self._round.write()


class Protocol(HttpToolsProtocol):
    """Offers the short way to the application, as an extension of ASGI."""

    def __init__(self, *args: Any, this_round: Round, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._round = this_round

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {_EXTENSION: ShortWay(self.cycle, self._round)}


def protocol_factory() -> Callable[..., Protocol]:
    """What makes the protocols of one server."""
    return partial(Protocol, this_round=Round())


def short_way(scope: Scope) -> ShortWay | None:
    """None with a server that has none."""
    found: ShortWay | None = scope.get("extensions", {}).get(_EXTENSION)
    return found
