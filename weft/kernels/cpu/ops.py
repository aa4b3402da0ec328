"""The ops of a CPU in torch, where a faster way than the reference's is known.

They serve what `FusedStep` does not: dtypes other than float32, and machines without numba.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import reference
from weft.kernels.batch import HeadNorms, HeadShape
from weft.kernels.cpu.jit import entry, types
from weft.kernels.cpu.raw_memory import at, floats, ints

# With fewer rows, or more, OpenBLAS is as fast the usual way round.
_TURNED_ROWS = range(9, 65)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product taken as weight times x transposed where x has few rows: 150 ms instead of 182 for those of a step of
    32 sequences (SmolLM2-135M, two Neoverse-N1 cores)."""
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[0] not in _TURNED_ROWS:
        return F.linear(x, weight, bias)
    y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(reference.rms_norm(x, norm, eps), weight, bias)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return silu_mul(norm_linear(x, norm, eps, weight, None))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    residual.add_(linear(x, weight, bias))


def rotate_and_store(
    qkv: Tensor, heads: HeadShape, rotations: Tensor, kv: Tensor, slots: Tensor, norms: HeadNorms | None = None
) -> None:
    if qkv.dtype != torch.float32:
        reference.rotate_and_store(qkv, heads, rotations, kv, slots, norms)
        return
    if norms is not None:
        reference.norm_heads(qkv, heads, norms)
    rotated = heads.q_size + heads.kv_size // 2
    pairs = qkv[:, :rotated].view(qkv.shape[0], -1, heads.head_dim // 2, 2)
    torch.view_as_complex(pairs).mul_(rotations[:, None])
    kv.view(-1, heads.kv_size).index_copy_(0, slots, qkv[:, heads.q_size :])


# Floats compared before a row's winner so far is looked at again.
_RUN = 256


@entry((types.int64, types.int64, types.int64, types.int64))
def _argmax(logits: int, num_rows: int, size: int, out: int) -> None:
    for row in range(num_rows):
        x = at(floats(logits), row * size)
        best, where = np.float32(-np.inf), 0
        for start in range(0, size, _RUN):
            run = at(x, start)
            count = min(_RUN, size - start)
            # Whether any is greater, or a NaN, without a branch.
            beaten = 0
            for i in range(count):
                beaten += not (run[i] <= best)
            if beaten:
                for i in range(count):
                    if run[i] > best or run[i] != run[i]:
                        best, where = run[i], start + i
                        if best != best:
                            break
                if best != best:
                    break
        ints(out)[row] = where


def argmax_rows(logits: Tensor) -> Tensor:
    """[rows] int64: where each row's greatest element is, the first of equals; its first NaN where it has one."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _argmax(logits.data_ptr(), logits.shape[0], logits.shape[1], out.data_ptr())
    return out
