"""Server-sent events: a stream's chunks, whose constant part is encoded once."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from weft.api.error_responses import error_body
from weft.errors import WeftError

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""A comment: clients read over it."""

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

    def after_with(self, fields: dict[str, object]) -> bytes:
        """What ends a chunk that has these fields besides its choices."""
        return b"]," + msgspec.json.encode(fields)[1:] + b"\n\n" if fields else self.after


def named_event(name: str, body: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: WeftError) -> bytes:
    """What ends a stream that has begun and cannot go on."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE
