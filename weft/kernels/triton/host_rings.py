"""Kernels that read a step's inputs from memory of the host, and write what it sampled there.

A captured step begins and ends with them. Copies between two steps would each hold the next one up: 48 µs in all, where
a step of one row of a 7B model with weights of e4m3 takes 2,266. That memory is a ring of SLOTS slots, as the host
writes the inputs of a step while the last one runs. Which slot is next is counted on the device.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import launch_options, wait_for_inputs

SLOTS = 4
_SLOTS = tl.constexpr(SLOTS)
_BLOCK = 2048


@triton.jit(do_not_specialize=["size"])
def _receive_kernel(ring, turn, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    slot = tl.load(turn)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(ring + slot * size + at, mask=at < size, volatile=True), mask=at < size)
    tl.debug_barrier()
    tl.store(turn, (slot + 1) % _SLOTS)


def receive(ring: Tensor, turn: Tensor, out: Tensor) -> None:
    """Copy the next slot of a ring [SLOTS, size] on the host to `out` [size], and count it."""
    _receive_kernel[(1,)](ring, turn, out, len(out), BLOCK=_BLOCK, num_warps=8, **launch_options())


@triton.jit(do_not_specialize=["size"])
def _publish_kernel(tokens, peaks, turn, token_ring, peak_ring, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    slot = (tl.load(turn) + _SLOTS - 1) % _SLOTS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(token_ring + slot * size + at, tl.load(tokens + at, mask=inside), mask=inside)
    tl.store(peak_ring + slot * size + at, tl.load(peaks + at, mask=inside).to(tl.float32), mask=inside)


def publish(tokens: Tensor, peaks: Tensor, turn: Tensor, token_ring: Tensor, peak_ring: Tensor) -> None:
    """Copy tokens and their logits [size] to the slot of rings [SLOTS, size] that `receive` has counted last."""
    block = 256
    _publish_kernel[(triton.cdiv(len(tokens), block),)](
        tokens, peaks, turn, token_ring, peak_ring, len(tokens), BLOCK=block, num_warps=4, **launch_options()
    )
