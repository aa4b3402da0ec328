"""Kernels of NVIDIA GPUs, in Triton. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.kernels import Ops

__all__ = ["has_triton", "triton_ops"]


def has_triton() -> bool:
    """Whether this machine can compile these kernels."""
    return importlib.util.find_spec("triton") is not None


def triton_ops() -> Ops:
    """The table for device "cuda"."""
    from weft.kernels import Ops
    from weft.kernels.triton.activation import silu_mul
    from weft.kernels.triton.attention import attention
    from weft.kernels.triton.gemv import linear
    from weft.kernels.triton.norm import add_rms_norm, rms_norm
    from weft.kernels.triton.rope_store import rotate_and_store
    from weft.kernels.triton.sampling import argmax

    return Ops(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        linear=linear,
        silu_mul=silu_mul,
        rotate_and_store=rotate_and_store,
        attention=attention,
        greedy=argmax,
    )
