"""Rows are quantised to e4m3 before a linear layer with such weights, what stands before it (RMSNorm) included."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.fp8 import E4M3, E4M3_MAX, SMALLEST_SCALE, Fp8Rows
from weft.kernels.triton.elementwise import normalised
from weft.kernels.triton.launch import launch_options, wait_for_inputs

_E4M3_MAX, _SMALLEST_SCALE = tl.constexpr(E4M3_MAX), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _quantise_kernel(
    x, norm, out, scales, num_columns, stride, eps, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < num_columns
    if NORM:
        weight = tl.load(norm + columns, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    value = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    if NORM:
        value = normalised(value, weight, eps, num_columns)
    wide = value.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide)) / _E4M3_MAX, _SMALLEST_SCALE)
    tl.store(scales + row, scale)
    tl.store(out + row * num_columns + columns, (wide / scale).to(out.dtype.element_ty), mask=inside)


def quantise_rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Fp8Rows:
    """Return the rows of x, or of their RMSNorm, as e4m3."""
    num_rows, num_columns = x.shape
    out = torch.empty(num_rows, num_columns, dtype=E4M3, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    rows = x if x.stride(1) == 1 else x.contiguous()
    block = max(64, triton.next_power_of_2(num_columns))
    if num_rows:
        _quantise_kernel[(num_rows,)](
            rows, rows if norm is None else norm, out, scales, num_columns, rows.stride(0), eps,
            BLOCK=block, NORM=norm is not None, num_warps=min(16, max(4, block // 512)), **launch_options(),
        )  # fmt: skip
    return Fp8Rows(out, scales)
