"""Kernels of NVIDIA GPUs, in Triton. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.kernels.table import Ops

__all__ = ["has_triton", "triton_ops"]


def has_triton() -> bool:
    """Whether this machine can compile these kernels."""
    return importlib.util.find_spec("triton") is not None


def triton_ops() -> Ops:
    """The table for device "cuda"."""
    from weft.kernels.table import Ops
    from weft.kernels.triton.elementwise import rms_norm
    from weft.kernels.triton.linears import linear, linear_add, norm_gate_up, norm_linear
    from weft.kernels.triton.prefill_attention import attention
    from weft.kernels.triton.rope_store import rotate_and_store
    from weft.kernels.triton.sampling_kernels import argmax, gumbel_sample
    from weft.kernels.triton.thresholds import keep_thresholds

    return Ops(
        rms_norm=rms_norm,
        linear=linear,
        norm_linear=norm_linear,
        norm_gate_up=norm_gate_up,
        linear_add=linear_add,
        rotate_and_store=rotate_and_store,
        attention=attention,
        greedy=argmax,
        keep_thresholds=keep_thresholds,
        gumbel_sample=gumbel_sample,
    )
