"""Content-Encoding: bodies of requests that come compressed, and answers that are sent so."""

from __future__ import annotations

import importlib.util
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Protocol

from weft.api.error_responses import WrongEncoding
from weft.errors import InvalidRequest

GZIP, DEFLATE, ZSTD = "gzip", "deflate", "zstd"
HAS_ZSTD = importlib.util.find_spec("zstandard") is not None

PIECE_BYTES = 1 << 20
"""The most that is read of a compressed body at once, and the most that it gives at once."""

MAX_WINDOW_BYTES = 8 << 20
"""The memory that a body in zstd may have for what it repeats; RFC 9659 lets no client ask for more."""

_GZIP_FORMAT, _ZLIB_FORMAT, _BARE_FORMAT = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


def encoding_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return how a request's body is compressed; empty: not at all. Raises WrongEncoding for what cannot be read."""
    named = b", ".join(value for name, value in headers if name == b"content-encoding").decode("latin-1")
    encoding = named.strip().lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return ""
    if encoding in (GZIP, DEFLATE) or (encoding == ZSTD and HAS_ZSTD):
        return encoding
    if encoding == ZSTD:
        hint = "The operator can add zstd with `pip install zstandard`."
    else:
        hint = "Send it with one of these, once, or without the header."
    known = [GZIP, DEFLATE, ZSTD] if HAS_ZSTD else [GZIP, DEFLATE]
    raise WrongEncoding(
        f"The body's Content-Encoding is {named!r:.100}; this server reads {', '.join(known)}.",
        hint=hint,
        accepted=", ".join(known),
    )


def decompressed(encoding: str, body: bytes) -> Iterator[bytes]:
    """Yield what a body holds in pieces of PIECE_BYTES at most: how much it is in all is not known before. Each takes
    a while. Raises InvalidRequest for a body that is damaged."""
    if encoding == ZSTD:
        return _from_zstd(body)
    if encoding == GZIP:
        return _from_zlib(body, GZIP, _GZIP_FORMAT)
    # Some clients leave out the header of zlib's format, which is a multiple of 31.
    has_header = len(body) >= 2 and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0
    return _from_zlib(body, DEFLATE, _ZLIB_FORMAT if has_header else _BARE_FORMAT)


def _from_zlib(body: bytes, encoding: str, form: int) -> Iterator[bytes]:
    inflater = zlib.decompressobj(form)
    try:
        for at in range(0, len(body), PIECE_BYTES):
            rest, piece = body[at : at + PIECE_BYTES], b""
            # Behind a full piece there may be more, though all the input was taken.
            while rest or (len(piece) == PIECE_BYTES and not inflater.eof):
                if inflater.eof:
                    raise InvalidRequest(f"The body is not valid {encoding}: there is more behind its end.")
                yield (piece := inflater.decompress(rest, PIECE_BYTES))
                rest = inflater.unconsumed_tail or inflater.unused_data
    except zlib.error as error:
        raise InvalidRequest(f"The body is not valid {encoding}: {error}.") from error
    if not inflater.eof:
        raise _truncated(encoding)


def _from_zstd(body: bytes) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with decompressor.stream_reader(body, read_across_frames=True) as reader:
        try:
            while piece := reader.read(PIECE_BYTES):
                yield piece
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"The body is not valid {ZSTD}: {error}.") from error
    if not _has_its_end(body):
        raise _truncated(ZSTD)


MAX_ZSTD_PARTS = 1 << 16
"""Frames and blocks of one body, a block of up to 128 KiB."""
MAX_FRAME_HEADER_BYTES = 18
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_RLE_BLOCK = 1


def _has_its_end(body: bytes) -> bool:
    """Return whether the last frame of a body in zstd is whole (RFC 8878): the decompressor does not tell."""
    import zstandard

    at, is_in_frame, checksum_bytes = 0, False, 0
    for _ in range(MAX_ZSTD_PARTS):
        if at >= len(body):
            return at == len(body) and not is_in_frame
        if is_in_frame:
            block = int.from_bytes(body[at : at + 3], "little")
            at += 3 + (1 if block >> 1 & 3 == _RLE_BLOCK else block >> 3)
            if block & 1:
                is_in_frame, at = False, at + checksum_bytes
        elif int.from_bytes(body[at : at + 4], "little") in _SKIPPABLE_MAGIC:
            at += 8 + int.from_bytes(body[at + 4 : at + 8], "little")
        else:
            header = body[at : at + MAX_FRAME_HEADER_BYTES]
            try:
                checksum_bytes = 4 if zstandard.get_frame_parameters(header).has_checksum else 0
            except zstandard.ZstdError:
                return False
            is_in_frame, at = True, at + zstandard.frame_header_size(header)
    raise InvalidRequest(f"The body is not valid {ZSTD}: it has more than {MAX_ZSTD_PARTS} frames and blocks.")


def _truncated(encoding: str) -> InvalidRequest:
    return InvalidRequest(f"The compressed body is truncated: the end of its {encoding} is missing.")


GZIP_LEVEL = 1
"""The fastest: higher ones take several times as long, and make JSON a tenth smaller at most."""

_ACCEPTED = re.compile(r"([\w*-]+)(?:\s*;\s*q=([01](?:\.\d{0,3})?))?")
_ACCEPT_CHARS = 256
"""More of an Accept-Encoding is not read."""


class Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


@lru_cache(64)
def answer_encoding(accept: bytes) -> str:
    """Return how an answer is compressed for a client that accepts these; empty: not at all."""
    weights = _weights(accept)
    gzip = weights.get(GZIP, weights.get("*", 0.0))
    zstd = weights.get(ZSTD, 0.0) if HAS_ZSTD else 0.0
    if not gzip and not zstd:
        return ""
    return ZSTD if zstd >= gzip else GZIP


def accepts_gzip(accept: bytes) -> bool:
    weights = _weights(accept)
    return weights.get(GZIP, weights.get("*", 0.0)) > 0


def _weights(accept: bytes) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in accept[:_ACCEPT_CHARS].decode("latin-1").lower().split(","):
        if found := _ACCEPTED.fullmatch(item.strip()):
            weights[found[1]] = float(found[2] or 1)
    return weights


def open_compressor(encoding: str) -> Compressor:
    if encoding == ZSTD:
        import zstandard

        return zstandard.ZstdCompressor().compressobj()
    return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)


def compress(compressor: Compressor, body: bytes, is_last: bool) -> bytes:
    piece = compressor.compress(body)
    return piece + compressor.flush() if is_last else piece
