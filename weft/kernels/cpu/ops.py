"""The ops of a CPU in torch, where a faster way than the reference's is known.

They serve what `FusedStep` does not: dtypes other than float32, and machines where numba cannot be used.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import reference
from weft.kernels.batch import HeadNorms, HeadShape
from weft.kernels.kv_cache import LayerCache
from weft.kernels.table import REFERENCE, Ops
from weft.kernels.weights import Weight

log = logging.getLogger(__name__)

# With fewer rows, or more, OpenBLAS is as fast the usual way round.
_TURNED_ROWS = range(9, 65)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """The product taken as weight times x transposed where x has few rows: 150 ms instead of 182 for those of a step of
    32 sequences (SmolLM2-135M, two Neoverse-N1 cores)."""
    if not isinstance(weight, Tensor) or x.dtype != torch.float32 or x.dim() != 2 or x.shape[0] not in _TURNED_ROWS:
        return reference.linear(x, weight, bias)
    y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, Tensor):
        return reference.norm_linear(x, norm, eps, weight, bias)
    return linear(reference.rms_norm(x, norm, eps), weight, bias)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor:
    return silu_mul(linear(reference.rms_norm(x, norm, eps), weight))


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> None:
    residual.add_(linear(x, weight, bias))


def rotate_and_store(
    qkv: Tensor, heads: HeadShape, rotations: Tensor, kv: LayerCache, slots: Tensor, norms: HeadNorms | None = None
) -> None:
    if not (qkv.dtype == torch.float32 and isinstance(kv, Tensor) and kv.dtype == torch.float32):
        reference.rotate_and_store(qkv, heads, rotations, kv, slots, norms)
        return
    if norms is not None:
        reference.norm_heads(qkv, heads, norms)
    rotated = heads.q_size + heads.kv_size // 2
    pairs = qkv[:, :rotated].view(qkv.shape[0], -1, heads.head_dim // 2, 2)
    torch.view_as_complex(pairs).mul_(rotations[:, None])
    kv.view(-1, heads.kv_size).index_copy_(0, slots, qkv[:, heads.q_size :])


def argmax_rows(logits: Tensor) -> Tensor:
    """[rows] int64: where each row's greatest element is. A NaN is greater than all, as torch has it."""
    if not (logits.dim() == 2 and is_plain(logits) and has_native_code()):
        return logits.argmax(-1)
    from weft.kernels.cpu.compiled import kernels

    out = torch.empty(len(logits), dtype=torch.int64)
    kernels().argmax(logits.data_ptr(), *logits.shape, out.data_ptr())
    return out


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens = argmax_rows(logits)
    return tokens, logits.gather(1, tokens[:, None])[:, 0]


def cpu_ops() -> Ops:
    return REFERENCE._replace(
        linear=linear,
        norm_linear=norm_linear,
        norm_gate_up=norm_gate_up,
        linear_add=linear_add,
        rotate_and_store=rotate_and_store,
        greedy=greedy,
    ).with_mlp_in_parts()


@cache
def has_native_code() -> bool:
    """Return whether this machine has compiled kernels, and say once why it has none. The first call compiles them."""
    if sys.platform == "win32":
        return False
    try:
        from weft.kernels.cpu.compiled import CompileError, kernels
    except ImportError as error:
        why = str(error)
    else:
        try:
            kernels()
            return True
        except CompileError as error:  # numba is not there, or does not fit the NumPy that is
            why = str(error)
    log.warning(
        "The CPU's kernels cannot be compiled (%s): torch's are used, which are slower. "
        "`pip install numba` installs the compiler.",
        why,
    )
    return False


def is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def all_plain(*weights: Weight) -> bool:
    """Return whether all that are not quantised are plain."""
    return all(is_plain(weight) for weight in weights if isinstance(weight, Tensor))
