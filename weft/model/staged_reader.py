"""Reads tensors from files to a device through pinned memory, by several threads.

A GPU reads pinned memory ten times as fast as one thread reads a file: 54 GB/s and 5 on an H200's machine.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 4 << 20
MAX_THREADS = 16


class _Buffer(NamedTuple):
    """Pinned memory, and an event that tells when the device has read it."""

    memory: Tensor
    is_read: torch.cuda.Event | None


class StagedReader:
    """Threads that read, and the buffers that they read into, while a model is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="weft-weights")
        on_gpu = device.type == "cuda"
        memory = torch.empty(2 * num_threads, CHUNK_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for one in memory:
            is_read = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
            self._free.put(_Buffer(one, is_read))

    def read_into(self, out: Tensor, file: int, start: int) -> None:
        """Read the bytes of a contiguous tensor on this device from an open file. What the current stream does next
        comes after it. Raises EOFError for a file that has become too short."""
        target = out.view(-1).view(torch.uint8)
        starts = range(0, len(target), CHUNK_BYTES)
        parts = [target[at : at + CHUNK_BYTES] for at in starts]
        for _ in self._threads.map(self._read_chunk, parts, repeat(file), (start + at for at in starts)):
            pass

    def close(self) -> None:
        self._threads.shutdown()

    def _read_chunk(self, out: Tensor, file: int, start: int) -> None:
        buffer = self._free.get()
        try:
            if buffer.is_read is not None:
                buffer.is_read.synchronize()
            staged = buffer.memory[: len(out)]
            left = memoryview(staged.numpy())
            while left:
                count = os.preadv(file, [left], start)
                if not count:
                    raise EOFError("A file of weights was cut short while it was read.")
                left, start = left[count:], start + count
            # A thread of its own begins with the device's default stream, on which weights are loaded.
            out.copy_(staged, non_blocking=True)
            if buffer.is_read is not None:
                buffer.is_read.record()
        finally:
            self._free.put(buffer)
