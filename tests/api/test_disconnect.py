"""A client that hangs up ends its request, whatever the request was doing."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.api.http import CHAT, COMPLETIONS, HELLO, real_server
from tests.api.raw import JSON, post_bytes
from tests.api.scripted_engine import ScriptedEngine, Step, answer, forever
from tests.waiting import PATIENCE, wait_until
from weft.api.app import build_app
from weft.config import load
from weft.types import Output

FIRST = Output(text="Hel", token_ids=[1])


def post_raw(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 80))
    connection.sendall(post_bytes(path, body))
    return connection


@pytest.mark.parametrize("script", [[forever], [FIRST, forever]], ids=["queued", "decoding"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [(CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (COMPLETIONS, {"prompt": ["a", "b"]})],
    ids=["chat", "two prompts"],
)
def test_a_hang_up_aborts(path: str, prompt: dict[str, Any], stream: bool, script: list[Step]) -> None:
    engine = ScriptedEngine(script)
    app = build_app(engine, load(env={}))
    with real_server(app) as url:
        connection = post_raw(url, path, {"model": "scripted", "stream": stream, **prompt})
        wait_until(lambda: bool(engine.open))
        if stream and script[0] is FIRST:
            assert connection.recv(100)
        connection.close()
        wait_until(lambda: not engine.open)


def test_a_hang_up_in_the_middle_of_a_body_leaves_nothing() -> None:
    engine = ScriptedEngine()
    with real_server(build_app(engine, load(env={}))) as url:
        address = urlsplit(url)
        connection = socket.create_connection((address.hostname or "", address.port or 80))
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: 100\r\n\r\n{" % (CHAT.encode(), JSON.encode())
        )
        connection.close()
    assert not engine.submitted


def test_a_connection_serves_many_requests() -> None:
    """The watch for a hang-up must leave the connection as it was."""
    engine = ScriptedEngine(answer("x"))
    with real_server(build_app(engine, load(env={}))) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        for stream in (False, True, False, True):
            assert client.post(CHAT, json=HELLO | {"stream": stream}).status_code == 200
    assert len(engine.submitted) == 4
