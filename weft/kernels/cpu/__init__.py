"""Kernels of the CPU: a decoder's whole step in native code where numba is installed, and torch ops beside it."""

from __future__ import annotations

import importlib.util
import logging
import sys
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.kernels.batch import HeadShape
from weft.kernels.cpu import ops
from weft.kernels.table import REFERENCE, Ops
from weft.kernels.weights import DecoderWeights

if TYPE_CHECKING:
    from weft.kernels.cpu.fused_step import FusedStep

log = logging.getLogger(__name__)

__all__ = ["argmax_rows", "cpu_ops", "has_native_code", "native_step"]


@cache
def has_native_code() -> bool:
    """Whether this machine can compile kernels."""
    return sys.platform != "win32" and importlib.util.find_spec("numba") is not None


def cpu_ops() -> Ops:
    return REFERENCE._replace(
        linear=ops.linear,
        norm_linear=ops.norm_linear,
        norm_gate_up=ops.norm_gate_up,
        linear_add=ops.linear_add,
        rotate_and_store=ops.rotate_and_store,
        greedy=_greedy,
    )


def native_step(
    weights: DecoderWeights, heads: HeadShape, eps: float, rotations: Tensor, kv_cache: Tensor
) -> FusedStep | None:
    """The native step of a model, or None where there can be none: without numba, and for all but float32.

    The first call on a machine compiles for some 15 s; later ones find what it compiled.
    """
    tensors = [weights.embedding, weights.norm, weights.head, kv_cache, *(t for layer in weights.layers for t in layer)]
    if not has_native_code() or any(t is not None and not _is_plain(t) for t in tensors):
        return None
    from weft.kernels.cpu.jit import cache_directory

    if not cache_directory().exists():
        log.info("Compiling the kernels for this machine's CPU: some 20 s, once.")
    from weft.kernels.cpu.fused_step import FusedStep

    return FusedStep(weights, heads, eps, rotations, kv_cache)


def argmax_rows(logits: Tensor) -> Tensor:
    """[rows] int64: where each row's greatest element is. A NaN is greater than all, as torch has it."""
    if not (has_native_code() and logits.dim() == 2 and _is_plain(logits)):
        return logits.argmax(-1)
    from weft.kernels.cpu.ops import argmax_rows as native

    return native(logits)


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens = argmax_rows(logits)
    return tokens, logits.gather(1, tokens[:, None])[:, 0]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
