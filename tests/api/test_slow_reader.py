"""A client that does not read costs the server little, costs others nothing, and is dropped in the end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest

from tests.api import raw
from tests.api.grpc.calls import ask, failed, served
from tests.api.http import COMPLETIONS, PROMPT, real_server
from tests.api.scripted_engine import ScriptedEngine, Step, answer
from tests.api.test_server import address_of, process
from tests.waiting import PATIENCE, until, wait_until
from weft.api import http_protocol
from weft.api.app import build_app
from weft.config import load
from weft.types import Output

CHUNKS = 2500
STREAM = PROMPT | {"stream": True}


def long_answer() -> Iterator[Step]:
    for number in range(CHUNKS):
        yield Output(text=f"[{number}]" + "x" * 8000, token_ids=[1])
    yield from answer("done")


def resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


class Timers:
    """The timers of a server's connections, which ring when the test lets time pass."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: dict[HandTimer, tuple[float, Callable[[], None]]] = {}

    def set(self, timer: HandTimer, seconds: float, call: Callable[[], None]) -> None:
        self._due[timer] = (self._now + seconds, call)

    def cancel(self, timer: HandTimer) -> None:
        self._due.pop(timer, None)

    def runs(self, timer: HandTimer) -> bool:
        return timer in self._due

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        for timer, (at, call) in [*self._due.items()]:
            if at <= self._now:
                called = threading.Event()
                timer.loop.call_soon_threadsafe(self._ring, timer, at, call, called)
                assert called.wait(PATIENCE)

    def _ring(self, timer: HandTimer, at: float, call: Callable[[], None], called: threading.Event) -> None:
        if self._due.get(timer) == (at, call):
            del self._due[timer]
            call()
        called.set()


class HandTimer(http_protocol.Timer):
    def __init__(self, timers: Timers, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.loop = loop
        self._timers = timers

    @property
    def runs(self) -> bool:
        return self._timers.runs(self)

    def set(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.set(self, seconds, call)

    def cancel(self) -> None:
        self._timers.cancel(self)


class Halting:
    """A connection to a server over an endless answer, whose reader reads only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
        self.timers = Timers()
        self.engine = ScriptedEngine(list(long_answer()))
        self.connections: list[http_protocol.HttpProtocol] = []
        self._config = load({"slow_reader_timeout_s": patience_s}, env={})
        made = http_protocol.HttpProtocol.connection_made

        def noted(connection: http_protocol.HttpProtocol, transport: asyncio.Transport) -> None:
            self.connections.append(connection)
            made(connection, transport)

        monkeypatch.setattr(http_protocol, "Timer", partial(HandTimer, self.timers))
        monkeypatch.setattr(http_protocol.HttpProtocol, "connection_made", noted)

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """The reader's end, when the server can write no more."""
        with (
            real_server(build_app(self.engine, self._config), self._config) as url,
            raw.connect(url, receive_buffer=1 << 16) as reader,
        ):
            reader.sendall(raw.post_bytes(COMPLETIONS, STREAM, "Connection: close\r\n"))
            wait_until(lambda: self.connections and self.is_halted, "a full connection")
            yield reader

    @property
    def is_halted(self) -> bool:
        return bool(self.connections[0].flow.write_paused)

    @property
    def unread_bytes(self) -> int:
        return self.connections[0]._unread_bytes()


def test_memory_stays_flat_others_are_served_and_nothing_is_lost() -> None:
    with process(chunks=CHUNKS, settings={"slow_reader_timeout_s": 3600}) as child:
        url = address_of(child)
        httpx.post(url + COMPLETIONS, json=STREAM, timeout=PATIENCE)
        before = resident_mb(child.pid)
        readers = [raw.connect(url, receive_buffer=1 << 16) for _ in range(8)]
        for reader in readers:
            reader.sendall(raw.post_bytes(COMPLETIONS, STREAM, "Connection: close\r\n"))
        for reader in readers:
            assert reader.recv(1, socket.MSG_PEEK), "its answer has begun"
        # Turn by turn with the others: theirs would be as far, were they not held up.
        assert httpx.post(url + COMPLETIONS, json=STREAM, timeout=PATIENCE).text.endswith("data: [DONE]\n\n")
        assert resident_mb(child.pid) - before < 30, "eight answers of 20 MB wait"
        received = raw.everything(readers[0])
        numbers = [int(number) for number in re.findall(rb"\[(\d+)\]", received)]
        assert numbers == list(range(CHUNKS))
        assert b"data: [DONE]" in received
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("stream", [True, False])
def test_who_reads_nothing_for_too_long_is_dropped(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(list(long_answer()))
    config = load({"slow_reader_timeout_s": 0.1}, env={})
    with real_server(build_app(engine, config), config) as url, raw.connect(url, receive_buffer=1 << 16) as reader:
        reader.sendall(raw.post_bytes(COMPLETIONS, STREAM | {"stream": stream}))
        wait_until(lambda: "read nothing for 0.1 s" in caplog.text, "the end of the server's patience")
        wait_until(lambda: not engine.open)
        received = raw.everything(reader)
        assert received and b"done" not in received, "what the kernel held is all that is left"


def test_who_reads_slowly_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little every 6 seconds."""
    halting = Halting(monkeypatch, patience_s=10)
    with halting.connected() as reader:
        received = 0
        for _ in range(10):
            before = halting.unread_bytes
            while halting.is_halted and halting.unread_bytes >= before:
                received += len(reader.recv(1 << 12))
            halting.timers.pass_time(6)
        assert halting.engine.open
        assert len(raw.everything(reader)) + received > CHUNKS * 8000


def test_who_catches_up_between_two_halts_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halts, each shorter than the patience and together longer."""
    halting = Halting(monkeypatch, patience_s=10)
    with halting.connected() as reader:
        received = 0
        for _ in range(2):
            wait_until(lambda: halting.is_halted, "a full connection")
            halting.timers.pass_time(6)
            read = 0
            while read < 6_000_000:
                read += len(reader.recv(1 << 20))
            received += read
        assert len(raw.everything(reader)) + received > CHUNKS * 8000


def test_0_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    halting = Halting(monkeypatch, patience_s=0)
    with halting.connected() as reader:
        halting.timers.pass_time(1_000_000)
        assert halting.engine.open
        assert len(raw.everything(reader)) > CHUNKS * 8000


def test_a_prediction_that_nobody_reads_is_dropped_alone() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(list(long_answer()))
        async with served(engine, slow_reader_timeout_s=0.5, grpc_buffer_size=1) as opened:
            unread = opened.predict([ask()])
            await until(lambda: bool(engine.open))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.server.port}") as other:
                engine.script = answer("x")
                method = other.stream_stream("/cy.llm.AiInference/StreamPredict")
                assert [one async for one in method([ask().SerializeToString()])]
            await until(lambda: not engine.open)
            received, code, details = await failed(unread)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "--slow-reader-timeout-s" in details
            assert [int(text.chunk[1:].partition("]")[0]) for text in received] == list(range(len(received)))

    asyncio.run(scenario())
