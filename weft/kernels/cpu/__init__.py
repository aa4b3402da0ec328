"""Kernels of the CPU: a decoder's whole step in native code where it can be compiled, and torch ops beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from weft.kernels.batch import HeadShape
    from weft.kernels.cpu.fused_step import FusedStep, RankWork
    from weft.kernels.kv_cache import KvCache
    from weft.kernels.panel_format import PanelLayout
    from weft.kernels.weights import DecoderWeights

__all__ = ["native_step", "panel_layout"]


def panel_layout() -> PanelLayout | None:
    """Return how this processor's kernels want quantised weights, or None where it has no such kernels."""
    from weft.kernels.cpu.ops import has_native_code

    if not has_native_code():
        return None
    from weft.kernels.cpu.compiled import IS_ARM, WIDTH
    from weft.kernels.panel_format import PanelLayout

    # Arm's dot products are of signed numbers, x86's of unsigned ones with signed ones.
    return PanelLayout(WIDTH, is_signed=IS_ARM)


def native_step(
    weights: DecoderWeights,
    heads: HeadShape,
    eps: float,
    rotations: Tensor,
    kv_cache: KvCache,
    ranks: RankWork | None = None,
) -> FusedStep | None:
    """The native step of a model, or of one of its ranks, or None where there can be none: without kernels, for weights
    of other floats than float32, and for caches that CPUs have no kernels for."""
    from weft.kernels.cpu.ops import all_plain, has_native_code

    if not all_plain(*weights.all_weights()) or not has_native_code():
        return None
    from weft.kernels.cpu.fused_step import FusedStep, RankStep, attends_over

    if not attends_over(kv_cache):
        return None
    if ranks is not None:
        return RankStep(weights, heads, eps, rotations, kv_cache, ranks)
    return FusedStep(weights, heads, eps, rotations, kv_cache)
