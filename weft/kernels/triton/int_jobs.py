"""Helpers of kernels that multiply weights of whole numbers: which part of a product a program computes, where its
words are, and what it does with its sums."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.int_weights import BLOCK, TILE
from weft.kernels.triton.elementwise import silu_times

_WORDS = tl.constexpr(TILE * BLOCK // 4)


@triton.jit
def job_of(num_blocks, whole, SPLIT_K: tl.constexpr):
    """Return the job of this program, its part of it, its place among the programs that share jobs (negative for the
    first `whole`, which share none), and the first and the last of its blocks."""
    program = tl.program_id(0)
    sharing = program - whole
    is_sharing = sharing >= 0
    job = tl.where(is_sharing, whole + sharing // SPLIT_K, program)
    part = tl.where(is_sharing, sharing % SPLIT_K, 0)
    first = num_blocks * part // SPLIT_K
    last = tl.where(is_sharing, num_blocks * (part + 1) // SPLIT_K, num_blocks)
    return job, part, sharing, first, last


@triton.jit
def tiles_of(at, num_tiles, TILES: tl.constexpr, GATED: tl.constexpr):
    """Return the tiles of the jobs at this place. Gated, the second half of them are the ups of the first."""
    OWN_TILES: tl.constexpr = TILES // 2 if GATED else TILES
    tile = at * OWN_TILES + tl.arange(0, TILES) % OWN_TILES
    if GATED:
        tile += tl.arange(0, TILES) // OWN_TILES * (num_tiles // 2)
    return tl.minimum(tile, num_tiles - 1)


@triton.jit
def words_of(numbers, tile, num_blocks, BITS: tl.constexpr):
    """Return the places of the first block's words of tiles."""
    thread = tl.arange(0, 128)[None, None, :, None]
    within = tl.arange(0, 2)[:, None, None, None] * (_WORDS // 2) + thread * 8 + tl.arange(0, 8)[None, None, None, :]
    return numbers + (tile.to(tl.int64) * num_blocks * (_WORDS * (BITS // 4)))[None, :, None, None] + within


@triton.jit
def store_outputs(
    y, total, bias, residual, out, own, rows, num_rows, num_outputs, residual_stride,
    OWN: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store the sums of outputs `own` and of rows. `total` is what they are added to, where that is loaded already."""
    inside = (own < num_outputs) & (rows < num_rows)
    at = rows.to(tl.int64)
    z = y.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(z, [2, OWN, z.shape[1]]), [1, 2, 0]))
        z = silu_times(gate, up).to(z.dtype)
    if BIAS:
        biases = tl.load(bias + own, mask=own < num_outputs, other=0.0)
        z = (z.to(tl.float32) + biases.to(tl.float32)).to(z.dtype)
    if ADD:
        if total is None:
            total = tl.load(residual + at * residual_stride + own, mask=inside, other=0.0)
        z = (total.to(tl.float32) + z.to(tl.float32)).to(z.dtype)
        tl.store(residual + at * residual_stride + own, z, mask=inside)
    else:
        tl.store(out + at * num_outputs + own, z, mask=inside)
