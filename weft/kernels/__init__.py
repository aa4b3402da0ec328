"""One table of ops for each device, chosen once when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from weft.kernels import reference
from weft.kernels.batch import AttentionBatch, HeadShape

__all__ = ["AttentionBatch", "HeadShape", "Ops", "ops_for"]


class Ops(NamedTuple):
    """The signatures and meanings are those of the functions of the same names in `reference`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rotate_and_store: Callable[[Tensor, HeadShape, Tensor, Tensor, Tensor], None]
    attention: Callable[[Tensor, HeadShape, Tensor, AttentionBatch], Tensor]
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]


REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    linear=reference.linear,
    silu_mul=reference.silu_mul,
    rotate_and_store=reference.rotate_and_store,
    attention=reference.attention,
    greedy=reference.greedy,
)


def ops_for(device: str) -> Ops:
    """The fastest ops that this machine has for a device."""
    if device == "cpu":
        from weft.kernels.cpu import cpu_ops

        return cpu_ops()
    if device == "cuda":
        from weft.kernels.triton import has_triton, triton_ops

        if has_triton():
            return triton_ops()
    return REFERENCE
