"""What goes to a process with vLLM in it: the messages of every engine process."""

from __future__ import annotations

import asyncio

import msgspec

from weft.engine.wire import Abort, ResetCache, Shutdown, StartProfile, StopProfile, Submit

ToVllm = Submit | Abort | Shutdown | ResetCache | StartProfile | StopProfile

_decoder: msgspec.msgpack.Decoder[ToVllm] = msgspec.msgpack.Decoder(ToVllm)
_HEAD_BYTES = 4


async def read(reader: asyncio.StreamReader) -> ToVllm | None:
    """The next message; None when the api process is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_HEAD_BYTES), "little")
        return _decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
