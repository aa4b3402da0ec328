"""Two small kernels make tokens of logits: the largest logit, or the largest of logit / temperature + noise.

The noise is that of weft/kernels/sampling.py: a hash of (seed, position, token id), so a token depends on nothing else.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import cdiv, launch_options, next_power_of_2, wait_for_inputs

_CHUNK = 4096


@triton.jit
def ordered(x):
    """float32 to int32 of the same order. Both zeros are one; NaN is above everything, as torch's max has it."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mixed(word):
    word = word + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def gumbel_noise(seed, position, ids):
    """seed, position: int64 scalars; ids: int32. float32, within some 1e-6 of the float64 reference."""
    key = _mixed(_mixed(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64, bitcast=True))
    low = key & 0xFFFFFFFF
    high = (key >> 32).to(tl.uint32)
    wide = ids.to(tl.uint64) * 0x9E3779B1 + low
    bits = (wide ^ (wide >> 16)).to(tl.uint32) ^ high
    bits = bits * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    bits = bits ^ (bits >> 16)
    # u = (bits + 0.5) / 2**32. Near 1 a float32 cannot tell u from 1: there log(u) comes from 1 - u, which it can hold.
    is_low = bits < 0x80000000
    part = (tl.where(is_low, bits, 0xFFFFFFFF - bits).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    rest = 1.0 - part
    gone = 1.0 - rest
    near_one = tl.where(gone == 0.0, -part, tl.log(rest) * (part / tl.where(gone == 0.0, 1.0, gone)))
    return -tl.log(-tl.where(is_low, tl.log(part), near_one))


@triton.jit(do_not_specialize=["peaks", "temperatures", "seeds", "positions", "thresholds"])
def _chunk_kernel(
    logits, peaks, temperatures, seeds, positions, thresholds, best, vocabulary, stride, num_chunks,
    GUMBEL: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocabulary
    wait_for_inputs(PDL)
    x = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if GUMBEL:
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            kept = inside
            if CUT:
                kept = inside & ~(x < tl.load(thresholds + row))
            score = (x - tl.load(peaks + row).to(tl.float32)) / temperature
            if tl.max(kept.to(tl.int32), axis=0) > 0:
                score += gumbel_noise(tl.load(seeds + row), tl.load(positions + row), ids)
            x = tl.where(kept, score, float("-inf"))
    # The lowest id wins among equals: it leaves the largest rest below the key.
    packed = (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    packed = tl.where(inside, packed, -0x7FFFFFFFFFFFFFFF)
    tl.store(best + row * num_chunks + chunk, tl.max(packed, axis=0))


@triton.jit
def _row_kernel(best, tokens, peaks, num_chunks, PEAKS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    wait_for_inputs(PDL)
    keys = tl.load(best + row * num_chunks + chunks, mask=chunks < num_chunks, other=-0x7FFFFFFFFFFFFFFF)
    packed = tl.max(keys, axis=0)
    tl.store(tokens + row, 0x7FFFFFFF - (packed & 0x7FFFFFFF))
    if PEAKS:
        tl.store(peaks + row, unordered((packed >> 32).to(tl.int32)))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] int64: the first of each row's largest logits; [rows] float32: that logit, NaN if the row has one."""
    peaks = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    return _choose(logits, peaks, None, None, None, None), peaks


def gumbel_sample(
    logits: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
) -> Tensor:
    """[rows] int64: of each row's logits that are not below its threshold a sample of softmax(logits / temperature),
    or the first of the largest where the temperature is 0."""
    return _choose(logits, peaks, temperatures, seeds, positions, thresholds)


def _choose(
    logits: Tensor,
    peaks: Tensor,
    temperatures: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    thresholds: Tensor | None,
) -> Tensor:
    """Without temperatures the peaks are written, otherwise they are read."""
    num_rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the rows of logits must be contiguous")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    num_chunks = cdiv(vocabulary, _CHUNK)
    best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    options = launch_options()
    gumbel = temperatures is not None
    _chunk_kernel[(num_rows, num_chunks)](
        logits, peaks,
        temperatures if gumbel else peaks,
        seeds if gumbel else best,
        positions if gumbel else best,
        peaks if thresholds is None else thresholds,
        best, vocabulary, logits.stride(0), num_chunks,
        GUMBEL=gumbel, CUT=thresholds is not None, CHUNK=_CHUNK, num_warps=8, **options,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        best, tokens, peaks, num_chunks,
        PEAKS=not gumbel, CHUNKS=next_power_of_2(num_chunks), num_warps=1, **options,
    )  # fmt: skip
    return tokens
