"""A reader of PNG files, made from the format's description and not from the writer."""

from __future__ import annotations

import struct
import zlib


def pixels_of(file: bytes) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes; every sum is checked."""
    assert file[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10])
    chunks: list[tuple[bytes, bytes]] = []
    place = 8
    while place < len(file):
        (length,) = struct.unpack(">I", file[place : place + 4])
        kind, data = file[place + 4 : place + 8], file[place + 8 : place + 8 + length]
        (crc,) = struct.unpack(">I", file[place + 8 + length : place + 12 + length])
        assert crc == zlib.crc32(kind + data)
        chunks.append((kind, data))
        place += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, bits, colour, compression, filtering, interlace = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (bits, colour, compression, filtering, interlace) == (8, 2, 0, 0, 0)
    rows = zlib.decompress(chunks[1][1])
    assert len(rows) == height * (1 + 3 * width)
    lines = [rows[start : start + 1 + 3 * width] for start in range(0, len(rows), 1 + 3 * width)]
    assert all(line[0] == 0 for line in lines)
    return width, height, b"".join(line[1:] for line in lines)
