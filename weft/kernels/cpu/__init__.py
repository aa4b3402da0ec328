"""Kernels of the CPU: a decoder's whole step in native code where numba can be used, and torch ops beside it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import Tensor

from weft.kernels.batch import HeadShape
from weft.kernels.cpu.ops import argmax_rows, cpu_ops, has_native_code, is_plain
from weft.kernels.quantised import PanelLayout
from weft.kernels.weights import DecoderWeights

if TYPE_CHECKING:
    from weft.kernels.cpu.fused_step import FusedStep

log = logging.getLogger(__name__)

__all__ = ["argmax_rows", "cpu_ops", "has_native_code", "native_step", "panel_layout"]


def panel_layout() -> PanelLayout | None:
    """Return how this processor's kernels want quantised weights, or None where it has no such kernels."""
    if not has_native_code():
        return None
    from weft.kernels.cpu.emit import WIDTH
    from weft.kernels.cpu.processor import IS_ARM

    # Arm's dot products are of signed numbers, x86's of unsigned ones with signed ones.
    return PanelLayout(WIDTH, is_signed=IS_ARM)


def native_step(
    weights: DecoderWeights, heads: HeadShape, eps: float, rotations: Tensor, kv_cache: Tensor
) -> FusedStep | None:
    """The native step of a model, or None where there can be none: without numba, and for all but float32.

    The first call on a machine compiles for some 15 s; later ones find what it compiled.
    """
    tensors = [kv_cache, *(weight for weight in weights.all_weights() if isinstance(weight, Tensor))]
    if not all(map(is_plain, tensors)) or not has_native_code():
        return None
    from weft.kernels.cpu.jit import cache_directory

    if not cache_directory().exists():
        log.info("Compiling the kernels for this machine's CPU: up to a minute, once.")
    from weft.kernels.cpu.fused_step import FusedStep

    return FusedStep(weights, heads, eps, rotations, kv_cache)
