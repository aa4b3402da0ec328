"""Copies tensors of mapped files to a device through pinned memory, by several threads.

A GPU reads pinned memory ten times as fast as one thread reads a mapped file: 54 GB/s and 5 on an H200's machine.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_BYTES = 4 << 20
MAX_THREADS = 16


class _Buffer(NamedTuple):
    """Pinned memory, and an event that tells when the device has read it."""

    memory: Tensor
    is_read: torch.cuda.Event | None


class StagedCopy:
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

    def copy(self, out: Tensor, mapped: Tensor) -> None:
        """Copy a tensor in host memory to `out`, of the same type and on this device; both are contiguous. What the
        current stream does next comes after it."""
        source = mapped.reshape(-1).view(torch.uint8).numpy()
        target = out.view(-1).view(torch.uint8)
        starts = range(0, len(source), CHUNK_BYTES)
        parts = [(target[start : start + CHUNK_BYTES], source[start : start + CHUNK_BYTES]) for start in starts]
        for _ in self._threads.map(self._copy_chunk, *zip(*parts, strict=True)):
            pass

    def close(self) -> None:
        self._threads.shutdown()

    def _copy_chunk(self, out: Tensor, source: NDArray[np.uint8]) -> None:
        buffer = self._free.get()
        try:
            if buffer.is_read is not None:
                buffer.is_read.synchronize()
            staged = buffer.memory[: len(source)]
            np.copyto(staged.numpy(), source)
            # A thread of its own begins with the device's default stream, on which weights are loaded.
            out.copy_(staged, non_blocking=True)
            if buffer.is_read is not None:
                buffer.is_read.record()
        finally:
            self._free.put(buffer)
