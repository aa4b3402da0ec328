"""Messages from one process to several through shared memory: each is written once for all readers.

The memory is a ring of slots behind a counter. A reader sleeps in the kernel (a futex) until the counter has passed
what it has read, and counts what it has read in a cell of its own, which the writer waits for before it uses a slot
again. A message that is larger than a slot has memory of its own. The memory has no name, and is gone with the
processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from weft.errors import ConfigError

SLOT_BYTES = 1 << 20
NUM_SLOTS = 4
CELL_BYTES = 64
"""A counter has a cache line to itself."""
MAX_READERS = 63
_SLOT = struct.Struct("<IIIi")
"""The head of a slot: the message's number, its length, its checksum, and the file that it is in; -1: it is here."""
FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 0, 1
LOOK_SECONDS = 0.2
"""So often a process that waits looks whether it should go on waiting."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Counters:
    """Counters in shared memory that processes may wait for."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._cells = [ctypes.c_uint32.from_buffer(memory, CELL_BYTES * number) for number in range(MAX_READERS + 1)]
        self._call = FUTEX_CALL.get(platform.machine(), 0)
        self._libc = ctypes.CDLL(None)
        if not self._call:
            raise ConfigError(
                f"--tensor-parallel-size needs Linux on x86-64 or Arm, not {platform.machine()}.",
                hint="Leave it out.",
            )

    def read(self, number: int) -> int:
        return int(self._cells[number].value)

    def set(self, number: int, value: int) -> None:
        """Set a counter, and wake those that wait for it."""
        self._cells[number].value = value
        self._libc.syscall(self._call, ctypes.byref(self._cells[number]), FUTEX_WAKE, 2**31 - 1, None, None, 0)

    def wait(self, number: int, seen: int, seconds: float = LOOK_SECONDS) -> None:
        """Wait until a counter is no longer what was seen, or so long."""
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        cell = ctypes.byref(self._cells[number])
        self._libc.syscall(self._call, cell, FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)


def _ring(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, CELL_BYTES * (MAX_READERS + 1) + NUM_SLOTS * (_SLOT.size + SLOT_BYTES))


def _slot_at(number: int) -> int:
    return CELL_BYTES * (MAX_READERS + 1) + number % NUM_SLOTS * (_SLOT.size + SLOT_BYTES)


class PlanWriter:
    def __init__(self, num_readers: int) -> None:
        if num_readers > MAX_READERS:
            raise ConfigError(f"--tensor-parallel-size cannot be above {MAX_READERS + 1}.")
        self._num_readers = num_readers
        self._fd = os.memfd_create("weft-plans")
        os.ftruncate(self._fd, CELL_BYTES * (MAX_READERS + 1) + NUM_SLOTS * (_SLOT.size + SLOT_BYTES))
        self._memory = _ring(self._fd)
        self._counters = Counters(self._memory)
        self._number = 0
        self._files: dict[int, int] = {}
        """The files of large messages by their numbers."""

    @property
    def path(self) -> str:
        """The file that readers open. Only processes of the same user can."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, message: bytes, is_open: Callable[[], bool]) -> None:
        """Write a message, once every reader has read what was in its slot. Gives up when `is_open` says no."""
        number = self._number + 1
        for reader in range(1, self._num_readers + 1):
            while number - (seen := self._counters.read(reader)) > NUM_SLOTS:
                if not is_open():
                    return
                self._counters.wait(reader, seen)
        if (old := self._files.pop(number - NUM_SLOTS, None)) is not None:
            os.close(old)
        start, file = _slot_at(number), -1
        if len(message) > SLOT_BYTES:
            file = self._files[number] = os.memfd_create("weft-plan")
            with open(file, "wb", closefd=False) as out:
                out.write(message)
        else:
            self._memory[start + _SLOT.size : start + _SLOT.size + len(message)] = message
        _SLOT.pack_into(self._memory, start, number, len(message), zlib.crc32(message), file)
        self._number = number
        self._counters.set(0, number)


class PlanReader:
    def __init__(self, path: str, reader: int) -> None:
        """Read the messages of the writer whose file this is; readers are numbered from 1."""
        self._process = path.rpartition("/")[0]
        fd = os.open(path, os.O_RDWR)
        self._memory = _ring(fd)
        os.close(fd)
        self._counters = Counters(self._memory)
        self._reader = reader

    def read(self, is_open: Callable[[], bool]) -> bytes | None:
        """Wait for the next message; None when `is_open` says no."""
        done = self._counters.read(self._reader)
        while (seen := self._counters.read(0)) == done:
            if not is_open():
                return None
            self._counters.wait(0, seen)
        message = self._message(done + 1)
        # A processor may show the counter before what was written first.
        while message is None:
            time.sleep(0)
            message = self._message(done + 1)
        self._counters.set(self._reader, done + 1)
        return message

    def _message(self, number: int) -> bytes | None:
        start = _slot_at(number)
        found, length, checksum, file = _SLOT.unpack_from(self._memory, start)
        if found != number:
            return None
        if file >= 0:
            message = Path(self._process, str(file)).read_bytes()
        else:
            message = self._memory[start + _SLOT.size : start + _SLOT.size + length]
        return message if len(message) == length and zlib.crc32(message) == checksum else None
