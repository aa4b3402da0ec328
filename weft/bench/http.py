"""An HTTP/1.1 client on asyncio, light enough to follow tens of thousands of events a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from msgspec import Struct

from weft.errors import ConfigError

OnBody = Callable[[bytes], None]


class Address(Struct, frozen=True):
    """The address of a server, and what every request to it repeats."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    """The path before /v1."""
    key: str = ""
    """The API key, sent as a bearer token."""

    @classmethod
    def parse(cls, url: str, key: str = "") -> Address:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of a server.", hint="Such as http://127.0.0.1:8000.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, prefix, key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a whole request."""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        if self.key:
            head += f"Authorization: Bearer {self.key}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """A connection carries one request at a time, and another when that one is answered."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: _Answer | None = None
        self._lost = False

    @classmethod
    async def open(cls, address: Address) -> Connection:
        connection = cls()
        connection._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: connection, address.host, address.port, ssl=address.tls or None
        )
        return connection

    @property
    def is_open(self) -> bool:
        return not self._lost

    async def ask(self, request: bytes, on_body: OnBody) -> int:
        """Send a request, give the body to `on_body` as it comes, and return the status when all of it is there. Raises
        ConnectionError when the server hangs up before that, ValueError for what is no HTTP, and what `on_body` raises;
        the connection is then closed."""
        if self._lost:
            raise ConnectionResetError("the server has closed the connection")
        self._answer = answer = _Answer(on_body)
        self._transport.write(request)
        try:
            status = await answer.status_at_end
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None
        if answer.closes:
            self.close()
        return status

    def close(self) -> None:
        self._lost = True
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self._answer is not None:
            self._answer.hang_up()


class _Answer:
    """The parser of one answer, from its first byte to its last."""

    def __init__(self, on_body: OnBody) -> None:
        self.status_at_end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.closes = False
        """True when the server will close the connection behind it."""
        self._on_body = on_body
        self._status = 0
        self._length: int | None = None
        """Bytes of the body that are still to come; None when it is chunked, or ends with the connection."""
        self._chunked = False
        self._unread = b""

    def feed(self, data: bytes) -> None:
        if self.status_at_end.done():
            return
        try:
            self._read(self._unread + data if self._unread else data)
        except Exception as error:  # noqa: BLE001 - raised again where the answer is waited for
            self.status_at_end.set_exception(error)

    def hang_up(self) -> None:
        if self.status_at_end.done():
            return
        if self._status and not self._chunked and self._length is None:
            self._end()
        else:
            self.status_at_end.set_exception(ConnectionResetError("the server hung up in the middle of an answer"))

    def _read(self, data: bytes) -> None:
        if not self._status:
            head, separator, rest = data.partition(b"\r\n\r\n")
            if not separator:
                self._unread = data
                return
            self._read_head(head)
            data = rest
        if self._chunked:
            self._read_chunks(data)
        else:
            self._read_plain(data)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"the server does not speak HTTP/1: {first[:80]!r}")
        self._status = int(rest[:3])
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(b":") for x in lines)}
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        if not self._chunked and b"content-length" in headers:
            self._length = int(headers[b"content-length"])
        self.closes = headers.get(b"connection") == b"close"

    def _read_plain(self, data: bytes) -> None:
        self._unread = b""
        self._on_body(data)
        if self._length is not None:
            self._length -= len(data)
            if self._length <= 0:
                self._end()

    def _read_chunks(self, data: bytes) -> None:
        """Read whole chunks only: the rest of the last one waits for more data."""
        at = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line_end].partition(b";")[0], 16)
            begin = line_end + 2
            if size == 0:
                # Behind the last chunk there may be trailers; an empty line ends them.
                if data.find(b"\r\n", begin) == begin or data.find(b"\r\n\r\n", begin) >= 0:
                    self._end()
                break
            if len(data) < begin + size + 2:
                break
            self._on_body(data[begin : begin + size])
            at = begin + size + 2
        self._unread = data[at:]

    def _end(self) -> None:
        self.status_at_end.set_result(self._status)
