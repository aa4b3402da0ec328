"""The work on one row at a time: norms, rotations, the gate, an exponential that can be vectorised, and the greatest
element."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.jit import entry, in_order, inner, types
from weft.kernels.cpu.raw_memory import Float, Floats, at, float_of_bits, floats, ints

_ONE = np.float32(1.0)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_LOG2_E = np.float32(1.4426950408889634)
# The first has few bits, so that a whole multiple of it is exact; the second is what it lacks of log(2).
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_HALF = np.float32(0.5)
_C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(n)) for n in (3, 4, 5, 6, 7))
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)


@in_order
def exp(x: Float) -> Float:
    """e**x within 4e-7 of itself, from e**-87 up to e**88. libm's is a call, and no loop with a call is vectorised."""
    x = min(max(x, _LOWEST), _HIGHEST)
    power = np.floor(x * _LOG2_E + _HALF)
    r = x - power * _LN2_HIGH - power * _LN2_LOW
    series = _ONE + r * (_ONE + r * (_HALF + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7))))))
    return series * float_of_bits((np.int32(power) + _BIAS) << _MANTISSA_BITS)


@inner
def copy(source: Floats, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] = source[i]


@inner
def add(x: Floats, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] += x[i]


@inner
def scale(x: Floats, factor: Float, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] = x[i] * factor


@inner
def rms_norm(x: Floats, weight: Floats, eps: Float, out: Floats, size: int) -> None:
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    factor = _ONE / np.sqrt(total / np.float32(size) + np.float32(eps))
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@inner
def rotate(x: Floats, rotation: Floats, head_dim: int) -> None:
    """Turn the pairs of a head in place, by complex numbers."""
    for i in range(0, head_dim, 2):
        a, b = x[i], x[i + 1]
        c, s = rotation[i], rotation[i + 1]
        x[i] = a * c - b * s
        x[i + 1] = a * s + b * c


@inner
def silu_mul(gate: Floats, up: Floats, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]


# Floats compared before a row's winner so far is looked at again.
_RUN = 256


@entry((types.int64, types.int64, types.int64, types.int64))
def _argmax(logits: int, num_rows: int, size: int, out: int) -> None:
    for row in range(num_rows):
        x = at(floats(logits), row * size)
        best, where = np.float32(-np.inf), 0
        for start in range(0, size, _RUN):
            run = at(x, start)
            count = min(_RUN, size - start)
            # Whether any is greater, or a NaN, without a branch.
            beaten = 0
            for i in range(count):
                beaten += not (run[i] <= best)
            if beaten:
                for i in range(count):
                    if run[i] > best or run[i] != run[i]:
                        best, where = run[i], start + i
                        if best != best:
                            break
                if best != best:
                    break
        ints(out)[row] = where


def argmax_rows(logits: Tensor) -> Tensor:
    """[rows] int64: where each row's greatest element is, the first of equals; its first NaN where it has one."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _argmax(logits.data_ptr(), logits.shape[0], logits.shape[1], out.data_ptr())
    return out
