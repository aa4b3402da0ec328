"""Server-sent events: a stream's chunks, whose constant part is encoded once."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from weft.errors import WeftError
from weft.frontend.errors import error_body

DONE = b"data: [DONE]\n\n"

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChunkHead(Struct, frozen=True, kw_only=True):
    """What every chunk of one stream repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChunkFrame:
    """Puts the choices of one stream's chunks between bytes that were encoded when the stream began."""

    def __init__(self, head: ChunkHead, *, include_usage: bool) -> None:
        self.before = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self.after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def usage_chunk(self, usage: Struct) -> bytes:
        return self.before + b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n"


def error_event(error: WeftError) -> bytes:
    """What ends a stream that has begun and cannot go on."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE
