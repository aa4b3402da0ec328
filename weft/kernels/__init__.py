"""Kernels: one table of ops for each device, chosen once when the model is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.kernels.batch import AttentionBatch, HeadNorms, HeadShape, InputEmbeds, client_tensor
    from weft.kernels.table import REFERENCE, Ops

__all__ = ["REFERENCE", "AttentionBatch", "HeadNorms", "HeadShape", "InputEmbeds", "Ops", "client_tensor", "ops_for"]


def __getattr__(name: str) -> object:
    """Names are imported when they are asked for: processes that compile kernels have no use for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'weft.kernels' has no attribute {name!r}")
    return getattr(import_module(f"weft.kernels.{'table' if name in ('REFERENCE', 'Ops') else 'batch'}"), name)


def ops_for(device: str) -> Ops:
    """Return the fastest ops that this machine has for a device."""
    if device == "cpu":
        from weft.kernels.cpu.ops import cpu_ops

        return cpu_ops()
    if device == "cuda":
        from weft.kernels.triton import has_triton, triton_ops

        if has_triton():
            return triton_ops()
    from weft.kernels.table import REFERENCE

    return REFERENCE
