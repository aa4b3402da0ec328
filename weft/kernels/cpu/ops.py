"""The ops of a CPU in torch, where a faster way than the reference's is known.

They serve what `FusedDecode` does not: dtypes other than float32, and machines without numba.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import reference
from weft.kernels.batch import HeadShape

# Past this many rows OpenBLAS is as fast the usual way round.
_MOST_TURNED_ROWS = 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product taken as weight times x transposed where x has few rows: on a Neoverse-N1 67 GFlop/s for 32 rows
    where the usual way round has 39."""
    if x.dtype != torch.float32 or x.dim() != 2 or not 1 < x.shape[0] <= _MOST_TURNED_ROWS:
        return F.linear(x, weight, bias)
    y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate_and_store(qkv: Tensor, heads: HeadShape, rotations: Tensor, kv: Tensor, slots: Tensor) -> None:
    if qkv.dtype != torch.float32:
        reference.rotate_and_store(qkv, heads, rotations, kv, slots)
        return
    rotated = heads.q_size + heads.kv_size // 2
    pairs = qkv[:, :rotated].view(qkv.shape[0], -1, heads.head_dim // 2, 2)
    torch.view_as_complex(pairs).mul_(rotations[:, None])
    kv.view(-1, heads.kv_size).index_copy_(0, slots, qkv[:, heads.q_size :])
