"""uvicorn's HTTP protocol, with bounds on what a client may leave unsaid or unread, and a direct writer for answers
that come in very many small pieces.

A piece that is sent through ASGI passes every layer of the application, and goes to the network in the middle of the
work on other answers. By the direct writer it costs a call, and the pieces of one turn of the event loop are written
together as a batch: a step of the engine brings a piece to every answer, and several steps at once when this process is
behind.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import sys
import termios
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from weft.api.error_responses import error_body
from weft.api.middleware import AllowedOrigins, readable_by, too_large
from weft.errors import InvalidRequest
from weft.options import Config

log = logging.getLogger(__name__)

HEAD_S = 60.0
"""A connection that has not brought a request's head by then is closed."""

_EXTENSION = "weft.direct_writer"


class WriteBatch:
    """The batch holds pieces until the end of this turn of the event loop, those of one answer joined."""

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


class DirectWriter:
    """Writes the middle of one answer past the application's layers."""

    def __init__(self, cycle: RequestResponseCycle, batch: WriteBatch) -> None:
        self._cycle = cycle
        self._batch = batch

    def write(self, body: bytes) -> bool:
        """Take a piece from the middle of the answer. False when it must be sent through ASGI, which waits for a
        client that does not keep up."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self._batch.add(cycle.transport, body)
        return True

    def flush(self) -> None:
        """Write what waits. It is called before anything is sent through ASGI, which must not overtake it."""
        self._batch.write()


class Timer:
    """The timer has one call that is due, or none."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def set(self, seconds: float, call: Callable[[], None]) -> None:
        self.cancel()
        self._handle = self._loop.call_later(seconds, self._ring, call)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self, call: Callable[[], None]) -> None:
        self._handle = None
        call()


class HttpProtocol(HttpToolsProtocol):
    """Offers the direct writer to the application, as an extension of ASGI. Ends connections that would hold memory for
    ever: a head without an end, and an answer that is not read."""

    def __init__(self, *args: Any, batch: WriteBatch, settings: Config, origins: AllowedOrigins, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch = batch
        self._origins = origins
        self._limits = settings.limits
        self._patience_s = settings.server.slow_reader_timeout_s
        self._head_bytes = 0
        """Bytes of a head that is not complete; -1: what comes now is a body."""
        self._head_timer = Timer(self.loop)
        self._reader_timer = Timer(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._head_bytes >= 0:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > 0 and not self._head_timer.runs:
            self._wait_for_head()
        if self._head_bytes > self._limits.max_header_kb << 10 and not self.transport.is_closing():
            self._refuse(too_large(self._limits))

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        self._head_timer.cancel()
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {_EXTENSION: DirectWriter(self.cycle, self._batch)}

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader_timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_timer.cancel()
        self._reader_timer.cancel()

    def _wait_for_head(self) -> None:
        self._head_timer.set(HEAD_S, self._give_up_head)

    def _give_up_head(self) -> None:
        """Close a connection that brought no head. A stray byte behind a request does not cut the answer off."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _watch_reader(self) -> None:
        """Look again later whether the client has read any of what waits for it: nothing is added meanwhile."""
        if self.transport.get_write_buffer_size() and self._patience_s:
            unread_bytes = self._unread_bytes()
            self._reader_timer.set(self._patience_s, lambda: self._check_reader(unread_bytes))

    def _check_reader(self, unread_bytes: int) -> None:
        if self._unread_bytes() < unread_bytes:
            self._watch_reader()
        else:
            log.warning("a client read nothing for %g s and was dropped", self._patience_s)
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Count what waits here, and what waits in the kernel for the client to read."""
        return self.transport.get_write_buffer_size() + _in_kernel(self.transport.get_extra_info("socket"))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(InvalidRequest(msg))

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer past the application, because there is no request yet; of its headers some may be there."""
        body = msgspec.json.encode(error_body(error))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        for name, value in self.headers or ():
            if name == b"origin" and value in self._origins:
                head += b"".join(b"%b: %b\r\n" % header for header in readable_by(value))
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()


def _in_kernel(connection: socket.socket) -> int:
    """Count the bytes that were sent and not acknowledged, where the system tells."""
    if sys.platform != "linux":
        return 0
    count: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    return count


def protocol_factory(settings: Config) -> Callable[..., HttpProtocol]:
    """Return what makes the protocols of one server."""
    return partial(HttpProtocol, batch=WriteBatch(), settings=settings, origins=AllowedOrigins(settings.server))


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the direct writer of a request; None with a server that has none."""
    found: DirectWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    return found
