"""A client that does not read costs the server little, costs others nothing, and is dropped in the end."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tests.api import raw
from tests.api.grpc.calls import ask, door, eventually, failed
from tests.api.http import COMPLETIONS, PROMPT, real_server, wait_until
from tests.api.scripted_engine import ScriptedEngine, Step, answer
from tests.api.test_server import address_of, process
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


def test_memory_stays_flat_others_are_served_and_nothing_is_lost() -> None:
    with process(chunks=CHUNKS) as child:
        url = address_of(child)
        httpx.post(url + COMPLETIONS, json=STREAM)
        before = resident_mb(child.pid)
        readers = [raw.connect(url, receive_buffer=1 << 16) for _ in range(8)]
        for reader in readers:
            reader.sendall(raw.post_bytes(COMPLETIONS, STREAM, "Connection: close\r\n"))
        time.sleep(0.5)
        began = time.monotonic()
        assert httpx.post(url + COMPLETIONS, json=STREAM).text.endswith("data: [DONE]\n\n")
        assert time.monotonic() - began < 20
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
    config = load({"slow_reader_timeout_s": 0.5}, env={})
    with real_server(build_app(engine, config), config) as url, raw.connect(url, receive_buffer=1 << 16) as reader:
        reader.sendall(raw.post_bytes(COMPLETIONS, STREAM | {"stream": stream}))
        wait_until(lambda: "read nothing for 0.5 s" in caplog.text, 30)
        wait_until(lambda: not engine.open)
        received = raw.everything(reader)
        assert received and b"done" not in received, "what the kernel held is all that is left"


def test_who_reads_slowly_is_not_dropped() -> None:
    engine = ScriptedEngine(list(long_answer()))
    config = load({"slow_reader_timeout_s": 1.5}, env={})
    with real_server(build_app(engine, config), config) as url, raw.connect(url, receive_buffer=1 << 16) as reader:
        reader.sendall(raw.post_bytes(COMPLETIONS, STREAM, "Connection: close\r\n"))
        received = 0
        for _ in range(10):
            time.sleep(0.2)
            received += len(reader.recv(1 << 16))
        assert engine.open
        assert len(raw.everything(reader)) + received > CHUNKS * 8000


def test_who_catches_up_between_two_halts_is_not_dropped() -> None:
    """Two halts, each shorter than the patience and together longer."""
    engine = ScriptedEngine(list(long_answer()))
    config = load({"slow_reader_timeout_s": 2}, env={})
    with real_server(build_app(engine, config), config) as url, raw.connect(url, receive_buffer=1 << 16) as reader:
        reader.sendall(raw.post_bytes(COMPLETIONS, STREAM, "Connection: close\r\n"))
        received = 0
        for _ in range(2):
            time.sleep(1.2)
            read = 0
            while read < 6_000_000:
                read += len(reader.recv(1 << 20))
            received += read
        assert len(raw.everything(reader)) + received > CHUNKS * 8000


def test_0_waits_for_ever() -> None:
    engine = ScriptedEngine(list(long_answer()))
    config = load({"slow_reader_timeout_s": 0}, env={})
    with real_server(build_app(engine, config), config) as url, raw.connect(url, receive_buffer=1 << 16) as reader:
        reader.sendall(raw.post_bytes(COMPLETIONS, STREAM))
        time.sleep(1)
        assert engine.open


def test_a_prediction_that_nobody_reads_is_dropped_alone() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(list(long_answer()))
        async with door(engine, slow_reader_timeout_s=0.5, grpc_buffer_size=1) as opened:
            unread = opened.predict([ask()])
            await eventually(lambda: bool(engine.open))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.server.port}") as other:
                engine.script = answer("x")
                method = other.stream_stream("/cy.llm.AiInference/StreamPredict")
                assert [one async for one in method([ask().SerializeToString()])]
            await eventually(lambda: not engine.open, 20)
            received, code, details = await failed(unread)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "--slow-reader-timeout-s" in details
            assert [int(text.chunk[1:].partition("]")[0]) for text in received] == list(range(len(received)))

    asyncio.run(scenario())
