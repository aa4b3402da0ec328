"""A step's queries and keys turned to their positions (their heads normalised before, where the family does so), and
its keys and values written to the cache: one kernel over the fused rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.batch import HeadNorms, HeadShape
from weft.kernels.triton.launch import launch_options, wait_for_inputs

_TILE = 2048
"""Elements of a row that one program takes."""


@triton.jit
def _normalised(x, scale, eps, dim):
    wide = x.to(tl.float32)
    spread = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / dim + eps)
    return ((wide * spread).to(x.dtype).to(tl.float32) * scale.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["slots"])
def _rope_store_kernel(
    qkv, rotations, kv, slots, q_norm, k_norm, qkv_stride, rotation_stride, slot_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    inside = (heads < Q_HEADS + 2 * KV_HEADS) & (columns < DIM)
    wait_for_inputs(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    at = qkv + token * qkv_stride + heads * DIM + columns
    x = tl.load(at, mask=inside, other=0.0)
    turns = tl.load(rotations + token * rotation_stride + columns, mask=columns < DIM, other=0.0)
    is_key = heads >= Q_HEADS
    is_turned = heads < Q_HEADS + KV_HEADS
    y = x
    if NORM:
        q_scale = tl.load(q_norm + columns, mask=columns < DIM, other=0.0)
        k_scale = tl.load(k_norm + columns, mask=columns < DIM, other=0.0)
        scale = tl.where(is_key, k_scale, q_scale)
        y = _normalised(x, scale, eps, DIM)
    real, imaginary = tl.split(tl.reshape(y.to(tl.float32), [HEADS, PADDED // 2, 2]))
    cos, sin = tl.split(tl.reshape(turns, [1, PADDED // 2, 2]))
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    turned = tl.reshape(turned, [HEADS, PADDED]).to(x.dtype)
    tl.store(at, turned, mask=inside & is_turned)
    stored = tl.where(is_turned, turned, x)
    tl.store(kv + slot * slot_stride + (heads - Q_HEADS) * DIM + columns, stored, mask=inside & is_key)


def rotate_and_store(
    qkv: Tensor, heads: HeadShape, rotations: Tensor, kv: Tensor, slots: Tensor, norms: HeadNorms | None = None
) -> None:
    """The cache is contiguous; qkv's rows may be apart. Rows that share a slot leave one of theirs in it."""
    if qkv.stride(1) != 1 or not kv.is_contiguous():
        raise ValueError("qkv's rows and the cache must be contiguous")
    if qkv.shape[0] == 0:
        return
    pairs = torch.view_as_real(rotations)
    if pairs.stride(1) != 2:
        pairs = pairs.contiguous()
    padded = triton.next_power_of_2(heads.head_dim)
    per_program = max(1, _TILE // padded)
    num_heads = heads.num_heads + 2 * heads.num_kv_heads
    _rope_store_kernel[(qkv.shape[0], triton.cdiv(num_heads, per_program))](
        qkv, pairs, kv, slots, qkv if norms is None else norms.query, qkv if norms is None else norms.key,
        qkv.stride(0), pairs.stride(0), heads.kv_size, 0.0 if norms is None else norms.eps,
        Q_HEADS=heads.num_heads, KV_HEADS=heads.num_kv_heads, DIM=heads.head_dim, HEADS=per_program, PADDED=padded,
        NORM=norms is not None, num_warps=4, **launch_options(),
    )  # fmt: skip
