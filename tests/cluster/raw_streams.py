"""Streamed completions read as bytes: a client that costs little beside the servers that it measures."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

from msgspec import Struct

from tests.waiting import PATIENCE

END = b"\r\n0\r\n\r\n"


class StreamedAnswer(Struct):
    """The bytes of a streamed answer, and when they came."""

    body: bytes
    first_s: float
    """Seconds until its first event."""

    def events(self) -> list[dict[str, Any]]:
        """Return the events. Raises AssertionError for an answer that is none."""
        head, _, chunks = self.body.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), self.body
        # A chunk holds whole events here, and no event holds a line break.
        lines = [line for line in chunks.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    def text(self) -> str:
        """Return the text of a completion that has no error."""
        events = self.events()
        assert not any("error" in event for event in events), events
        return "".join(choice["text"] for event in events for choice in event["choices"])

    @property
    def num_tokens(self) -> int:
        return int(self.events()[-1]["usage"]["completion_tokens"])


class StreamClient(asyncio.Protocol):
    """One connection to a server, which is kept from one request to the next."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._began = self._first_s = 0.0
        self._done: asyncio.Future[StreamedAnswer] | None = None
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._first_s and b"data: {" in self._received:
            self._first_s = time.perf_counter() - self._began
        if data.endswith(END[-5:]) and self._received.endswith(END):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(StreamedAnswer(bytes(self._received), self._first_s))

    async def ask(self, body: dict[str, Any]) -> StreamedAnswer:
        """Send a request for a streamed completion, and read it to its end."""
        content = json.dumps(body).encode()
        self._received.clear()
        self._done, self._first_s = asyncio.get_running_loop().create_future(), 0.0
        self._began = time.perf_counter()
        head = (
            "POST /v1/completions HTTP/1.1",
            "host: localhost",
            "content-type: application/json",
            f"content-length: {len(content)}",
        )
        self._transport.write("\r\n".join((*head, "", "")).encode() + content)
        async with asyncio.timeout(PATIENCE):
            return await self._done

    def close(self) -> None:
        self._transport.close()


async def connect_stream(url: str) -> StreamClient:
    host, _, port = url.removeprefix("http://").partition(":")
    _, client = await asyncio.get_running_loop().create_connection(StreamClient, host, int(port))
    return client


def completion(model: str, prompt: str, num_tokens: int) -> dict[str, Any]:
    """Return the body of a request for a streamed completion of so many tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
