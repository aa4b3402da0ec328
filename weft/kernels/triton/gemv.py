"""Linear layers of one row: every weight is read once, at the memory's speed.

A program owns a few outputs and walks along the whole of their weights, the next tile on its way while this one is
multiplied. What stands before a linear layer (RMSNorm) and behind it (bias, SiLU·mul, the residual's sum) can be
part of it: at batch 1 a kernel of its own costs as much as reading 10 MB of weights.

Weights of eight bits are widened as they are multiplied, and their scales applied to the sums.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.fp8 import GROUP, Fp8Weight
from weft.kernels.triton.elementwise import silu_times
from weft.kernels.triton.launch import (
    awaits_slow_kernels,
    cdiv,
    has_gluon,
    launch_options,
    next_power_of_2,
    wait_for_inputs,
)
from weft.kernels.weights import PlainWeight, numbers_of, scales_of
from weft.switches import is_on

_NARROW = (torch.bfloat16, torch.float16)
MIN_STREAMED_OUTPUTS, MAX_STREAMED_COLUMNS = 16 * 132, 16_384
"""Outputs that leave no multiprocessor of an H200 without work, and columns whose inputs leave room for three tiles of
weights beside them."""
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _weights(at, start, columns, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at + start, eviction_policy="evict_first")
    return tl.load(at + start, mask=columns < K - start, other=0.0, eviction_policy="evict_first")


@triton.jit
def _partial_sums(values, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr):
    """Sum groups of WIDTH neighbours, each held by one thread."""
    return tl.sum(tl.reshape(values, [OUTPUTS, BLOCK_K // WIDTH, WIDTH]), axis=2)


@triton.jit
def _multiplied(
    sums, squares, tile, x_at, norm_at, scales_at, scales_stride, start, columns,
    K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr, GROUPED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    inside = WHOLE | (columns < K - start)
    x = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares += _partial_sums(x * x, 1, BLOCK_K, WIDTH)
        x = x * tl.load(norm_at + start, mask=inside, other=0.0).to(tl.float32)
    products = _partial_sums(tile.to(tl.float32) * x, OUTPUTS, BLOCK_K, WIDTH)
    if GROUPED:
        column = start + tl.arange(0, BLOCK_K // WIDTH)[None, :] * WIDTH
        products *= tl.load(scales_at + column // _GROUP * scales_stride, mask=column < K, other=0.0)
    return sums + products, squares


@triton.jit
def _gemv_kernel(
    x, weight, scales, bias, norm, residual, out, num_outputs, weight_stride, scales_stride, eps,
    K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`num_outputs` counts elements of `out`. Gated, the program's first OUTPUTS / 2 rows of weights are gates and the
    others their ups, `num_outputs` further down."""
    OWN: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    WIDTH: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    first = tl.program_id(0) * OWN
    part = tl.arange(0, OUTPUTS)[:, None]
    output = tl.minimum(first + part % OWN, num_outputs - 1).to(tl.int64)
    if GATED:
        output += (part // OWN) * num_outputs
    columns = tl.arange(0, BLOCK_K)[None, :]
    at = weight + output * weight_stride + columns
    x_at = x + columns
    norm_at = norm + columns
    scales_at = scales + output

    # Of weights of eight bits only the last tile is masked, where it is partial; those of 16 are faster with masks.
    REST: tl.constexpr = K % BLOCK_K if SCALED else 0
    EVEN: tl.constexpr = K % BLOCK_K == 0
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    tile = _weights(at, 0, columns, K, EVEN or (SCALED and LAST > 0))
    wait_for_inputs(PDL)
    sums = tl.zeros([OUTPUTS, BLOCK_K // WIDTH], dtype=tl.float32)
    squares = tl.zeros([1, BLOCK_K // WIDTH], dtype=tl.float32)
    for start in range(BLOCK_K, K - REST, BLOCK_K):
        coming = _weights(at, start, columns, K, EVEN or SCALED)
        sums, squares = _multiplied(
            sums, squares, tile, x_at, norm_at, scales_at, scales_stride, start - BLOCK_K, columns,
            K, OUTPUTS, BLOCK_K, WIDTH, NORM, GROUPED, SCALED,
        )  # fmt: skip
        tile = coming
    if REST > 0 and LAST > 0:
        coming = _weights(at, LAST, columns, K, False)
        sums, squares = _multiplied(
            sums, squares, tile, x_at, norm_at, scales_at, scales_stride, LAST - BLOCK_K, columns,
            K, OUTPUTS, BLOCK_K, WIDTH, NORM, GROUPED, True,
        )  # fmt: skip
        tile = coming
    sums, squares = _multiplied(
        sums, squares, tile, x_at, norm_at, scales_at, scales_stride, LAST, columns,
        K, OUTPUTS, BLOCK_K, WIDTH, NORM, GROUPED, EVEN and SCALED,
    )  # fmt: skip
    y = tl.sum(sums, axis=1)
    if SCALED and not GROUPED:
        y = y * tl.reshape(tl.load(scales_at), [OUTPUTS])
    if NORM:
        y = y * tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    y = y.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OWN]), [1, 0]))
        y = silu_times(gate, up).to(out.dtype.element_ty)
    own = first + tl.arange(0, OWN)
    inside = own < num_outputs
    if BIAS:
        y = (y.to(tl.float32) + tl.load(bias + own, mask=inside, other=0.0).to(tl.float32)).to(y.dtype)
    if ADD:
        total = tl.load(residual + own, mask=inside, other=0.0)
        y = (total.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
        tl.store(residual + own, y, mask=inside)
    else:
        tl.store(out + own, y, mask=inside)


def fits(x: Tensor, weight: PlainWeight) -> bool:
    """Return whether these kernels support this product."""
    return (
        x.dim() == 2
        and x.shape[0] == 1
        and (isinstance(weight, Fp8Weight) or (isinstance(weight, Tensor) and x.dtype == weight.dtype))
        and x.dtype in _NARROW
        and x.stride(1) == 1
        and numbers_of(weight).stride(1) == 1
    )


def gemv(x: Tensor, weight: PlainWeight, bias: Tensor | None = None) -> Tensor:
    out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, None, 0.0, None, out)
    return out


def norm_gemv(x: Tensor, norm: Tensor, eps: float, weight: PlainWeight, bias: Tensor | None = None) -> Tensor:
    """Return linear(rms_norm(x, norm, eps), weight, bias), without rounding the normalised x."""
    out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, norm, eps, None, out)
    return out


def gemv_add(x: Tensor, weight: PlainWeight, bias: Tensor | None, residual: Tensor) -> None:
    """Add linear(x, weight, bias) to the residual in place."""
    _launch(x, weight, bias, None, 0.0, residual, residual)


def gate_up_gemv(x: Tensor, weight: PlainWeight) -> Tensor:
    """Return silu_mul(linear(x, weight)), the weight [2 * width, in] with the gates' rows first."""
    out = torch.empty(1, weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, None, 0.0, None, out, gated=True)
    return out


def norm_gate_up_gemv(x: Tensor, norm: Tensor, eps: float, weight: PlainWeight) -> Tensor:
    """Return gate_up_gemv(rms_norm(x, norm, eps), weight), without rounding the normalised x."""
    out = torch.empty(1, weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, norm, eps, None, out, gated=True)
    return out


def _launch(
    x: Tensor,
    weight: PlainWeight,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    gated: bool = False,
) -> None:
    if not fits(x, weight) or out.stride(1) != 1:
        raise ValueError("one row, contiguous, and weights of its narrow type")
    if _is_streamed(weight):
        # Triton 3.6 alone has what it is written in.
        from weft.kernels.triton import streamed_gemv

        streamed_gemv.launch(x, weight, bias, norm, eps, residual, out, gated)
        return
    numbers, scales = numbers_of(weight), scales_of(weight)
    outputs, block_bytes = _tiling(weight.shape[0], x.shape[1], numbers.itemsize)
    own = outputs // 2 if gated else outputs
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    k = x.shape[1]
    _gemv_kernel[(cdiv(num_outputs, own),)](
        x, numbers, x if scales is None else scales, x if bias is None else bias, x if norm is None else norm,
        x if residual is None else residual, out,
        num_outputs, numbers.stride(0), 0 if scales is None else scales.stride(0), eps,
        K=k, OUTPUTS=outputs, BLOCK_K=min(block_bytes // numbers.itemsize, max(16, next_power_of_2(k))),
        SCALED=scales is not None, GROUPED=scales is not None and len(scales) > 1,
        BIAS=bias is not None, NORM=norm is not None, GATED=gated, ADD=residual is not None,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def _is_streamed(weight: PlainWeight) -> bool:
    """Return whether the kernel for compute capability 9 is to multiply this weight."""
    numbers, scales = numbers_of(weight), scales_of(weight)
    return (
        weight.shape[0] >= MIN_STREAMED_OUTPUTS
        and weight.shape[1] <= MAX_STREAMED_COLUMNS
        and weight.shape[1] * numbers.itemsize % 128 == 0
        and numbers.is_contiguous()
        and numbers.data_ptr() % 16 == 0
        and (scales is None or len(scales) == 1)
        and not awaits_slow_kernels()
        and has_gluon()
        and is_on("streamed-gemv")
    )


def _tiling(num_outputs: int, k: int, itemsize: int) -> tuple[int, int]:
    """Return how many outputs a program has, and the bytes of a row of weights that it takes at a time, as measured in
    steps of a 7B model on an H200: eight outputs where that leaves several programs for each multiprocessor, but of
    weights of eight bits, which are widened, where it does not; of long rows of these, two."""
    if num_outputs < 2048:
        return 2, 2048
    if itemsize == 1 and num_outputs < 8192 <= k:
        return 2, 4096
    return 8 if (num_outputs >= 8192) == (itemsize > 1) else 4, 2048
