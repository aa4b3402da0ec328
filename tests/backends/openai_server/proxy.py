"""A proxy before a real peer, which breaks a stream off at a known byte however fast the peer is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

_FIRST_TEXT = re.compile(rb'"text":\s*"[^"].*?\n\n', re.DOTALL)


@asynccontextmanager
async def cutting_proxy(url: str, kill: Callable[[], None] | None = None) -> AsyncIterator[str]:
    """Pass everything on; the first stream is cut behind its first event that has text.

    With `kill`, which ends the peer, the proxy ends there as well: every connection breaks, and no other is taken.
    """
    target = httpx.URL(url)
    has_cut = False
    serving: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()

    def cut(writer: asyncio.StreamWriter) -> None:
        nonlocal has_cut
        has_cut = True
        if kill is None:
            writer.transport.abort()
            return
        kill()
        server.close()
        for each in writers:
            each.transport.abort()

    async def answer(peer: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        seen = b""
        while data := await peer.read(1 << 16):
            before, seen = len(seen), seen + data
            found = _FIRST_TEXT.search(seen) if b"text/event-stream" in seen and not has_cut else None
            client.write(data if found is None else data[: max(0, found.end() - before)])
            if found is not None:
                # The transport has no buffer of its own above 0 bytes: what was written is with the kernel.
                await client.drain()
                cut(client)
                return
            await client.drain()

    async def ask(client: asyncio.StreamReader, peer: asyncio.StreamWriter) -> None:
        while data := await client.read(1 << 16):
            peer.write(data)
            await peer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        writer.transport.set_write_buffer_limits(0)
        writers.add(writer)
        peer_reader, peer_writer = await asyncio.open_connection(target.host, target.port)
        pumps = [asyncio.create_task(ask(reader, peer_writer)), asyncio.create_task(answer(peer_reader, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        writers.discard(writer)
        for each in (writer, peer_writer):
            each.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert has_cut
    finally:
        server.close()
        await asyncio.wait(serving)
