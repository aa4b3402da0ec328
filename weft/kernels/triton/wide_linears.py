"""Products of many rows of eight bits, for the asynchronous matrix units of compute capability 9.

It computes what the tiled kernel of `fp8_linears` does, in Gluon. One warp of a program has the copy engine bring
blocks of 128 columns of the rows and of the weights; groups of four warps, each with 64 outputs, multiply them as they
come. `out` is computed transposed. Blocks of weights are on their way before the rows are there, and those of a
program's next job while the last one's outputs are stored.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.fp8 import ScaledRows
from weft.kernels.triton.gluon_parts import let_next_begin, next_slot, wait_for_inputs
from weft.kernels.triton.launch import cdiv, launch_options
from weft.kernels.weights import ScaledWeight

_ROWS, _OWN, _BLOCK = gl.constexpr(128), gl.constexpr(64), gl.constexpr(128)
"""The rows of a job, the outputs of a group, and the columns that are copied at once."""
_MULTIPROCESSORS = 132
_FEW_OUTPUTS = _MULTIPROCESSORS * _OWN.value
"""Outputs up to which two groups to a program would leave multiprocessors of an H200 without work."""
_STAGES = {1: 9, 2: 6}
"""Blocks that are on their way or in use, by the groups: as many as the shared memory holds."""


@gluon.jit
def _before(slot, STAGES: gl.constexpr):
    """Return the slot before. In Triton 3.6 a name that a loop carries cannot be bound to another such name."""
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def _copy_weights(weight, weights, tile, block, ready, slot, pred):
    for group in gl.static_range(len(weights)):
        tma.async_copy_global_to_shared(
            weight, [(tile * len(weights) + group) * _OWN, block * _BLOCK], ready.index(slot),
            weights[group].index(slot), pred=pred,
        )  # fmt: skip


@gluon.jit
def _copy(x, weight, rows, weights, ready, free, row_job, tile, block, slot, turn):
    """Copy a block when its slot is free."""
    mbarrier.wait(free.index(slot), turn ^ 1)
    mbarrier.expect(ready.index(slot), (_ROWS + len(weights) * _OWN) * _BLOCK)
    _copy_weights(weight, weights, tile, block, ready, slot, True)
    tma.async_copy_global_to_shared(x, [row_job * _ROWS, block * _BLOCK], ready.index(slot), rows.index(slot))


@gluon.jit
def _produce(x, weight, rows, weights, barriers, work, STAGES: gl.constexpr, PDL: gl.constexpr):
    """Copy all blocks of all jobs."""
    ready, free = barriers
    row_jobs, jobs, num_blocks, _, _, _ = work
    own = gl.program_id(0)
    for early in gl.static_range(STAGES):
        mbarrier.expect(ready.index(early), (_ROWS + len(weights) * _OWN) * _BLOCK, pred=early < num_blocks)
        _copy_weights(weight, weights, own // row_jobs, early, ready, early, early < num_blocks)
    wait_for_inputs(PDL)
    let_next_begin(PDL)
    for early in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [own % row_jobs * _ROWS, early * _BLOCK], ready.index(early), rows.index(early), pred=early < num_blocks
        )
    # To divide for each block would take longer than to multiply it.
    first = gl.minimum(num_blocks, STAGES)
    slot, turn = first % STAGES, first // STAGES
    for block in range(first, num_blocks):
        _copy(x, weight, rows, weights, ready, free, own % row_jobs, own // row_jobs, block, slot, turn)
        slot, turn = next_slot(slot, turn, STAGES)
    for job in range(own + gl.num_programs(0), jobs, gl.num_programs(0)):
        row_job, tile = job % row_jobs, job // row_jobs
        for block in range(num_blocks):
            _copy(x, weight, rows, weights, ready, free, row_job, tile, block, slot, turn)
            slot, turn = next_slot(slot, turn, STAGES)


@gluon.jit
def _consume(
    outputs, group, rows, weights, barriers, work, GROUPS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr,
    ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute and store one group's outputs of all jobs."""
    ready, free = barriers
    row_jobs, jobs, num_blocks, _, _, _ = work
    units: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 32])
    TYPE: gl.constexpr = gl.int32 if rows.dtype.is_int() else gl.float32
    # What a loop carries begins as a tensor.
    slot, turn = gl.program_id(0) * 0, gl.program_id(0) * 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        y = gl.zeros([_OWN, _ROWS], TYPE, units)
        for block in range(num_blocks):
            mbarrier.wait(ready.index(slot), turn)
            y = warpgroup_mma(weights.index(slot), rows.index(slot).permute((1, 0)), y, is_async=True)
            y = warpgroup_mma_wait(1, deps=[y])
            mbarrier.arrive(free.index(_before(slot, STAGES)), count=1, pred=block > 0)
            slot, turn = next_slot(slot, turn, STAGES)
        y = warpgroup_mma_wait(0, deps=[y])
        mbarrier.arrive(free.index(_before(slot, STAGES)), count=1)
        wait_for_inputs(PDL)
        _store(y, outputs, job % row_jobs * _ROWS, (job // row_jobs * GROUPS + group) * _OWN, work, units, BIAS, ADD)


@gluon.jit
def _store(y, outputs, first_row, first_output, work, units: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr):
    """Store the sums of 64 outputs and 128 rows."""
    x_scales, scales, bias, residual, out = outputs
    _, _, _, num_rows, num_outputs, residual_stride = work
    output = first_output + gl.arange(0, _OWN, layout=gl.SliceLayout(1, units))
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, units))
    scale = gl.load(scales + output, mask=output < num_outputs, other=0.0)
    x_scale = gl.load(x_scales + row, mask=row < num_rows, other=0.0)
    z = (y.to(gl.float32) * x_scale[None, :] * scale[:, None]).to(out.dtype.element_ty)
    if BIAS:
        added = gl.load(bias + output, mask=output < num_outputs, other=0.0)
        z = (z.to(gl.float32) + added.to(gl.float32)[:, None]).to(z.dtype)
    # A thread has eight neighbours of a row.
    by_eights: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [0, 16], [0, 32], [0, 64]], [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]],
        [[16, 0], [32, 0]], [], [_OWN, _ROWS],
    )  # fmt: skip
    z = gl.convert_layout(z, by_eights)
    line = (first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, by_eights)))[None, :]
    column = (first_output + gl.arange(0, _OWN, layout=gl.SliceLayout(1, by_eights)))[:, None]
    mask = (line < num_rows) & (column < num_outputs)
    if ADD:
        total_at = residual + line.to(gl.int64) * residual_stride + column
        total = gl.load(total_at, mask=mask, other=0.0)
        gl.store(total_at, (total.to(gl.float32) + z.to(gl.float32)).to(z.dtype), mask=mask)
    else:
        gl.store(out + line.to(gl.int64) * num_outputs + column, z, mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "jobs"])
def _wide_kernel(
    x, weight, x_scales, scales, bias, residual, out, num_rows, num_outputs, num_blocks, residual_stride, jobs,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Neighbouring programs share weights."""
    laid: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=GROUPS)
    gl.thread_barrier()
    barriers = (ready, free)
    work = (gl.cdiv(num_rows, _ROWS), jobs, num_blocks, num_rows, num_outputs, residual_stride)
    outputs = (x_scales, scales, bias, residual, out)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, _ROWS, _BLOCK], laid)
    first = gl.allocate_shared_memory(weight.dtype, [STAGES, _OWN, _BLOCK], laid)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (outputs, 0, rows, first, barriers, work, GROUPS, STAGES, BIAS, ADD, PDL)),
                (_produce, (x, weight, rows, (first,), barriers, work, STAGES, PDL)),
            ],
            [1],
            [40],
        )
    else:
        second = gl.allocate_shared_memory(weight.dtype, [STAGES, _OWN, _BLOCK], laid)
        gl.warp_specialize(
            [
                (_consume, (outputs, 0, rows, first, barriers, work, GROUPS, STAGES, BIAS, ADD, PDL)),
                (_consume, (outputs, 1, rows, second, barriers, work, GROUPS, STAGES, BIAS, ADD, PDL)),
                (_produce, (x, weight, rows, (first, second), barriers, work, STAGES, PDL)),
            ],
            [4, 1],
            [216, 40],
        )


def wide(x: ScaledRows, weight: ScaledWeight, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """Multiply rows by a weight into `out`, or add the product to the residual, which is `out` then. Outputs have two
    bytes, weights one scale a row, and columns are a multiple of 16."""
    num_rows, k = x.numbers.shape
    num_outputs = weight.shape[0]
    groups = 1 if num_outputs <= _FEW_OUTPUTS else 2
    laid = gl.NVMMASharedLayout(128, 8, 2)
    jobs = cdiv(num_rows, _ROWS.value) * cdiv(num_outputs, _OWN.value * groups)
    _wide_kernel[(min(jobs, _MULTIPROCESSORS),)](
        TensorDescriptor.from_tensor(x.numbers, [_ROWS.value, _BLOCK.value], laid),
        TensorDescriptor.from_tensor(weight.numbers, [_OWN.value, _BLOCK.value], laid),
        x.scales, weight.scales, out if bias is None else bias, out if residual is None else residual, out,
        num_rows, num_outputs, cdiv(k, _BLOCK.value), 0 if residual is None else residual.stride(0), jobs,
        GROUPS=groups, STAGES=_STAGES[groups], BIAS=bias is not None, ADD=residual is not None, num_warps=4,
        **launch_options(),
    )  # fmt: skip
