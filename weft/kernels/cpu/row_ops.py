"""The work on one row at a time: norms, rotations, the gate, and an exponential that can be vectorised."""

from __future__ import annotations

import math

import numpy as np

from weft.kernels.cpu.jit import in_order, inner, noinline
from weft.kernels.cpu.raw_memory import Float, Floats, float_of_bits

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


@noinline
def copy(source: Floats, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] = source[i]


@noinline
def add(x: Floats, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] += x[i]


@inner
def scale(x: Floats, factor: Float, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] = x[i] * factor


@noinline
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


@noinline
def silu_mul(gate: Floats, up: Floats, out: Floats, size: int) -> None:
    for i in range(size):
        out[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]
