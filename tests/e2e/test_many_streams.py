"""A thousand streams at once on one server: each is its solo run, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest

from tests.api.grpc import calls
from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import until

NUM_STREAMS = 1000
NUM_LEAVERS = 200
NUM_CONNECTIONS = 100
MAX_TOKENS = 5
QUESTIONS = [f"What does weaver {i} make of thread {i * i}?" for i in range(25)]


@contextmanager
def files_allowed(number: int) -> Iterator[None]:
    """To this process, and to those that it starts meanwhile until they ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[TinyServer]:
    """Allowed few files at first, as by a shell, and with a cache so small that all of it is soon in memory. It waits
    long for a stopped engine, and meanwhile tells its streams that they wait."""
    flags = ("--max-num-seqs", "256", "--kv-cache-memory-mb", "16", "--heartbeat-timeout-s", "120")
    with files_allowed(256):
        server = TinyServer(tiny_model, *flags, "--keep-alive-s", "0.5", is_fork=False)
    with server, files_allowed(2 * NUM_STREAMS):
        yield server
        server.check_unharmed()


def ask(number: int, max_tokens: int = MAX_TOKENS) -> dict[str, object]:
    """One of the questions, so that its solo run is known."""
    which = number % len(QUESTIONS)
    messages = [{"role": "user", "content": QUESTIONS[which]}]
    return {
        "model": NAME, "messages": messages, "seed": which, "max_tokens": max_tokens, "ignore_eos": True, "stream": True
    }  # fmt: skip


class Stream:
    """A stream on a connection of its own. Nothing between it and the socket: a thousand must fit one loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, server: TinyServer, body: dict[str, object]) -> Stream:
        """Returns when the server has begun to answer."""
        to = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(to.hostname, to.port)
        content = json.dumps(body).encode()
        about = f"Host: {to.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{about}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer + await reader.read(2000)
        return cls(reader, writer)

    async def text(self) -> str:
        """The whole text; the stream must end as it should."""
        chunked = await self._reader.readuntil(b"\r\n0\r\n\r\n")
        self._writer.close()
        await self._writer.wait_closed()
        *events, done, nothing = without_chunks(chunked).decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event[0] != ":"]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    async def begin(self) -> None:
        """Returns when there is some text."""
        for _ in range(3):
            await self._reader.readuntil(b"data: ")

    def hang_up(self) -> None:
        self._writer.transport.abort()


async def solo_runs(server: TinyServer) -> list[str]:
    return [await whole(server, number) for number in range(len(QUESTIONS))]


def without_chunks(body: bytes) -> bytes:
    pieces = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(pieces)


async def whole(server: TinyServer, number: int) -> str:
    stream = await Stream.open(server, ask(number))
    return await stream.text()


async def wave(server: TinyServer, solo: list[str], num_streams: int = NUM_STREAMS) -> None:
    """The engine waits until all the streams are open, so that they are so at the same time."""
    with server.engine_stopped():
        streams = await asyncio.gather(*(Stream.open(server, ask(number)) for number in range(num_streams)))
        assert server.num_files() > num_streams
    texts = await asyncio.gather(*(stream.text() for stream in streams))
    assert texts == [solo[number % len(solo)] for number in range(num_streams)]


def test_a_thousand_streams_are_each_their_solo_run_and_leave_no_memory_behind(server: TinyServer) -> None:
    async def scenario() -> None:
        solo = await solo_runs(server)
        files_before = server.num_files()
        await wave(server, solo)
        server.check_unharmed()
        after_one = server.memory_mb()
        await wave(server, solo, NUM_STREAMS // 2)
        server.check_unharmed()
        after_two = server.memory_mb()
        for process, megabytes in after_two.items():
            assert megabytes < 1.05 * after_one[process], f"{process}: {after_one} MB, then {after_two} MB"
        assert server.num_files() < files_before + 10

    asyncio.run(scenario())


def test_two_hundred_that_hang_up_are_not_missed(server: TinyServer) -> None:
    async def leave(number: int) -> None:
        stream = await Stream.open(server, ask(number, max_tokens=400))
        if number % 2:
            await stream.begin()
        stream.hang_up()

    async def scenario() -> None:
        solo = await solo_runs(server)
        files_before = server.num_files()
        leaving = [leave(number) for number in range(NUM_LEAVERS)]
        staying = [whole(server, number) for number in range(len(solo))]
        _, texts = await asyncio.gather(asyncio.gather(*leaving), asyncio.gather(*staying))
        assert texts == solo
        server.check_unharmed()
        assert server.num_files() < files_before + 10

    before = server.metric("weft_generation_tokens_total")
    asyncio.run(scenario())
    assert server.metric("weft_generation_tokens_total") - before < NUM_LEAVERS * 300, "it went on for those who left"


def test_a_hundred_grpc_connections_are_each_their_solo_run(server: TinyServer) -> None:
    """Each prediction has a connection of its own, and the engine waits until all have asked."""
    address = f"127.0.0.1:{server.grpc_port()}"
    greedy = {"temperature": 0, "max_new_tokens": MAX_TOKENS}

    async def predicted(number: int) -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            asked = calls.ask(QUESTIONS[number % len(QUESTIONS)], str(number), generation=greedy)
            responses = await calls.answer_to(calls.Client(channel), asked)
        calls.check_whole(responses)
        assert responses[0].trace_id == str(number)
        return calls.text_of(responses)

    def num_waiting() -> float:
        return server.metric("weft_num_requests_waiting")

    async def scenario() -> None:
        solo = [await predicted(number) for number in range(len(QUESTIONS))]
        with server.engine_stopped():
            predictions = [asyncio.create_task(predicted(number)) for number in range(NUM_CONNECTIONS)]
            await until(lambda: num_waiting() == NUM_CONNECTIONS, "a hundred requests")
        assert await asyncio.gather(*predictions) == solo * (NUM_CONNECTIONS // len(solo))
        server.check_unharmed()

    asyncio.run(scenario())
