"""PNG, as far as a picture of RGB bytes needs it."""

from __future__ import annotations

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB_BYTES = 3

_BITS, _TRUECOLOUR, _DEFLATE, _ADAPTIVE, _NOT_INTERLACED = 8, 2, 0, 0, 0
_UNFILTERED = b"\0"


def png(width: int, height: int, rgb: bytes) -> bytes:
    """A file of rows of RGB bytes, the topmost first."""
    row_bytes = width * RGB_BYTES
    if width < 1 or height < 1 or len(rgb) != row_bytes * height:
        raise ValueError(f"{len(rgb)} bytes are no RGB image of {width}x{height}.")
    rows = memoryview(rgb)
    filtered = b"".join(
        part for start in range(0, len(rgb), row_bytes) for part in (_UNFILTERED, rows[start : start + row_bytes])
    )
    head = struct.pack(">IIBBBBB", width, height, _BITS, _TRUECOLOUR, _DEFLATE, _ADAPTIVE, _NOT_INTERLACED)
    return SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(filtered)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
