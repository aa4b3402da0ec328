"""A peer that plays a script: what no real server does on demand, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

from tests.generation import sample
from weft.backends.contract import Engine, Prompt
from weft.backends.openai_server.remote_engine import RemoteEngine
from weft.backends.openai_server.start import start
from weft.config import load
from weft.types import Output, SamplingParams

DONE = b"data: [DONE]\n\n"


class Asked(Struct, frozen=True):
    """A request that came."""

    path: str
    headers: Mapping[str, str]
    body: Any


class Reply:
    """The answer to one request, which ends the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # `write` returns when everything is with the kernel: `cut` loses none of it.
        writer.transport.set_write_buffer_limits(0)

    async def head(self, status: int = 200, content_type: str = "text/event-stream", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Fine", f"content-type: {content_type}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.write("\r\n".join([*lines, "", ""]).encode())

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def json(self, value: Any, status: int = 200, **headers: str) -> None:
        await self.head(status, "application/json", **headers)
        await self.write(json.dumps(value).encode())

    async def events(self, *chunks: Any) -> None:
        """A whole stream of these chunks, but for its end."""
        await self.head()
        for chunk in chunks:
            await self.event(chunk)

    async def event(self, chunk: Any) -> None:
        await self.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")

    async def gone(self) -> None:
        """Returns when the client has hung up."""
        while await self._reader.read(1024):
            pass

    def cut(self) -> None:
        """Break the connection off, without a good end."""
        self._writer.transport.abort()


Handler = Callable[[Reply, Asked], Awaitable[None]]


class ScriptedPeer:
    """A server on a free port. What it was asked is in `asked`; how it answers is in `answers`, by path."""

    def __init__(self, owner: str = "vllm", max_model_len: int | None = 1000) -> None:
        self.asked: list[Asked] = []
        self.answers: dict[str, Handler] = {"/v1/models": self._models, "/health": self._health}
        self.num_open = 0
        self.is_well = True
        self._card: dict[str, Any] = {"id": "model", "object": "model", "owned_by": owner}
        if max_model_len is not None:
            self._card["max_model_len"] = max_model_len
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ScriptedPeer:
        await self.open(0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def open(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Take no more connections. Those that are open go on."""
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def generations(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.path.endswith("completions")]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            asked = Asked(lines[0].split(" ")[1], headers, json.loads(content) if content else None)
            self.asked.append(asked)
            await self.answers.get(asked.path, self._nothing)(Reply(reader, writer), asked)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def _models(self, reply: Reply, asked: Asked) -> None:
        await reply.json({"object": "list", "data": [self._card]})

    async def _health(self, reply: Reply, asked: Asked) -> None:
        await reply.json({}, 200 if self.is_well else 503)

    async def _nothing(self, reply: Reply, asked: Asked) -> None:
        await reply.json({"error": {"message": "there is nothing", "code": 404}}, 404)


@asynccontextmanager
async def connected(peer: ScriptedPeer, **settings: Any) -> AsyncIterator[RemoteEngine]:
    """The engine of this peer."""
    config = load({"engine": "remote", "engine_url": peer.url, **settings}, env={})
    engine = await start(config)
    assert isinstance(engine, RemoteEngine)
    try:
        yield engine
    finally:
        await engine.close()


async def all_of(engine: Engine, prompt: Prompt, params: SamplingParams) -> list[Output]:
    return [delta async for delta in await engine.submit(sample(prompt, params))]


def text_chunk(text: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, **fields}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "model", "choices": [choice]}


def token_chunk(*token_ids: int, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return text_chunk("?", finish, token_ids=list(token_ids), **fields)


def chat_chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "model", "choices": [choice]}


def usage_chunk(
    prompt: int, completion: int, cached: int = 0, accepted: int = 0, rejected: int | None = None
) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }
    return {"id": "1", "object": "text_completion", "created": 1, "model": "model", "choices": [], "usage": usage}
