"""Linear layers of one row on compute capability 9: weights stream through shared memory.

It computes what `gemv` does, in Gluon. Two programs share a multiprocessor and fill its shared memory with tiles of
weights: the copy engine brings the next one into a slot as soon as the last was read from it, and the first ones before
the inputs are there. With less on its way, and room for the next kernel's programs, steps were slower than by `gemv`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.triton.gluon_parts import let_next_begin, next_slot, wait_for_inputs
from weft.kernels.triton.launch import cdiv, launch_options
from weft.kernels.weights import PlainWeight, numbers_of, scales_of

LINE_BYTES = 128
"""The copy engine reads so much at once: a line. A tile has eight lines of each of sixteen rows of weights."""
_OUTPUTS, _LINES, _WARPS = gl.constexpr(16), gl.constexpr(8), gl.constexpr(4)
_HALF = gl.constexpr(_OUTPUTS.value // 2)
_TILE_BYTES = gl.constexpr(_OUTPUTS.value * _LINES.value * LINE_BYTES)
_FOUR = gl.constexpr(4)
"""The inputs of so many tiles are read at once."""
_SHARED_BYTES = 112 << 10
"""Each of two programs has so much of a multiprocessor's shared memory, and a KiB more for barriers and sums."""


@gluon.constexpr_function
def _layout(rows, width):
    """Return the layout of `rows`, eight lines and their columns. A thread has `width` neighbouring columns, eight
    threads have a line, and a warp has a line of four neighbouring rows."""
    columns = [[0, 0, 1 << bit] for bit in range(width.bit_length() - 1)]
    more_rows = [[4, 0, 0], [8, 0, 0]] if rows == 16 else []
    threads = [[0, 0, width], [0, 0, 2 * width], [0, 0, 4 * width], [1, 0, 0], [2, 0, 0]]
    shape = [rows, 8, 8 * width]
    return gl.DistributedLinearLayout(columns + more_rows + [[0, 4, 0]], threads, [[0, 1, 0], [0, 2, 0]], [], shape)


@gluon.constexpr_function
def _kept_layout(width):
    """Return the layout of a tile's inputs as they are kept: lines, quads of a thread's columns, threads, columns."""
    quads = [[0, 1 << bit, 0, 0] for bit in range(width.bit_length() - 3)]
    threads = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], *quads, [4, 0, 0, 0]], threads, [[1, 0, 0, 0], [2, 0, 0, 0]], [],
        [8, width // 4, 8, 4],
    )  # fmt: skip


@gluon.jit
def _copy(weight, slots, ready, slot, job, tile, num_outputs, GATED: gl.constexpr, pred):
    """Have a tile of a job's weights copied. Where there are none they are zeros."""
    mbarrier.expect(ready.index(slot), _TILE_BYTES, pred=pred)
    if GATED:
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                weight, [half * num_outputs + job * _HALF, tile * _LINES, 0], ready.index(slot),
                slots.index(slot).slice(half * _HALF, _HALF, 0), pred=pred,
            )  # fmt: skip
    else:
        tma.async_copy_global_to_shared(
            weight, [job * _OUTPUTS, tile * _LINES, 0], ready.index(slot), slots.index(slot), pred=pred
        )


@gluon.jit
def _keep_inputs(
    x, norm, kept, eps, K: gl.constexpr, FOURS: gl.constexpr, WIDTH: gl.constexpr, NORM: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Keep the inputs of all tiles in shared memory, times the norm's weights, and return what outputs are to be
    multiplied by."""
    layout: gl.constexpr = _layout(_FOUR, WIDTH)
    COLUMNS: gl.constexpr = 8 * WIDTH
    tile = gl.arange(0, _FOUR, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    line = gl.arange(0, _LINES, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    own = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    columns = (tile * _LINES + line) * COLUMNS + own
    norms = ()
    if NORM:
        for four in gl.static_range(FOURS):
            at = four * (_FOUR * _LINES * COLUMNS) + columns
            coming = gl.load(norm + at, mask=at < K, other=0.0)
            norms = norms + (coming,)  # type: ignore[assignment]  # noqa: RUF005 (the compiler knows no other way)
    wait_for_inputs(PDL)
    let_next_begin(PDL)
    places = kept._reinterpret(
        gl.float32, [FOURS, _FOUR, _LINES, WIDTH // 4, 8, 4], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    )
    squares = gl.zeros([_FOUR, _LINES, COLUMNS], gl.float32, layout)
    for four in gl.static_range(FOURS):
        at = four * (_FOUR * _LINES * COLUMNS) + columns
        value = gl.load(x + at, mask=at < K, other=0.0).to(gl.float32)
        if NORM:
            squares += value * value
            value = value * norms[four].to(gl.float32)
        # Threads that read at the same time read neighbouring quads.
        places.index(four).store(gl.permute(gl.reshape(value, [_FOUR, _LINES, 8, WIDTH // 4, 4]), [0, 1, 3, 2, 4]))
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.sum(gl.sum(squares, axis=2), axis=1), axis=0) / K + eps)
    gl.thread_barrier()
    return factor


@gluon.jit
def _streamed_gemv_kernel(
    weight, x, scales, bias, norm, residual, out, jobs, num_outputs, eps,
    K: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`num_outputs` counts elements of `out`. Gated, the first half of a job's rows of weights are gates and the others
    their ups, `num_outputs` further down."""
    COLUMNS: gl.constexpr = 8 * WIDTH
    TILES: gl.constexpr = (K + _LINES * COLUMNS - 1) // (_LINES * COLUMNS)
    FOURS: gl.constexpr = (TILES + _FOUR - 1) // _FOUR
    OWN: gl.constexpr = _HALF if GATED else _OUTPUTS
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(STAGES):
        mbarrier.init(ready.index(first), count=1)
    fence_async_shared()
    gl.thread_barrier()
    slots = gl.allocate_shared_memory(
        weight.dtype, [STAGES, _OUTPUTS, _LINES, COLUMNS], gl.NVMMASharedLayout(128, 128 // WIDTH, 3)
    )
    kept = gl.allocate_shared_memory(
        gl.float32, [_FOUR * FOURS, _LINES, WIDTH // 4, 8, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    own, programs = gl.program_id(0), gl.num_programs(0)
    for first in gl.static_range(STAGES):
        first_job = own + first // TILES * programs
        _copy(weight, slots, ready, first, first_job, first % TILES, num_outputs, GATED, first_job < jobs)
    factor = _keep_inputs(x, norm, kept, eps, K, FOURS, WIDTH, NORM, PDL)

    layout: gl.constexpr = _layout(_OUTPUTS, WIDTH)
    of_sums: gl.constexpr = _layout(_OUTPUTS, 1)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    row = gl.arange(0, _OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, of_sums)))
    # What a loop carries begins as a tensor.
    slot, turn = own * 0, own * 0
    next_job, next_tile = own + STAGES // TILES * programs, own * 0 + STAGES % TILES
    for job in range(own, jobs, programs):
        output = job * OWN + gl.arange(0, OWN, layout=line)
        inside = output < num_outputs
        if SCALED:
            scale_at = job * OWN + row % OWN
            scale = gl.load(scales + scale_at + row // OWN * num_outputs, mask=scale_at < num_outputs, other=0.0)
        if ADD:
            total = gl.load(residual + output, mask=inside, other=0.0)
        sums = gl.zeros([_OUTPUTS, _LINES, 8], gl.float32, of_sums)
        for tile in range(TILES):
            mbarrier.wait(ready.index(slot), turn)
            weights = slots.index(slot).load(layout)
            inputs = gl.permute(kept.index(tile).load(_kept_layout(WIDTH)), [0, 2, 1, 3])
            inputs = gl.convert_layout(
                gl.reshape(inputs, [_LINES, COLUMNS]), gl.SliceLayout(0, layout), assert_trivial=True
            )
            gl.thread_barrier()
            _copy(weight, slots, ready, slot, next_job, next_tile, num_outputs, GATED, next_job < jobs)
            is_end = next_tile == TILES - 1
            next_job, next_tile = gl.where(is_end, next_job + programs, next_job), gl.where(is_end, 0, next_tile + 1)
            slot, turn = next_slot(slot, turn, STAGES)
            products = gl.reshape(weights.to(gl.float32) * gl.expand_dims(inputs, 0), [_OUTPUTS, _LINES, 8, WIDTH])
            sums += gl.convert_layout(gl.sum(products, axis=3), of_sums, assert_trivial=True)
        y = gl.sum(gl.sum(sums, axis=2), axis=1) * factor
        if SCALED:
            y = y * scale
        y = y.to(out.dtype.element_ty)
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(y, [2, OWN]), [1, 0]))
            wide = gate.to(gl.float32)
            y = ((wide / (1.0 + gl.exp(-wide))).to(y.dtype).to(gl.float32) * up.to(gl.float32)).to(y.dtype)
        y = gl.convert_layout(y, line)
        if BIAS:
            y = (y.to(gl.float32) + gl.load(bias + output, mask=inside, other=0.0).to(gl.float32)).to(y.dtype)
        if ADD:
            gl.store(residual + output, (total.to(gl.float32) + y.to(gl.float32)).to(y.dtype), mask=inside)
        else:
            gl.store(out + output, y, mask=inside)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def launch(
    x: Tensor, weight: PlainWeight, bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
    out: Tensor, gated: bool,
) -> None:  # fmt: skip
    """Compute what `gemv` launches its kernel for."""
    numbers, scales = numbers_of(weight), scales_of(weight)
    num_rows, k = numbers.shape
    width, columns = 16 // numbers.itemsize, LINE_BYTES // numbers.itemsize
    num_outputs, own = (num_rows // 2, _HALF.value) if gated else (num_rows, _OUTPUTS.value)
    jobs = cdiv(num_outputs, own)
    four_columns = _FOUR.value * _LINES.value * columns
    kept_bytes = 4 * cdiv(k, four_columns) * four_columns
    _streamed_gemv_kernel[(min(jobs, 2 * _multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(
            numbers.view(num_rows, -1, columns), [own, _LINES.value, columns],
            gl.NVMMASharedLayout(128, 8 * numbers.itemsize, 3),
        ),
        x, x if scales is None else scales, x if bias is None else bias, x if norm is None else norm,
        x if residual is None else residual, out, jobs, num_outputs, eps,
        K=k, STAGES=(_SHARED_BYTES - kept_bytes) // _TILE_BYTES.value, WIDTH=width,
        SCALED=scales is not None, BIAS=bias is not None, NORM=norm is not None, GATED=gated, ADD=residual is not None,
        num_warps=_WARPS.value, **launch_options(),
    )  # fmt: skip
