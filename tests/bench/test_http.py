"""What the benchmark's client reads does not depend on how the bytes are split."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import PATIENCE
from weft.bench.http import Address, Connection, OnBody
from weft.errors import ConfigError

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\ndata: \r\n5;name=value\r\nhello\r\nC\r\n\r\n0\r\n\r\nworld\r\n0\r\n\r\n"
)
CHUNKED_BODY = b"data: hello\r\n0\r\n\r\nworld"
WITH_TRAILER = CHUNKED[:-2] + b"X-Sum: 1\r\n\r\n"
WITH_LENGTH = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nthere"
UP_TO_THE_END = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it"


class Served:
    """A server that answers every request with the same bytes, in pieces, and may hang up behind them."""

    def __init__(self, pieces: list[bytes], *, hang_up: bool = False) -> None:
        self.pieces = pieces
        self.hang_up = hang_up
        self.connections = 0
        self.left = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if self.hang_up:
                break
        writer.close()
        self.left.set()


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[Callable[[OnBody], Awaitable[int]]]:
    async with asyncio.timeout(PATIENCE), await asyncio.start_server(served, "127.0.0.1", 0) as server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        connection = await Connection.open(address)
        try:
            yield lambda on_body: connection.ask(address.request("GET", "/x"), on_body)
        finally:
            connection.close()
            await served.left.wait()


def answers_of(served: Served, times: int = 1) -> list[tuple[int, bytes]]:
    async def scenario() -> list[tuple[int, bytes]]:
        answers = []
        async with connected(served) as ask:
            for _ in range(times):
                body = bytearray()
                answers.append((await ask(body.extend), bytes(body)))
        return answers

    return asyncio.run(scenario())


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(min_value=1, max_value=len(WITH_TRAILER)), max_size=6))
@pytest.mark.parametrize(
    ("data", "expected"),
    [(CHUNKED, (200, CHUNKED_BODY)), (WITH_TRAILER, (200, CHUNKED_BODY)), (WITH_LENGTH, (404, b"there"))],
)
def test_an_answer_is_read_however_it_is_cut_and_the_next_one_too(
    data: bytes, expected: tuple[int, bytes], cuts: list[int]
) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    served = Served([data[a:b] for a, b in itertools.pairwise(bounds)])
    assert answers_of(served, times=2) == [expected, expected]
    assert served.connections == 1


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    assert answers_of(Served([UP_TO_THE_END], hang_up=True)) == [(200, b"all of it")]


@pytest.mark.parametrize("data", [b"", CHUNKED[:-5], WITH_LENGTH[:-1], b"HTTP/1.1 200"])
def test_a_hang_up_in_the_middle_is_an_error(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        answers_of(Served([data], hang_up=True))


def test_what_is_no_http_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not speak"):
        answers_of(Served([b"hello\r\n\r\n"]))


def test_an_error_in_reading_the_body_reaches_the_one_who_asked() -> None:
    def refuse(data: bytes) -> None:
        raise ArithmeticError(data)

    async def scenario() -> None:
        async with connected(Served([WITH_LENGTH])) as ask:
            with pytest.raises(ArithmeticError, match="there"):
                await ask(refuse)
            with pytest.raises(ConnectionError):
                await ask(refuse)

    asyncio.run(scenario())


def test_addresses() -> None:
    assert Address.parse("http://host:81/v1/") == Address("host", 81)
    assert Address.parse("host:82") == Address("host", 82)
    assert Address.parse("https://host/gate/v1", "k") == Address("host", 443, True, "/gate", "k")
    assert b"POST /gate/v1/x HTTP/1.1\r\n" in Address("h", 1, prefix="/gate").request("POST", "/v1/x", b"{}")
    assert b"Authorization: Bearer k\r\n" in Address("h", 1, key="k").request("GET", "/")
    with pytest.raises(ConfigError, match="not the URL"):
        Address.parse("ftp://host")
