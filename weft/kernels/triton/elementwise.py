"""RMSNorm: sums and scales in float32, rounds where the reference rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import launch_options, wait_for_inputs

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"


_MAX_HIDDEN = 16384
_SMALL_TILE = 1024
"""Rows shorter than this share a program."""


@triton.jit
def _norm_kernel(
    x, weight, out, num_rows, hidden, stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < hidden)
    scale = tl.load(weight + columns, mask=columns < hidden, other=0.0)
    wait_for_inputs(PDL)
    value = tl.load(x + rows * stride + columns, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    spread = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / hidden + eps)
    normal = (wide * spread).to(value.dtype).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + rows * hidden + columns, normal.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The result is contiguous. The weight has x's dtype."""
    hidden = x.shape[-1]
    if hidden > _MAX_HIDDEN:
        raise ValueError(f"rows of {hidden} elements; a program holds {_MAX_HIDDEN}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, hidden).contiguous()
    num_rows = rows.shape[0]
    if num_rows == 0:
        return out
    block = max(64, triton.next_power_of_2(hidden))
    per_program = max(1, _SMALL_TILE // block)
    _norm_kernel[(triton.cdiv(num_rows, per_program),)](
        rows, weight, out, num_rows, hidden, rows.stride(0), eps, ROWS=per_program, BLOCK=block,
        num_warps=min(16, max(4, per_program * block // 256)), **launch_options(),
    )  # fmt: skip
    return out


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"


_BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """Both in the dtype that torch would have rounded them to; so is the result."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def _silu_mul_kernel(gate_up, out, width, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, silu_times(gate, up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 * width], the gates first, to [..., width]."""
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    rows = gate_up if gate_up.dim() == 2 and gate_up.stride(1) == 1 else gate_up.reshape(-1, 2 * width).contiguous()
    if rows.shape[0]:
        _silu_mul_kernel[(rows.shape[0], triton.cdiv(width, _BLOCK))](
            rows, out, width, rows.stride(0), BLOCK=_BLOCK, num_warps=4, **launch_options()
        )
    return out
