"""The way to a peer: requests over HTTP, answers as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping

import httpx
import msgspec
from msgspec import Struct

from weft import __version__
from weft.backends.openai_server.peer_errors import PeerLost, PeerRefused, error_of
from weft.backends.openai_server.servers import Body
from weft.errors import ConfigError, EngineFault, InvalidRequest, RequestTimeout

MAX_EVENT_BYTES = 8 << 20
"""The most bytes of one event: a peer must not fill this process's memory with a line that never ends."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLong(ValueError):
    """The error for an event that is longer than any may be."""


class EventReader:
    """Gives the data of every event, once it is whole. Comments, and fields other than `data`, are read over: this
    interface gives them no meaning."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a line."""
        self._data: list[bytes] = []
        self._size = 0
        """Bytes of the data so far."""
        self._begun = False
        self._at_return = False
        """True when the last byte was a carriage return."""

    def push(self, more: bytes) -> list[bytes]:
        """The data of the events that are complete now; raises EventTooLong."""
        if self._at_return and more.startswith(b"\n"):
            # The second half of an end of line, whose first half has done.
            more = more[1:]
            self._at_return = False
        if more:
            self._at_return = more.endswith(b"\r")
        self._rest += more
        events: list[bytes] = []
        for line in self._lines() if b"\n" in more or b"\r" in more else ():
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event has more than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def _lines(self) -> list[bytes]:
        """The lines that have an end: a line feed, a carriage return, or both."""
        lines = bytes(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(lines.pop())
        if lines and not self._begun:
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            self._begun = True
        return lines

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(line)


CONNECT_S = 10.0
FIRST_BYTE_S = 600.0
"""A peer may have a queue, and a long prompt to read."""
BETWEEN_BYTES_S = 120.0
"""The longest silence of a stream that has begun."""
END_S = 0.1
"""The wait behind the last event, for the end of the answer itself."""
ASK_S = 10.0
"""The limit for an answer in one piece that needs no generation."""
MAX_ANSWER_BYTES = 64 << 20
MAX_REFUSAL_BYTES = 1 << 20
IDLE_CONNECTIONS = 100


class PeerResponse(Struct, frozen=True):
    """An answer of the peer in one piece."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class PeerClient:
    def __init__(self, url: str, api_key: str) -> None:
        """Raises ConfigError for what is no address."""
        self.url = _address(url)
        headers = {"user-agent": f"weft/{__version__}", "accept-encoding": "identity"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=IDLE_CONNECTIONS),
        )

    @property
    def shown(self) -> str:
        """The address without a password that may be in it."""
        return str(self.url.copy_with(userinfo=b""))

    async def stream(self, path: str, body: Body) -> EventStream:
        """Ask, and return when the peer begins to answer. Raises Lost, and what a refusal stands for."""
        request = self._request(path, body)
        try:
            async with asyncio.timeout(FIRST_BYTE_S):
                response = await self._client.send(request, stream=True)
        except TimeoutError as error:
            raise RequestTimeout(f"The remote engine did not begin to answer in {FIRST_BYTE_S:g} s.") from error
        except httpx.HTTPError as error:
            raise _lost(error) from error
        try:
            if response.status_code != httpx.codes.OK:
                raise error_of(response.status_code, await _read(response, MAX_REFUSAL_BYTES), response.headers)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise EngineFault(f"The remote engine answers with {kind or 'nothing'!r:.100} and not with a stream.")
        except BaseException:
            await response.aclose()
            raise
        return EventStream(response)

    async def ask(self, path: str, body: Body | None = None, *, timeout_s: float = ASK_S) -> PeerResponse:
        """The answer in one piece, whatever its status. `path` begins with a slash for what stands outside of the
        interface. Raises Lost and RequestTimeout."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.send(self._request(path, body), stream=True)
                try:
                    content = await _read(response, MAX_ANSWER_BYTES)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise RequestTimeout(f"The remote engine did not answer in {timeout_s:g} s.") from error
        except httpx.HTTPError as error:
            raise _lost(error) from error
        return PeerResponse(response.status_code, content, response.headers)

    async def close(self) -> None:
        await self._client.aclose()

    def _request(self, path: str, body: Body | None) -> httpx.Request:
        if body is None:
            return self._client.build_request("GET", self._at(path))
        headers = {"content-type": "application/json"}
        return self._client.build_request("POST", self._at(path), content=_written(body), headers=headers)

    def _at(self, path: str) -> httpx.URL:
        base = self.url.path.rstrip("/")
        return self.url.copy_with(path=base.removesuffix("/v1") + path if path.startswith("/") else f"{base}/{path}")


class EventStream:
    """The events of one answer."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._bytes: AsyncIterator[bytes] = response.aiter_bytes()
        self._reader = EventReader()
        self._events: deque[bytes] = deque()

    async def next(self) -> bytes | None:
        """The data of the next one; None when the peer has closed the stream. Raises Lost."""
        while not self._events:
            try:
                async with asyncio.timeout(BETWEEN_BYTES_S):
                    more = await anext(self._bytes, None)
                if more is None:
                    return None
                self._events += self._reader.push(more)
            except TimeoutError as error:
                raise PeerLost(f"nothing came for {BETWEEN_BYTES_S:g} s") from error
            except EventTooLong as error:
                raise PeerLost(str(error)) from error
            except httpx.HTTPError as error:
                raise _lost(error) from error
        return self._events.popleft()

    async def finish(self) -> None:
        """Read the end of an answer that is complete: its connection can then carry another."""
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(END_S):
                await anext(self._bytes, None)

    async def aclose(self) -> None:
        """A peer whose answer was not read to the end ends its work."""
        await self._response.aclose()


async def _read(response: httpx.Response, limit: int) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > limit:
            raise PeerLost(f"an answer has more than {limit >> 20} MiB")
    return bytes(content)


def _lost(error: httpx.HTTPError) -> PeerLost:
    kind = PeerRefused if isinstance(error, httpx.ConnectError) else PeerLost
    return kind(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _written(body: Body) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text has half a character at position {error.start}: it is a lone surrogate.",
            hint="Send surrogates in pairs, or the character itself.",
        ) from error


def _address(text: str) -> httpx.URL:
    hint = "Set --engine-url, as in http://localhost:8001/v1."
    if not text:
        raise ConfigError("A remote engine needs an address.", hint=hint)
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{text!r} is not a URL: {error}.", hint=hint) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{text!r} is not the URL of a server.", hint=hint)
    return url if url.path.strip("/") else url.copy_with(path="/v1")
