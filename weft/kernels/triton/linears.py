"""Linear layers, by the number of rows: matrix-vector kernels (`gemv`) for one, the skinny kernels here for a few, and
the library's products for more. The skinny kernels read every weight once, near the memory's speed.

A program multiplies a tile of weights by all the rows, the weights standing where the matrix units are wide, and walks
along the inner dimension with several tiles on their way. Where there are too few tiles for the chip the inner
dimension is cut, and the program that ends last adds the parts in their order: a result does not depend on timing.
What stands behind a linear layer (bias, SiLU·mul, the residual's sum) can be part of it.

With weights of e4m3 the rows are quantised too, but for a single one, each with a scale of its own, and the matrix
units multiply eight bits by eight: to widen the weights takes longer than to read them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels import reference
from weft.kernels.fp8 import E4M3, GROUP, Fp8Weight, ScaledRows
from weft.kernels.int_weights import IntWeight
from weft.kernels.quantised import QuantisedWeight
from weft.kernels.rotated import RotatedWeight
from weft.kernels.triton import fp8_linears, gemv, int_linears
from weft.kernels.triton.elementwise import rms_norm, silu_mul, silu_times
from weft.kernels.triton.launch import cdiv, is_last, launch_options, next_power_of_2, wait_for_inputs, zeroed_counters
from weft.kernels.weights import PlainRows, PlainWeight, Weight, numbers_of, scales_of
from weft.switches import is_on

MAX_ROWS, MAX_FP8_ROWS, MAX_FP8_ADDED_ROWS = 32, 64, 128
"""Rows up to which the skinny kernels are the fastest; with weights of e4m3 they add to the residual up to the last."""
_NARROW = (torch.bfloat16, torch.float16, E4M3, torch.int8)
_GROUP = tl.constexpr(GROUP)
_MULTIPROCESSORS, _SHARED_BYTES, _REGISTERS = 132, 228 << 10, 64 << 10
"""The multiprocessors of an H200, and the memory of each; a program takes 1 KiB of shared memory more than it asks
for."""
_BLOCK_N, _BLOCK_K, _WARPS = 64, 128, 4
_MAX_SPLITS, _MIN_STEPS, _MAX_STAGES = 8, 4, 7


class SkinnyConfig(NamedTuple):
    """The tiling of a product. One program takes `block_n` rows of weights, gates and ups counted alike."""

    rows: int
    """The padded number of rows: a power of two from 16 on, which the matrix units need."""
    block_n: int
    block_k: int
    split_k: int
    warps: int
    stages: int
    neighbours: int
    """Programs that share a multiprocessor."""
    prefetch: int = 256
    """Columns of every row of weights that are on their way to the L2 cache before the inputs are there."""


@triton.jit
def _prefetch(rows_at, begin, end):
    """Ask the L2 cache for these columns, in two requests a row. Rows are aligned to 16 bytes."""
    SIZE: tl.constexpr = rows_at.dtype.element_ty.primitive_bitwidth // 8
    half = (end - begin) * SIZE // 32 * 16 // SIZE
    if half > 0:
        tl.inline_asm_elementwise(
            "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [rows_at[:, None] + begin + tl.arange(0, 2)[None, :] * half, half * SIZE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_rows", "prefetch"])
def _skinny_kernel(
    x, x_scales, weight, scales, bias, residual, out, partials, counters,
    num_rows, num_outputs, k, x_stride, weight_stride, scales_stride, residual_stride, prefetch,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    SCALED: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`num_outputs` counts columns of `out`. Gated, the program's first BLOCK_N / 2 rows of weights are gates and the
    others their ups, `num_outputs` further down."""
    OWN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = tile * OWN
    part = tl.arange(0, BLOCK_N)
    output = tl.minimum(first + part % OWN, num_outputs - 1).to(tl.int64)
    if GATED:
        output += (part // OWN) * num_outputs
    rows_at = weight + output * weight_stride
    steps = tl.cdiv(k, BLOCK_K)
    begin = steps * split // SPLIT_K * BLOCK_K
    end = tl.minimum(steps * (split + 1) // SPLIT_K * BLOCK_K, k)
    if PDL:
        _prefetch(rows_at, begin, tl.minimum(begin + prefetch, end))
    wait_for_inputs(PDL)

    column = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    weight_at = rows_at[:, None] + column[None, :]
    x_at = x + row[:, None] * x_stride + column[None, :]
    is_row = (row < num_rows)[:, None]
    SUM: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    y = tl.zeros([BLOCK_N, ROWS], dtype=SUM)
    for start in range(begin, end, BLOCK_K):
        if EVEN_K:
            weights = tl.load(weight_at + start)
            inputs = tl.load(x_at + start, mask=is_row, other=0.0)
        else:
            is_column = (column < k - start)[None, :]
            weights = tl.load(weight_at + start, mask=is_column, other=0.0)
            inputs = tl.load(x_at + start, mask=is_row & is_column, other=0.0)
        if GROUPED:
            scale = tl.load(scales + start // _GROUP * scales_stride + output)
            y += tl.dot(weights, tl.trans(inputs)) * scale[:, None]
        else:
            y = tl.dot(weights, tl.trans(inputs), y, out_dtype=SUM)

    y = y.to(tl.float32)
    rows = row[None, :]
    if SPLIT_K > 1:
        parts_at = partials + tile.to(tl.int64) * (SPLIT_K * BLOCK_N * ROWS) + rows * BLOCK_N + part[:, None]
        tl.store(parts_at + split * (BLOCK_N * ROWS), y, mask=rows < num_rows)
        if not is_last(counters, tile, SPLIT_K):
            return
        y = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        for each in tl.static_range(SPLIT_K):
            y += tl.load(parts_at + each * (BLOCK_N * ROWS), mask=rows < num_rows, other=0.0, cache_modifier=".cg")

    if SCALED:
        y *= tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)
        if not GROUPED:
            y *= tl.load(scales + output)[:, None]
    own = first + tl.arange(0, OWN)[:, None]
    inside = (own < num_outputs) & (rows < num_rows)
    y = y.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OWN, ROWS]), [1, 2, 0]))
        y = silu_times(gate, up).to(y.dtype)
    if BIAS:
        y = (y.to(tl.float32) + tl.load(bias + own, mask=own < num_outputs, other=0.0).to(tl.float32)).to(y.dtype)
    if ADD:
        total = tl.load(residual + rows * residual_stride + own, mask=inside, other=0.0)
        y = (total.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
        tl.store(residual + rows * residual_stride + own, y, mask=inside)
    else:
        tl.store(out + rows * num_outputs + own, y, mask=inside)


def skinny_config(rows: int, n: int, k: int, gated: bool, itemsize: int = 2) -> SkinnyConfig:
    """Return the tiling for weights [n, k], as measured on the linear layers of 7B and 14B models. All programs of a
    launch are on the chip together where they can be, and the shared memory is theirs for tiles on their way."""
    padded = max(16, next_power_of_2(rows))
    tiles = cdiv(n // 2, _BLOCK_N // 2) if gated else cdiv(n, _BLOCK_N)
    split_k = neighbours = 1
    if tiles <= _MULTIPROCESSORS // 2:
        split_k = _MULTIPROCESSORS // tiles
    elif tiles < _MULTIPROCESSORS * 5 // 6:
        neighbours = 2
        split_k = 2 * _MULTIPROCESSORS // tiles
    elif itemsize == 1:
        neighbours = 3 if padded <= 32 else 2
    split_k = max(1, min(split_k, _MAX_SPLITS, cdiv(k, _BLOCK_K) // _MIN_STEPS))
    stage_bytes = itemsize * _BLOCK_K * (_BLOCK_N + padded)
    stages = min(_MAX_STAGES, (_SHARED_BYTES // neighbours - 1024) // stage_bytes)
    return SkinnyConfig(padded, _BLOCK_N, _BLOCK_K, split_k, _WARPS, stages, neighbours)


@cache
def _has_shared_memory(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= _SHARED_BYTES


def fits_skinny(x: PlainRows, weight: PlainWeight, max_fp8_rows: int = MAX_FP8_ROWS) -> bool:
    """Return whether the skinny kernels support this product."""
    rows, numbers = numbers_of(x), numbers_of(weight)
    return (
        rows.dim() == 2
        and 0 < rows.shape[0] <= (max_fp8_rows if rows.itemsize == 1 else MAX_ROWS)
        and rows.dtype == numbers.dtype
        and rows.dtype in _NARROW
        and rows.stride(1) == 1
        and numbers.stride(1) == 1
        and _has_shared_memory(rows.device)
    )


def skinny_linear(x: PlainRows, weight: PlainWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [rows, in] times weight [out, in] transposed."""
    rows = numbers_of(x)
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=dtype, device=rows.device)
    _launch(x, weight, bias, None, out)
    return out


def skinny_linear_add(x: PlainRows, weight: PlainWeight, bias: Tensor | None, residual: Tensor) -> None:
    """Add skinny_linear(x, weight, bias) to the residual in place."""
    _launch(x, weight, bias, residual, residual)


def skinny_gate_up(x: PlainRows, weight: PlainWeight, dtype: torch.dtype) -> Tensor:
    """Return silu_mul(skinny_linear(x, weight)), the weight [2 * width, in] with the gates' rows first."""
    rows = numbers_of(x)
    out = torch.empty(rows.shape[0], weight.shape[0] // 2, dtype=dtype, device=rows.device)
    _launch(x, weight, None, None, out, gated=True)
    return out


def _launch(
    x: PlainRows,
    weight: PlainWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool = False,
    config: SkinnyConfig | None = None,
) -> None:
    inputs, x_scales, numbers, scales = numbers_of(x), scales_of(x), numbers_of(weight), scales_of(weight)
    num_rows, k = inputs.shape
    if num_rows > MAX_FP8_ADDED_ROWS or inputs.stride(1) != 1 or numbers.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"at most {MAX_FP8_ADDED_ROWS} rows, each contiguous")
    if config is None:
        config = skinny_config(num_rows, weight.shape[0], k, gated, numbers.itemsize)
    rows, block_n, block_k, split_k, warps, stages, neighbours, prefetch = config
    num_outputs = out.shape[1]
    tiles = cdiv(num_outputs, block_n // 2 if gated else block_n)
    if split_k > 1:
        partials = torch.empty(tiles * split_k * block_n * rows, dtype=torch.float32, device=out.device)
        counters = zeroed_counters(out.device)
    else:
        partials = counters = out
    is_aligned = numbers.data_ptr() % 16 == 0 and numbers.stride(0) * numbers.itemsize % 16 == 0
    _skinny_kernel[(tiles, split_k)](
        inputs, out if x_scales is None else x_scales, numbers, out if scales is None else scales,
        out if bias is None else bias, out if residual is None else residual, out, partials, counters,
        num_rows, num_outputs, k, inputs.stride(0), numbers.stride(0), 0 if scales is None else scales.stride(0),
        0 if residual is None else residual.stride(0), prefetch if is_aligned else 0,
        ROWS=rows, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split_k, EVEN_K=k % block_k == 0,
        SCALED=scales is not None, GROUPED=scales is not None and len(scales) > 1,
        BIAS=bias is not None, GATED=gated, ADD=residual is not None,
        num_warps=warps, num_stages=stages, maxnreg=min(255, _REGISTERS // (32 * warps * neighbours)) // 8 * 8,
        **launch_options(),
    )  # fmt: skip


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, QuantisedWeight):
        return reference.linear(x, weight, bias)
    if isinstance(weight, IntWeight):
        return int_linears.linear(x, weight, bias)
    if _is_vector(x, weight):
        return gemv.gemv(x, weight, bias)
    return _linear(_rows_for(weight, x), weight, bias, x.dtype)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, QuantisedWeight):
        return reference.norm_linear(x, norm, eps, weight, bias)
    if isinstance(weight, IntWeight):
        return int_linears.norm_linear(x, norm, eps, weight, bias)
    if _is_vector(x, weight):
        return gemv.norm_gemv(x, norm, eps, weight, bias)
    return _linear(_rows_for(weight, x, norm, eps), weight, bias, x.dtype)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor:
    if isinstance(weight, QuantisedWeight):
        return reference.norm_gate_up(x, norm, eps, weight)
    if isinstance(weight, IntWeight):
        return int_linears.norm_gate_up(x, norm, eps, weight)
    if _is_vector(x, weight):
        return gemv.norm_gate_up_gemv(x, norm, eps, weight)
    rows = _rows_for(weight, x, norm, eps)
    if _is_skinny(rows, weight):
        return skinny_gate_up(rows, weight, x.dtype)
    return silu_mul(_linear(rows, weight, None, x.dtype))


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> None:
    if isinstance(weight, QuantisedWeight):
        reference.linear_add(x, weight, bias, residual)
    elif isinstance(weight, IntWeight):
        int_linears.linear_add(x, weight, bias, residual)
    elif _is_vector(x, weight):
        gemv.gemv_add(x, weight, bias, residual)
    else:
        _linear_add(_rows_for(weight, x), weight, bias, residual)


def add_mlp(residual: Tensor, norm: Tensor, eps: float, gate_up: Weight, down: Weight) -> None:
    num_rows = len(residual)
    if num_rows > MAX_FP8_ROWS and _is_e4m3(gate_up, num_rows) and _is_e4m3(down, num_rows):
        rows = fp8_linears.quantise_gated(norm_linear(residual, norm, eps, gate_up))
        # Written out no earlier: it takes memory, and may be in the L2 cache when it is multiplied.
        rounded = down if isinstance(down, Fp8Weight) else int_linears.rounded(down)
        _linear_add(rows, rounded, None, residual)
    else:
        linear_add(norm_gate_up(residual, norm, eps, gate_up), down, None, residual)


def _is_e4m3(weight: Weight, num_rows: int) -> TypeGuard[Fp8Weight | IntWeight]:
    """Return whether this many rows are multiplied by numbers of e4m3."""
    return isinstance(weight, Fp8Weight) or (isinstance(weight, IntWeight) and int_linears.is_rounded(weight, num_rows))


def _linear_add(x: PlainRows, weight: PlainWeight, bias: Tensor | None, residual: Tensor) -> None:
    if isinstance(x, ScaledRows) and not isinstance(weight, Tensor):
        is_wide = fp8_linears.is_wide(x, weight, residual)
        if _is_skinny(x, weight, MAX_FP8_ROWS if is_wide else MAX_FP8_ADDED_ROWS):
            skinny_linear_add(x, weight, bias, residual)
        else:
            fp8_linears.linear_add(x, weight, bias, residual)
    elif _is_skinny(x, weight):
        skinny_linear_add(x, weight, bias, residual)
    else:
        residual.addmm_(numbers_of(x), numbers_of(weight).t())
        if bias is not None:
            residual.add_(bias)


def _linear(x: PlainRows, weight: PlainWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if _is_skinny(x, weight):
        return skinny_linear(x, weight, bias, dtype)
    if isinstance(x, ScaledRows) and not isinstance(weight, Tensor):
        return fp8_linears.linear(x, weight, bias, dtype)
    return F.linear(numbers_of(x), numbers_of(weight), bias)


def _rows_for(weight: PlainWeight, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> PlainRows:
    """Return x or its RMSNorm, quantised if the weight is."""
    if isinstance(weight, Fp8Weight):
        return fp8_linears.quantise_rows(x, norm, eps)
    normal = x if norm is None else rms_norm(x, norm, eps)
    return fp8_linears.rotated_rows(normal) if isinstance(weight, RotatedWeight) else normal


def _is_vector(x: Tensor, weight: PlainWeight) -> bool:
    return gemv.fits(x, weight) and is_on("gemv")


def _is_skinny(x: PlainRows, weight: PlainWeight, max_fp8_rows: int = MAX_FP8_ROWS) -> bool:
    return fits_skinny(x, weight, max_fp8_rows) and is_on("skinny")
