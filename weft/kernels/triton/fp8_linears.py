"""Linear layers with weights of eight bits, e4m3 or rotated: rows are quantised to the same, what stands before the
layer (RMSNorm, SiLU·mul) included, and many rows are multiplied.

Weights of e4m3 with one scale a row are multiplied by the library; those with a scale for every group of columns, types
and shapes that the library does not have, rotated weights, and products that are added to the residual, by the tiled
kernel here, or by that of `wide_linears`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.fp8 import E4M3, E4M3_MAX, GROUP, SMALLEST_SCALE, ScaledRows
from weft.kernels.rotated import MOST, SIDE
from weft.kernels.triton.elementwise import divided, normalised, silu_times
from weft.kernels.triton.launch import (
    awaits_slow_kernels,
    cdiv,
    has_gluon,
    launch_options,
    next_power_of_2,
    wait_for_inputs,
)
from weft.kernels.weights import ScaledWeight
from weft.switches import is_on

_GROUP, _E4M3_MAX, _SMALLEST_SCALE = tl.constexpr(GROUP), tl.constexpr(E4M3_MAX), tl.constexpr(SMALLEST_SCALE)
_LIBRARY_ALIGNMENT = 16
MIN_WIDE_ROWS, MAX_WIDE_ROWS = 65, 256
"""Rows from which the kernel for compute capability 9 is the fastest, and up to which it adds e4m3 products."""
_MULTIPROCESSORS = 132
_SIDE, _SHARE, _MOST = tl.constexpr(SIDE), tl.constexpr(SIDE**-0.5), tl.constexpr(MOST)


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
    tl.store(out + row * num_columns + columns, divided(wide, scale).to(out.dtype.element_ty), mask=inside)


def quantise_rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> ScaledRows:
    """Return the rows of x, or of their RMSNorm, as e4m3."""
    num_rows, num_columns = x.shape
    out = torch.empty(num_rows, num_columns, dtype=E4M3, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    rows = x if x.stride(1) == 1 else x.contiguous()
    block = max(64, next_power_of_2(num_columns))
    if num_rows:
        _quantise_kernel[(num_rows,)](
            rows, rows if norm is None else norm, out, scales, num_columns, rows.stride(0), eps,
            BLOCK=block, NORM=norm is not None, num_warps=min(16, max(4, block // 512)), **launch_options(),
        )  # fmt: skip
    return ScaledRows(out, scales)


_GATED_BLOCK = 2048


@triton.jit
def _quantise_gated_kernel(
    gate_up, out, scales, width, stride, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A row stays in registers, in blocks: one power of two might be twice as wide."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    gates = gate_up + row * stride + column
    wait_for_inputs(PDL)
    held = ()
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for block in tl.static_range(BLOCKS):
        inside = column < width - block * BLOCK
        gate = tl.load(gates + block * BLOCK, mask=inside, other=0.0)
        up = tl.load(gates + block * BLOCK + width, mask=inside, other=0.0)
        value = silu_times(gate, up).to(gate.dtype)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
        held = held + (value,)  # type: ignore[assignment]  # noqa: RUF005 (the compiler knows no other way)
    scale = tl.maximum(tl.max(largest) / _E4M3_MAX, _SMALLEST_SCALE)
    tl.store(scales + row, scale)
    for block in tl.static_range(BLOCKS):
        rounded = divided(held[block].to(tl.float32), scale).to(out.dtype.element_ty)
        tl.store(out + row * width + block * BLOCK + column, rounded, mask=column < width - block * BLOCK)


def quantise_gated(gate_up: Tensor) -> ScaledRows:
    """Return quantise_rows(silu_mul(gate_up)), the same numbers."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=E4M3, device=gate_up.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=gate_up.device)
    rows = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    block = min(_GATED_BLOCK, max(64, next_power_of_2(width)))
    if num_rows:
        _quantise_gated_kernel[(num_rows,)](
            rows, out, scales, width, rows.stride(0),
            BLOCK=block, BLOCKS=cdiv(width, block), num_warps=max(1, block // 256), **launch_options(),
        )  # fmt: skip
    return ScaledRows(out, scales)


@triton.jit
def _rotate_kernel(x, out, scales, num_columns, stride, GROUPS: tl.constexpr, PDL: tl.constexpr):
    """GROUPS is a power of two, at least 16."""
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, _SIDE)
    column = tl.arange(0, GROUPS)[:, None] * _SIDE + within[None, :]
    # A sign is that of the number of bits that two columns have in common.
    common = within[:, None] & within[None, :]
    common ^= common >> 4
    common ^= common >> 2
    signs = 1 - 2 * ((common ^ common >> 1) & 1)
    wait_for_inputs(PDL)
    value = tl.load(x + row * stride + column, mask=column < num_columns, other=0.0)
    wide = tl.dot(value, signs.to(value.dtype), input_precision="ieee") * _SHARE
    # The sum is nothing, or no number.
    scale = tl.maximum(tl.max(tl.abs(wide)) / _MOST, _SMALLEST_SCALE) + tl.sum(wide * 0.0)
    tl.store(scales + row, scale)
    # A float32 to which this was added has no bits behind those of a whole number.
    numbers = (wide / scale + 12582912.0) - 12582912.0
    tl.store(out + row * num_columns + column, numbers.to(tl.int8), mask=column < num_columns)


def rotated_rows(x: Tensor) -> ScaledRows:
    """Return the rows of x for a rotated weight."""
    num_rows, num_columns = x.shape
    out = torch.empty(num_rows, num_columns, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    rows = x if x.stride(1) == 1 else x.contiguous()
    groups = max(16, next_power_of_2(num_columns // SIDE))
    if num_rows:
        _rotate_kernel[(num_rows,)](
            rows, out, scales, num_columns, rows.stride(0), GROUPS=groups, num_warps=min(16, max(4, groups // 16)),
            **launch_options(),
        )  # fmt: skip
    return ScaledRows(out, scales)


class TileConfig(NamedTuple):
    """The tiling of a product: one program takes `rows` rows and `block_n` outputs."""

    rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["num_rows"])
def _tiled_kernel(
    x, x_scales, weight, scales, bias, residual, out,
    num_rows, num_outputs, k, weight_stride, scales_stride, residual_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GROUPED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Neighbouring programs share weights."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output = tl.minimum(own, num_outputs - 1)
    column = tl.arange(0, BLOCK_K)
    # Rows behind the last are others once more. If all were the last one, every program would wait for the same bytes.
    x_at = x + (row % num_rows).to(tl.int64)[:, None] * k + column[None, :]
    weight_at = weight + output.to(tl.int64)[None, :] * weight_stride + column[:, None]
    wait_for_inputs(PDL)
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    y = tl.zeros([ROWS, BLOCK_N], dtype=SUM)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            inputs = tl.load(x_at + start)
            weights = tl.load(weight_at + start)
        else:
            inputs = tl.load(x_at + start, mask=(column < k - start)[None, :], other=0.0)
            weights = tl.load(weight_at + start, mask=(column < k - start)[:, None], other=0.0)
        if GROUPED:
            scale = tl.load(scales + start // _GROUP * scales_stride + output)
            y += tl.dot(inputs, weights) * scale[None, :]
        else:
            y = tl.dot(inputs, weights, y, out_dtype=SUM)

    y = y.to(tl.float32) * tl.load(x_scales + tl.minimum(row, num_rows - 1))[:, None]
    if not GROUPED:
        y *= tl.load(scales + output)[None, :]
    y = y.to(out.dtype.element_ty)
    rows = row.to(tl.int64)[:, None]
    inside = (rows < num_rows) & (own < num_outputs)[None, :]
    if BIAS:
        y = (y.to(tl.float32) + tl.load(bias + output)[None, :].to(tl.float32)).to(y.dtype)
    if ADD:
        total = tl.load(residual + rows * residual_stride + own[None, :], mask=inside, other=0.0)
        y = (total.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
        tl.store(residual + rows * residual_stride + own[None, :], y, mask=inside)
    else:
        tl.store(out + rows * num_outputs + own[None, :], y, mask=inside)


def tile_config(num_rows: int, num_outputs: int, grouped: bool) -> TileConfig:
    """Return the tiling, as measured on the linear layers of a 7B model: large tiles where they fill the chip."""
    # The scaled products of a group take as many registers as the sums.
    tilings = [] if grouped else [TileConfig(128, 256, 128, 8, 3)]
    tilings.append(TileConfig(128, 128, 128, 8, 4))
    if 192 < num_rows <= 256 and not grouped:
        tilings.append(TileConfig(128, 64, 128, 4, 6))
    for tiling in tilings:
        if cdiv(num_rows, tiling.rows) * cdiv(num_outputs, tiling.block_n) >= _MULTIPROCESSORS * 5 // 6:
            return tiling
    return TileConfig(64, 128, 128, 4, 5)


def tiled(
    x: ScaledRows,
    weight: ScaledWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    config: TileConfig | None = None,
) -> None:
    """Multiply rows by a weight into `out`, or add the product to the residual, which is `out` then."""
    num_rows, k = x.numbers.shape
    num_outputs = weight.shape[0]
    if num_rows == 0:
        return
    rows, block_n, block_k, warps, stages = config or tile_config(num_rows, num_outputs, len(weight.scales) > 1)
    _tiled_kernel[(cdiv(num_rows, rows), cdiv(num_outputs, block_n))](
        x.numbers, x.scales, weight.numbers, weight.scales,
        x.scales if bias is None else bias, x.scales if residual is None else residual, out,
        num_rows, num_outputs, k, weight.numbers.stride(0), weight.scales.stride(0),
        0 if residual is None else residual.stride(0),
        ROWS=rows, BLOCK_N=block_n, BLOCK_K=block_k, EVEN_K=k % block_k == 0, GROUPED=len(weight.scales) > 1,
        BIAS=bias is not None, ADD=residual is not None, num_warps=warps, num_stages=stages, **launch_options(),
    )  # fmt: skip


def linear(x: ScaledRows, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product as this type."""
    if _is_for_library(x, weight, dtype):
        return _library_product(x, weight, bias, dtype)
    out = torch.empty(len(x.numbers), weight.shape[0], dtype=dtype, device=x.numbers.device)
    multiply = wide_product() if is_wide(x, weight, out) else tiled
    multiply(x, weight, bias, None, out)
    return out


def linear_add(x: ScaledRows, weight: ScaledWeight, bias: Tensor | None, residual: Tensor) -> None:
    multiply = wide_product() if is_wide(x, weight, residual) else tiled
    multiply(x, weight, bias, residual, residual)


def is_wide(rows: ScaledRows, weight: ScaledWeight, out: Tensor) -> bool:
    """Return whether the kernel for compute capability 9 is to multiply these, where the library does not."""
    numbers = weight.numbers
    return (
        MIN_WIDE_ROWS <= len(rows.numbers) <= (MAX_WIDE_ROWS if numbers.dtype == E4M3 else len(rows.numbers))
        and len(weight.scales) == 1
        and out.itemsize == 2
        and numbers.shape[1] % _LIBRARY_ALIGNMENT == 0
        and numbers.is_contiguous()
        and numbers.data_ptr() % _LIBRARY_ALIGNMENT == 0
        and not awaits_slow_kernels()
        and has_gluon()
        and is_on("wide-linears")
    )


def wide_product() -> Callable[[ScaledRows, ScaledWeight, Tensor | None, Tensor | None, Tensor], None]:
    # Triton 3.6 alone has what it is written in.
    from weft.kernels.triton.wide_linears import wide

    return wide


def _is_for_library(rows: ScaledRows, weight: ScaledWeight, dtype: torch.dtype) -> bool:
    return (
        rows.numbers.dtype == E4M3
        and rows.numbers.device.type != "cpu"
        and len(rows.numbers) > 0
        and len(weight.scales) == 1
        and dtype == torch.bfloat16
        and not any(size % _LIBRARY_ALIGNMENT for size in weight.shape)
    )


def _library_product(rows: ScaledRows, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if rows.numbers.is_meta:  # what the library computes is not compiled ahead
        return torch.empty(len(rows.numbers), weight.shape[0], dtype=torch.bfloat16, device="meta")
    return torch._scaled_mm(
        rows.numbers, weight.numbers.t(), rows.scales, weight.scales, bias, out_dtype=dtype, use_fast_accum=True
    )
