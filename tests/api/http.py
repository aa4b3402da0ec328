"""Ways to reach an application: in process for shapes, over a real socket for what only a socket does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from tests.api.scripted_engine import ScriptedEngine
from tests.waiting import wait_until
from weft.api.app import admission_app, build_app
from weft.api.background import BackgroundWork
from weft.api.http_protocol import protocol_factory
from weft.api.server import HttpServer
from weft.config import load
from weft.options import Config
from weft.serving.admission import Admission

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "scripted", "prompt": "hi"}

Run = Callable[[Coroutine[Any, Any, httpx.Response]], httpx.Response]
"""asyncio.run, or virtual_time.run for what takes time."""


def request(
    engine: ScriptedEngine,
    method: str,
    path: str,
    config: Config | None = None,
    *,
    run: Run = asyncio.run,
    **options: Any,
) -> httpx.Response:
    """One request to a fresh application over this engine."""
    return request_app(build_app(engine, config or load(env={})), method, path, run=run, **options)


def request_app(app: FastAPI, method: str, path: str, *, run: Run = asyncio.run, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return run(go())


def post(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> httpx.Response:
    return request(engine, "POST", path, json=body)


def chat(engine: ScriptedEngine, **fields: Any) -> httpx.Response:
    return post(engine, CHAT, HELLO | fields)


def complete(engine: ScriptedEngine, **fields: Any) -> httpx.Response:
    return post(engine, COMPLETIONS, PROMPT | fields)


def events(response: httpx.Response) -> list[Any]:
    """The chunks of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, empty = response.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which must have OpenAI's shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@contextlib.contextmanager
def data_server(engine: ScriptedEngine, config: Config) -> Iterator[str]:
    """A server with a folder for files and batches, which another may have when this one has ended."""
    admission = Admission(config)
    admission.open(engine)
    background = BackgroundWork(admission)
    with real_server(admission_app(admission, background), config) as url:
        yield url
    background.data.close()


@contextlib.contextmanager
def real_server(app: FastAPI, config: Config | None = None) -> Iterator[str]:
    http = protocol_factory(config or load(env={}))
    options = uvicorn.Config(app, http=http, port=0, log_config=None, lifespan="off", ws="none")
    server = HttpServer(options)
    loops: list[asyncio.AbstractEventLoop] = []

    def serve() -> None:
        with asyncio.Runner(loop_factory=options.get_loop_factory()) as runner:
            loops.append(runner.get_loop())
            runner.run(server.serve())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server's start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        loops[0].call_soon_threadsafe(server.end)
        thread.join()
