"""The short way over real sockets: every piece, in order, once, whoever else is slow or gone."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx
from starlette.types import Receive, Scope, Send

from tests.api.http import COMPLETIONS, PROMPT, real_server
from tests.api.scripted_engine import ScriptedEngine, Step, answer, next_turn
from tests.api.test_disconnect import post_raw
from tests.waiting import PATIENCE, wait_until
from weft.api.app import build_app
from weft.api.http_protocol import DirectWriter, WriteBatch, direct_writer
from weft.config import load
from weft.types import FinishReason, Output

Talk = Callable[[DirectWriter, Send], Awaitable[None]]


def talking(talk: Talk) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An application that begins its answer and leaves the rest to `talk`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        way = direct_writer(scope)
        assert way is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await talk(way, send)

    return app


async def end(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


def test_pieces_and_the_end_arrive_in_the_order_in_which_they_were_given() -> None:
    async def talk(way: DirectWriter, send: Send) -> None:
        for i in range(100):
            assert way.write(b"%d " % i)
            if i % 7 == 0:
                await asyncio.sleep(0)
        way.flush()
        await end(send, b"end")

    with real_server(talking(talk)) as url:  # type: ignore[arg-type]
        text = httpx.get(url, timeout=PATIENCE).text
    assert text.split() == [*map(str, range(100)), "end"]


def test_a_client_that_does_not_read_is_waited_for() -> None:
    taken = []

    async def talk(way: DirectWriter, send: Send) -> None:
        piece = b"x" * 10_000
        while way.write(piece):
            taken.append(len(piece))
            await asyncio.sleep(0)
        taken.append(0)
        await send({"type": "http.response.body", "body": b"y", "more_body": True})
        await end(send)

    with real_server(talking(talk)) as url, socket.socket() as client:  # type: ignore[arg-type]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(url)
        client.connect((address.hostname, address.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        wait_until(lambda: bool(taken) and taken[-1] == 0)
        assert sum(taken) < 20_000_000, "what is not read is not kept without bound"
        received = b""
        while data := client.recv(1 << 20):
            received += data
    assert received.count(b"x") == sum(taken) and received.count(b"y") == 1


class FakeTransport:
    """Refuses to be written to once it is closed, as uvloop's does."""

    def __init__(self, *, closed: bool) -> None:
        self.closed = closed
        self.written = b""

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.written += data


def test_a_lost_connection_does_not_keep_others_from_their_pieces() -> None:
    async def scenario() -> None:
        lost, kept = FakeTransport(closed=True), FakeTransport(closed=False)
        batch = WriteBatch()
        for transport in (lost, kept, lost, kept):
            batch.add(transport, b"piece")  # type: ignore[arg-type]
        assert kept.written == b""
        await asyncio.sleep(0)
        assert kept.written == b"a\r\npiecepiece\r\n"
        batch.add(kept, b"more")  # type: ignore[arg-type]
        batch.write()
        assert kept.written.endswith(b"4\r\nmore\r\n")

    asyncio.run(scenario())


def test_a_server_without_it_sends_every_piece_the_usual_way() -> None:
    assert direct_writer({"type": "http"}) is None


def stream_text(data: bytes) -> str:
    """The text before the stream's end; what came behind it would be lost."""
    data, done, _ = data.partition(b"data: [DONE]")
    assert done
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_a_reader_who_hangs_up_with_a_reset_leaves_the_others_whole() -> None:
    steps: list[Step] = []
    for _ in range(200):
        steps += [Output(text="ab", token_ids=[97, 98]), next_turn]
    engine = ScriptedEngine([*steps, *answer("z", finish=FinishReason.LENGTH)])
    with real_server(build_app(engine, load(env={}))) as url:
        body = PROMPT | {"stream": True}
        leaving = [post_raw(url, COMPLETIONS, body) for _ in range(5)]
        staying = post_raw(url, COMPLETIONS, body)
        for connection in leaving:
            connection.recv(100)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        received = b""
        while b"[DONE]" not in received:
            received += staying.recv(65536)
        staying.close()
        wait_until(lambda: not engine.open)
    assert stream_text(received) == "ab" * 200 + "z"


def test_several_prompts_of_one_stream_are_each_whole() -> None:
    engine = ScriptedEngine(answer(*"the quick brown fox", finish=FinishReason.LENGTH))
    with real_server(build_app(engine, load(env={}))) as url:
        text = httpx.post(
            url + COMPLETIONS, json=PROMPT | {"prompt": ["a", "b", "c"], "stream": True}, timeout=PATIENCE
        ).text
    *events, done = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    for event in events:
        [choice] = json.loads(event)["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(3), "the quick brown fox")
