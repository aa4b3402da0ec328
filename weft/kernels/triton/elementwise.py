"""Elementwise kernels: RMSNorm, SiLU·mul, the rotation of queries and keys with the write to the cache, and what a step
reads from the row table. They compute in float32 and round where the reference rounds."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.batch import HeadNorms, HeadShape
from weft.kernels.kv_cache import ABOVE_LARGEST, E4M3_EXPONENT, Fp8Cache, LayerCache, block_size_of, numbers_in
from weft.kernels.triton.launch import cdiv, launch_options, next_power_of_2, wait_for_inputs

_MAX_HIDDEN = 16384
_SMALL_TILE = 1024
"""Rows shorter than this share a program."""


@triton.jit
def normalised(x, scale, eps, dim):
    """Return the RMSNorm of rows, rounded as torch rounds it."""
    wide = x.to(tl.float32)
    spread = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / dim + eps)
    return ((wide * spread).to(x.dtype).to(tl.float32) * scale.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x, weight, out, num_rows, hidden, stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < hidden)
    scale = tl.load(weight + columns, mask=columns < hidden, other=0.0)
    wait_for_inputs(PDL)
    value = tl.load(x + rows * stride + columns, mask=inside, other=0.0)
    tl.store(out + rows * hidden + columns, normalised(value, scale, eps, hidden), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the contiguous RMSNorm of x. The weight has x's dtype."""
    hidden = x.shape[-1]
    if hidden > _MAX_HIDDEN:
        raise ValueError(f"rows of {hidden} elements; a program holds {_MAX_HIDDEN}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, hidden).contiguous()
    num_rows = rows.shape[0]
    if num_rows == 0:
        return out
    block = max(64, next_power_of_2(hidden))
    per_program = max(1, _SMALL_TILE // block)
    _norm_kernel[(cdiv(num_rows, per_program),)](
        rows, weight, out, num_rows, hidden, rows.stride(0), eps, ROWS=per_program, BLOCK=block,
        num_warps=min(16, max(4, per_program * block // 256)), **launch_options(),
    )  # fmt: skip
    return out


_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def divided(row, scale):
    """Divide a row by its scale. A GPU divides by multiplying with the inverse: that is computed once, not for each
    number. A quotient is rounded before anything is added to it."""
    if _IS_INTERPRETED:
        return row / scale
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [row, 1.0 / scale], tl.float32, is_pure=True, pack=1
    )


_BLOCK = 1024
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def silu_times(gate, up):
    """Multiply up by SiLU(gate); all are in the dtype that torch rounds them to."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp2(wide * -_LOG2_E))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)


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
    """Return SiLU·mul of [..., 2 * width], the gates first, as [..., width]."""
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    rows = gate_up if gate_up.dim() == 2 and gate_up.stride(1) == 1 else gate_up.reshape(-1, 2 * width).contiguous()
    if rows.shape[0]:
        _silu_mul_kernel[(rows.shape[0], cdiv(width, _BLOCK))](
            rows, out, width, rows.stride(0), BLOCK=_BLOCK, num_warps=4, **launch_options()
        )
    return out


_ROPE_TILE = 2048
"""Elements of a row that one program takes."""
_ABOVE_LARGEST, _E4M3_EXPONENT = tl.constexpr(ABOVE_LARGEST), tl.constexpr(E4M3_EXPONENT)


@triton.jit
def power_of_two(exponents):
    """Return 2 ** (exponents - 127), for exponents from 1 to 254."""
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_fp8(
    stored, numbers, scales, slot,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the heads of keys and values among `stored` [HEADS, PADDED], one token's, as e4m3 with their scales."""
    part = tl.program_id(1) * HEADS + tl.arange(0, HEADS) - Q_HEADS
    column = tl.arange(0, PADDED)
    is_own = (part >= 0) & (part < 2 * KV_HEADS)
    wide = stored.to(tl.float32)
    most = tl.max(tl.abs(wide), axis=1)
    exponents = ((most.to(tl.int32, bitcast=True) + _ABOVE_LARGEST) >> 23) - _E4M3_EXPONENT
    exponents = tl.maximum(exponents, 1)
    rounded = (wide * power_of_two(254 - exponents)[:, None]).to(numbers.dtype.element_ty)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = (block * (2 * KV_HEADS) + part) * BLOCK_SIZE + offset
    mask = is_own[:, None] & (column < DIM)[None, :]
    tl.store(numbers + row[:, None] * DIM + column[None, :], rounded, mask=mask)
    word = (block * KV_HEADS + part % KV_HEADS) * BLOCK_SIZE + offset
    tl.store(scales + word * 2 + part // KV_HEADS, power_of_two(exponents).to(scales.dtype.element_ty), mask=is_own)


@triton.jit(do_not_specialize=["slots"])
def _rope_store_kernel(
    qkv, rotations, kv, scales, slots, q_norm, k_norm, qkv_stride, rotation_stride, slot_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
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
        y = normalised(x, scale, eps, DIM)
    real, imaginary = tl.split(tl.reshape(y.to(tl.float32), [HEADS, PADDED // 2, 2]))
    cos, sin = tl.split(tl.reshape(turns, [1, PADDED // 2, 2]))
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    turned = tl.reshape(turned, [HEADS, PADDED]).to(x.dtype)
    tl.store(at, turned, mask=inside & is_turned)
    stored = tl.where(is_turned, turned, x)
    if SCALED:
        _store_fp8(stored, kv, scales, slot, Q_HEADS, KV_HEADS, DIM, HEADS, PADDED, BLOCK_SIZE)
    else:
        tl.store(kv + slot * slot_stride + (heads - Q_HEADS) * DIM + columns, stored, mask=inside & is_key)


def rotate_and_store(
    qkv: Tensor, heads: HeadShape, rotations: Tensor, kv: LayerCache, slots: Tensor, norms: HeadNorms | None = None
) -> None:
    """Normalise and rotate queries and keys, and write keys and values to the cache, in one kernel over the fused rows.
    The cache is contiguous; qkv's rows may be apart. Of rows that share a slot, one is written (of
    e4m3 numbers and their scales perhaps two)."""
    numbers = numbers_in(kv)
    scales = kv.scales if isinstance(kv, Fp8Cache) else numbers
    if qkv.stride(1) != 1 or not numbers.is_contiguous():
        raise ValueError("qkv's rows and the cache must be contiguous")
    if qkv.shape[0] == 0:
        return
    pairs = torch.view_as_real(rotations)
    if pairs.stride(1) != 2:
        pairs = pairs.contiguous()
    padded = next_power_of_2(heads.head_dim)
    per_program = max(1, _ROPE_TILE // padded)
    num_heads = heads.num_heads + 2 * heads.num_kv_heads
    _rope_store_kernel[(qkv.shape[0], cdiv(num_heads, per_program))](
        qkv, pairs, numbers, scales, slots, qkv if norms is None else norms.query, qkv if norms is None else norms.key,
        qkv.stride(0), pairs.stride(0), heads.kv_size, 0.0 if norms is None else norms.eps,
        Q_HEADS=heads.num_heads, KV_HEADS=heads.num_kv_heads, DIM=heads.head_dim, HEADS=per_program, PADDED=padded,
        BLOCK_SIZE=block_size_of(kv), SCALED=isinstance(kv, Fp8Cache), NORM=norms is not None, num_warps=4,
        **launch_options(),
    )  # fmt: skip


_GATHERED = 1024
"""Tokens, or blocks of a sequence, that one program gathers."""


@triton.jit(do_not_specialize=["token_rows", "positions", "sequence_rows", "num_tokens", "width"])
def _gather_kernel(
    tokens, blocks, token_rows, positions, sequence_rows, out_tokens, slots, block_tables, num_tokens, width,
    tokens_stride, blocks_stride, BLOCK_SIZE: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1) * GATHERED + tl.arange(0, GATHERED)
    wait_for_inputs(PDL)
    sequence = tl.program_id(0).to(tl.int64) - 1
    if sequence < 0:
        inside = at < num_tokens
        row = tl.load(token_rows + at, mask=inside, other=0)
        position = tl.load(positions + at, mask=inside, other=0)
        token = tl.load(tokens + row * tokens_stride + position, mask=inside)
        block = tl.load(blocks + row * blocks_stride + position // BLOCK_SIZE, mask=inside)
        tl.store(out_tokens + at, token, mask=inside)
        tl.store(slots + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
    else:
        inside = at < width
        own = blocks + tl.load(sequence_rows + sequence) * blocks_stride
        tl.store(block_tables + sequence * width + at, tl.load(own + at, mask=inside), mask=inside)


def gather_inputs(
    tokens: Tensor, blocks: Tensor, block_size: int, token_rows: Tensor, positions: Tensor, sequence_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens at these rows and positions of a table, their cache slots, and the blocks of the sequences'
    rows, all by one kernel."""
    num_tokens, num_sequences, width = len(token_rows), len(sequence_rows), blocks.shape[1]
    out_tokens, slots = (torch.empty_like(token_rows) for _ in range(2))
    block_tables = torch.empty(num_sequences, width, dtype=torch.int64, device=blocks.device)
    _gather_kernel[(1 + num_sequences, cdiv(max(num_tokens, width), _GATHERED))](
        tokens, blocks, token_rows, positions, sequence_rows, out_tokens, slots, block_tables, num_tokens, width,
        tokens.stride(0), blocks.stride(0), BLOCK_SIZE=block_size, GATHERED=_GATHERED, num_warps=4, **launch_options(),
    )  # fmt: skip
    return out_tokens, slots, block_tables
