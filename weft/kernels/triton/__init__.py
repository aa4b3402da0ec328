"""Kernels for NVIDIA GPUs, in Triton, which is imported only when they are used."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.kernels.table import Ops

__all__ = ["has_triton", "triton_ops"]


def has_triton() -> bool:
    """Return whether this machine can compile these kernels."""
    return importlib.util.find_spec("triton") is not None


def triton_ops() -> Ops:
    """Return the table of ops for the device "cuda"."""
    from weft.kernels.table import Ops
    from weft.kernels.triton.elementwise import gather_inputs, rms_norm, rotate_and_store
    from weft.kernels.triton.linears import add_mlp, linear, linear_add, norm_gate_up, norm_linear
    from weft.kernels.triton.lora_linears import lora_expand_add, lora_expand_gate, lora_shrink
    from weft.kernels.triton.prefill_attention import attention
    from weft.kernels.triton.sampling_kernels import argmax, gumbel_sample
    from weft.kernels.triton.thresholds import keep_thresholds

    return Ops(
        rms_norm=rms_norm,
        linear=linear,
        norm_linear=norm_linear,
        norm_gate_up=norm_gate_up,
        linear_add=linear_add,
        add_mlp=add_mlp,
        rotate_and_store=rotate_and_store,
        attention=attention,
        lora_shrink=lora_shrink,
        lora_expand_add=lora_expand_add,
        lora_expand_gate=lora_expand_gate,
        gather_inputs=gather_inputs,
        greedy=argmax,
        keep_thresholds=keep_thresholds,
        gumbel_sample=gumbel_sample,
    )
