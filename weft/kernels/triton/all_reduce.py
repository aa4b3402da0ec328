"""The one-shot all-reduce adds up small tensors of ranks through memory that each has opened of all others.

Every program of a launch has a part of the tensor, a flag and room in each rank's inbox that are its own. It writes its
part into the inboxes of the others, raises its flags there, waits for theirs in its own, and adds all parts in the
order of ranks: every rank gets the same bits. Flags are counts of launches that are kept in device memory, so a launch
can be captured in a CUDA graph. Room is for two launches: a rank that writes for the next but one has seen that the
others began the next, and have read what it overwrites.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, launch_options, wait_for_inputs

PART_BYTES = 4096
"""The part of one program."""
NUM_PARTS = 128
MAX_BYTES = PART_BYTES * NUM_PARTS
FLAG_BYTES = 4
HANDLE_BYTES = 64
_PART_BYTES, _NUM_PARTS, _FLAG_BYTES = tl.constexpr(PART_BYTES), tl.constexpr(NUM_PARTS), tl.constexpr(FLAG_BYTES)


@triton.jit
def _part_of(inbox, sender, launch, program, columns, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Return where the columns of a sender's part are in an inbox."""
    part = ((launch & 1) * SIZE + sender) * _NUM_PARTS + program
    address = inbox + SIZE * _NUM_PARTS * _FLAG_BYTES + part.to(tl.int64) * _PART_BYTES
    return tl.multiple_of(address.to(tl.pointer_type(dtype)) + columns, 16)


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    x, residual, inboxes, launches, count, rank,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    at = program * BLOCK + columns
    inside = at < count
    dtype: tl.constexpr = x.dtype.element_ty
    wait_for_inputs(PDL)
    launch = tl.load(launches + program) + 1
    own = tl.load(x + at, mask=inside, other=0.0)
    for step in tl.static_range(1, SIZE):
        inbox = tl.load(inboxes + (rank + step) % SIZE)
        tl.store(_part_of(inbox, rank, launch, program, columns, SIZE, dtype), own, mask=inside)
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):
        flags = tl.load(inboxes + (rank + step) % SIZE).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + rank * _NUM_PARTS + program, launch, sem="release", scope="sys")
    inbox = tl.load(inboxes + rank)
    flags = inbox.to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, SIZE):
        flag = flags + (rank + step) % SIZE * _NUM_PARTS + program
        # Counts may overflow: the difference tells.
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - launch < 0:
            pass
    total = tl.zeros([BLOCK], tl.float32)
    for sender in tl.static_range(SIZE):
        part = _part_of(inbox, sender, launch, program, columns, SIZE, dtype)
        received = tl.load(part, mask=inside & (sender != rank), other=0.0, cache_modifier=".cg")
        total += tl.where(sender == rank, own, received).to(tl.float32)
    if ADDS:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + at, total.to(dtype), mask=inside)
    tl.store(launches + program, launch)


def inbox_bytes(size: int) -> int:
    """Return the bytes of a rank's inbox."""
    return size * NUM_PARTS * (FLAG_BYTES + 2 * PART_BYTES)


class OneShot:
    """The one-shot all-reduce of a rank."""

    def __init__(self, rank: int, inboxes: Tensor) -> None:
        """Use the inboxes of all ranks at these addresses."""
        self._rank, self._size = rank, len(inboxes)
        self._inboxes = inboxes
        self._launches = torch.zeros(NUM_PARTS, dtype=torch.int32, device=inboxes.device)

    @staticmethod
    def takes(x: Tensor, residual: Tensor | None = None) -> bool:
        is_contiguous = x.is_contiguous() and (residual is None or residual.is_contiguous())
        return is_contiguous and 0 < x.numel() * x.element_size() <= MAX_BYTES

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> None:
        """Replace x by the sum of all ranks' ones; or leave it, and add the sum to a contiguous residual."""
        block = PART_BYTES // x.element_size()
        _one_shot_kernel[(cdiv(x.numel(), block),)](
            x, x if residual is None else residual, self._inboxes, self._launches, x.numel(), self._rank,
            SIZE=self._size, BLOCK=block, ADDS=residual is not None, num_warps=8, **launch_options(),
        )  # fmt: skip


class _IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class PeerMemory:
    """The inboxes of ranks: one that this process allocates, and those of others that it opens. They are there until
    it ends."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate this rank's inbox, with zeros, on the current device. Raises OSError."""
        torch.cuda.synchronize()
        self._driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.own = int(address.value)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        torch.cuda.synchronize()

    def handle(self) -> bytes:
        """Return what another process opens this rank's inbox by."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.own))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Return the address of another rank's inbox. Raises OSError where this device cannot reach it."""
        address, lazily_enable_peers = ctypes.c_uint64(), 1
        known = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), known, ctypes.c_uint(lazily_enable_peers))
        return int(address.value)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise OSError(f"{name} failed with CUDA's error {code}")
