"""Linear layers and what stands next to them, by the number of rows: matrix-vector kernels for one, skinny ones for a
few, the library's products for many."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.kernels.triton import gemv, skinny
from weft.kernels.triton.elementwise import rms_norm, silu_mul
from weft.switches import is_on


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _is_vector(x, weight):
        return gemv.gemv(x, weight, bias)
    if _is_skinny(x, weight):
        return skinny.skinny_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _is_vector(x, weight):
        return gemv.norm_gemv(x, norm, eps, weight, bias)
    return linear(rms_norm(x, norm, eps), weight, bias)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    if _is_vector(x, weight):
        return gemv.norm_gate_up_gemv(x, norm, eps, weight)
    normal = rms_norm(x, norm, eps)
    if _is_skinny(normal, weight):
        return skinny.skinny_gate_up(normal, weight)
    return silu_mul(F.linear(normal, weight))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    if _is_vector(x, weight):
        gemv.gemv_add(x, weight, bias, residual)
    elif _is_skinny(x, weight):
        skinny.skinny_linear_add(x, weight, bias, residual)
    else:
        residual.addmm_(x, weight.t())
        if bias is not None:
            residual.add_(bias)


def _is_vector(x: Tensor, weight: Tensor) -> bool:
    return gemv.fits(x, weight) and is_on("gemv")


def _is_skinny(x: Tensor, weight: Tensor) -> bool:
    return skinny.fits(x, weight) and is_on("skinny")
