"""The least logit that a row may draw, by min_p, top_k and top_p, without sorting: a program looks at its row a dozen
times, each time at what lies above a pivot and what lies below.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import launch_options, wait_for_inputs
from weft.kernels.triton.sampling_kernels import ordered, unordered

_CHUNK = 8192
_LOOKS_BY_VALUE = tl.constexpr(24)
"""Halving the distance of two logits so often leaves no more of it than they have digits."""


@triton.jit
def _split(logits, pivot, peak, scale, vocabulary, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """A row at a pivot: the number of logits that are not below it, or their unnormalised probability; the least of
    them; and the largest of the others."""
    amounts = tl.zeros([CHUNK], dtype=tl.float32)
    least = tl.full([CHUNK], float("inf"), dtype=tl.float32)
    largest = tl.full([CHUNK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocabulary, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        above = x >= pivot
        if MASS:
            amounts += tl.where(above, tl.exp((x - peak) * scale), 0.0)
        else:
            amounts += tl.where(above, 1.0, 0.0)
        least = tl.minimum(least, tl.where(above, x, float("inf")))
        largest = tl.maximum(largest, tl.where(above, float("-inf"), x))
    return tl.sum(amounts, axis=0), tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def _least_kept(logits, lowest, peak, wanted, scale, vocabulary, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest logit such that those not below it are, as `_split` has it, as much as is wanted; `lowest` if there
    is none above. By bisection, first of values, then of what is left of the keys; each look at the row takes the
    bounds to logits that the row has, so a few looks are enough, and equal logits take no more than different ones."""
    low = ordered(lowest).to(tl.int64)
    high = ordered(peak).to(tl.int64) + 1
    looks = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        if looks < _LOOKS_BY_VALUE:
            value = 0.5 * unordered(low.to(tl.int32)) + 0.5 * unordered((high - 1).to(tl.int32))
            middle = tl.minimum(tl.maximum(ordered(value).to(tl.int64), low + 1), high - 1)
        pivot = unordered(middle.to(tl.int32))
        amount, least, largest = _split(logits, pivot, peak, scale, vocabulary, MASS, CHUNK)
        is_enough = amount >= wanted
        # The bounds move whatever the row holds: a row of NaN ends, too.
        low = tl.where(is_enough, tl.maximum(ordered(least).to(tl.int64), middle), low)
        high = tl.where(is_enough, high, tl.minimum(ordered(largest).to(tl.int64) + 1, middle))
        looks += 1
    return unordered(low.to(tl.int32))


@triton.jit(do_not_specialize=["peaks", "temperatures", "min_p_reaches", "top_ks", "top_ps"])
def _threshold_kernel(
    logits, peaks, temperatures, min_p_reaches, top_ks, top_ps, thresholds, vocabulary, stride,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    logits += row * stride
    peak = tl.load(peaks + row).to(tl.float32)
    temperature = tl.load(temperatures + row)
    threshold = peak + tl.load(min_p_reaches + row)
    top_k = tl.load(top_ks + row)
    if (top_k > 0) & (top_k < vocabulary):
        wanted = top_k.to(tl.float32)
        num_finite, least, _ = _split(logits, -3.4028234e38, peak, 1.0, vocabulary, False, CHUNK)
        if num_finite > wanted:
            lowest = tl.maximum(threshold, least)
            threshold = _least_kept(logits, lowest, peak, wanted, 1.0, vocabulary, False, CHUNK)
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        scale = 1.0 / temperature
        mass, _, _ = _split(logits, threshold, peak, scale, vocabulary, True, CHUNK)
        # All logits below this have less than 1 - top_p together.
        tail = peak + temperature * (tl.log((1.0 - top_p) / vocabulary) - 1.0)
        lowest = tl.maximum(threshold, tail)
        threshold = _least_kept(logits, lowest, peak, top_p * mass, scale, vocabulary, True, CHUNK)
    tl.store(thresholds + row, threshold)


def keep_thresholds(
    logits: Tensor, peaks: Tensor, temperatures: Tensor, min_p_reaches: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """[rows] float32: tokens whose logits are below these are never drawn, by min_p, top_k and top_p."""
    num_rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the rows of logits must be contiguous")
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _threshold_kernel[(num_rows,)](
            logits, peaks, temperatures, min_p_reaches, top_k, top_p, thresholds, vocabulary, logits.stride(0),
            CHUNK=_CHUNK, num_warps=16, **launch_options(),
        )  # fmt: skip
    return thresholds
