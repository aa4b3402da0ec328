"""Reading little-endian fields off untrusted bytes: every length is checked before anything is allocated."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NoReturn

import numpy as np

from weft.errors import ModelError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a mapped file, of which only the bytes up to `end` may be read."""

    def __init__(self, data: mmap.mmap, end: int, path: Path) -> None:
        self.data = data
        self.end = end
        self.path = path
        self.position = 0

    def fail(self, problem: str, *, hint: str = "") -> NoReturn:
        raise ModelError(f"{self.path}: {problem}", hint=hint)

    def take(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they begin."""
        start = self.position
        if size > self.end - start:
            self.fail(f"{what} needs {size} bytes at offset {start}, where {self.end - start} are left to read.")
        self.position = start + size
        return start

    def room_for(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count whose items cannot all be in the bytes that are left."""
        left = self.end - self.position
        if count * least_bytes > left:
            self.fail(f"{count} {what} cannot be in the {left} bytes that are left to read.")

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def string(self, what: str) -> str:
        size = self.u64(f"the length of {what}")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not UTF-8 text.")

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings, in one tight loop: vocabularies have 10^5 of them."""
        self.room_for(count, 8, f"strings of {what}")
        data, end, position = self.data, self.end, self.position
        length_at = _U64.unpack_from
        pieces: list[bytes] = []
        for _ in range(count):
            start = position + 8
            if start > end:
                self.fail(f"{what} ends after {len(pieces)} of {count} strings.")
            position = start + length_at(data, position)[0]
            if position > end:
                self.fail(
                    f"string {len(pieces)} of {what} needs {position - start} bytes at offset {start}, "
                    f"where {end - start} are left to read."
                )
            pieces.append(data[start:position])
        self.position = position
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError:
            self.fail(f"{what} holds a string that is not UTF-8 text.")

    def numbers(self, dtype: np.dtype[np.generic], count: int, what: str) -> list[int] | list[float]:
        self.room_for(count, dtype.itemsize, f"numbers of {what}")
        start = self.take(count * dtype.itemsize, what)
        values: list[int] | list[float] = np.frombuffer(self.data[start : self.position], dtype).tolist()
        return values
