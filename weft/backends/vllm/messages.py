"""What goes to a process with vLLM in it: the messages of every engine process, and with a request its adapter."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct

from weft.engine.wire import Abort, ResetCache, Shutdown, StartProfile, StopProfile
from weft.types import Request


class Adapter(Struct, frozen=True, kw_only=True):
    """A LoRA adapter: a directory as PEFT writes it."""

    name: str
    number: int
    """What vLLM knows it by, the same in every engine that is started again."""
    path: str


class AdaptedRequest(Request, frozen=True, kw_only=True):
    adapter: Adapter | None = None


class Submit(Struct, frozen=True, tag=True):
    """`weft.engine.wire.Submit`, read with the requests' adapters."""

    requests: list[AdaptedRequest]


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
