"""Kernels: one table of ops for each device, chosen once when the model is loaded."""

from __future__ import annotations

from weft.kernels.batch import AttentionBatch, GivenRows, HeadNorms, HeadShape, client_tensor
from weft.kernels.table import REFERENCE, Ops

__all__ = ["REFERENCE", "AttentionBatch", "GivenRows", "HeadNorms", "HeadShape", "Ops", "client_tensor", "ops_for"]


def ops_for(device: str) -> Ops:
    """Return the fastest ops that this machine has for a device."""
    if device == "cpu":
        from weft.kernels.cpu import cpu_ops

        return cpu_ops()
    if device == "cuda":
        from weft.kernels.triton import has_triton, triton_ops

        if has_triton():
            return triton_ops()
    return REFERENCE
