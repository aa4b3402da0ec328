"""silu(gate) * up, rounded where the reference rounds."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.launch import launch_options, wait_for_inputs

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
