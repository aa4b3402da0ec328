"""Causal attention of many new tokens over the paged cache, for the asynchronous matrix units of compute capability 9.

It computes what `prefill_attention` does, in the same order of sums, in Gluon, Triton's language for one's own layouts
and waits. Four warps of a program copy tiles of the cache; two times four compute, 64 queries each, at their own pace:
while the matrix units multiply for one group, the softmax of the other's is computed.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from weft.kernels.batch import HeadShape
from weft.kernels.triton.gluon_parts import let_next_begin, wait_for_inputs
from weft.kernels.triton.launch import cdiv, launch_options

_LEAST = gl.constexpr(-1.0e30)
_QUERIES, _TOKENS, _STAGES = 128, 128, 3
"""Queries and tokens of a tile, and tiles of keys and of values that are on their way or in use."""
HEAD_DIM, BLOCK_SIZE = 128, 16


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find(query_starts, num_sequences, rank, BLOCK_M: gl.constexpr):
    """The sequence and the tile of queries that come at this rank, as in `prefill_attention`."""
    WINDOW: gl.constexpr = 32
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    passed = 0
    before = 0
    total = 0
    for begin in range(0, num_sequences, WINDOW):
        sequence = num_sequences - 1 - begin - gl.arange(0, WINDOW, layout=line)
        start = gl.load(query_starts + sequence, mask=sequence >= 0, other=0).to(gl.int32)
        stop = gl.load(query_starts + sequence + 1, mask=sequence >= 0, other=0).to(gl.int32)
        tiles = (stop - start + BLOCK_M - 1) // BLOCK_M
        ends = total + gl.associative_scan(tiles, 0, _add)
        is_passed = (ends <= rank) & (sequence >= 0)
        passed += gl.sum(is_passed.to(gl.int32), axis=0)
        before = gl.maximum(before, gl.max(gl.where(is_passed, ends, 0), axis=0))
        total += gl.sum(tiles, axis=0)
    return num_sequences - 1 - passed, rank - before


@gluon.jit
def _numbers_of(table, tile, length, BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr, by_block: gl.constexpr):
    """Return the numbers of a tile's blocks in the cache; blocks behind the last token have the null block's."""
    block = tile * BLOCKS + gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, by_block)))
    return gl.load(table + block, mask=block * BLOCK_SIZE < length, other=0).to(gl.int32)


@gluon.jit
def _copy(slot, ready, at, numbers, tile, length, block_stride, DIM: gl.constexpr, TOKEN_STRIDE: gl.constexpr,
          BLOCK_SIZE: gl.constexpr, by_block: gl.constexpr):  # fmt: skip
    """Begin to copy a tile of keys or values, and tell when it is there; tokens behind the last one are zeros. A warp
    copies whole blocks."""
    BLOCKS: gl.constexpr = numbers.shape[0]
    by_token: gl.constexpr = gl.SliceLayout(2, by_block)
    token = gl.arange(0, BLOCK_SIZE, layout=gl.SliceLayout(0, by_token))[None, :]
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, by_block)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, by_token))[:, None]
    blocks_at = gl.expand_dims((at + numbers.to(gl.int64) * block_stride)[:, None], 2)
    inside = gl.expand_dims(block * BLOCK_SIZE + token < length - tile * (BLOCKS * BLOCK_SIZE), 2)
    places, inside = gl.broadcast(blocks_at + (gl.expand_dims(token, 2) * TOKEN_STRIDE + column), inside)
    # What the compiler knew of neighbouring columns is lost when the shape changes.
    places = gl.max_contiguous(gl.multiple_of(gl.reshape(places, slot.shape), [1, 16]), [1, 8])
    inside = gl.max_constancy(gl.reshape(inside, slot.shape), [1, 8])
    async_copy.async_copy_global_to_shared(slot, places, mask=inside)
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _softmax(scores, peak, scale, query_position, tile, BLOCK_N: gl.constexpr, MASKED: gl.constexpr,
             units: gl.constexpr, parts: gl.constexpr):  # fmt: skip
    """Return a tile's shares, their sums by thread, the new peak, and what earlier sums shrink by."""
    if MASKED:
        position = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, units))
        scores = gl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
    highest = gl.maximum(peak, gl.max(scores, axis=1) * scale)
    shrink = gl.exp2(peak - highest)
    shares = gl.exp2(scores * scale - highest[:, None])
    # A thread has eight pairs of a row's columns: it adds those up by itself.
    own = gl.reshape(shares, [shares.shape[0], BLOCK_N // 8, 4, 2])
    own = gl.convert_layout(gl.sum(gl.sum(own, axis=3), axis=1), parts)
    return shares, own, highest, shrink


@gluon.jit
def _produce(
    keys, values, keys_ready, keys_free, values_ready, values_free, keys_at, values_at, table, length, num_tiles,
    block_stride, DIM: gl.constexpr, TOKEN_STRIDE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy all tiles, each when its slot is free."""
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    by_block: gl.constexpr = gl.BlockedLayout(
        [1, BLOCK_SIZE * DIM // 256, 8], [1, 256 // DIM, DIM // 8], [4, 1, 1], [2, 1, 0]
    )
    numbers = _numbers_of(table, 0, length, BLOCKS, BLOCK_SIZE, by_block)
    for tile in range(num_tiles):
        slot, turn = tile % STAGES, tile // STAGES & 1
        coming = _numbers_of(table, tile + 1, length, BLOCKS, BLOCK_SIZE, by_block)
        mbarrier.wait(keys_free.index(slot), turn ^ 1)
        _copy(keys.index(slot), keys_ready.index(slot), keys_at, numbers, tile, length, block_stride, DIM, TOKEN_STRIDE,
              BLOCK_SIZE, by_block)  # fmt: skip
        mbarrier.wait(values_free.index(slot), turn ^ 1)
        _copy(values.index(slot), values_ready.index(slot), values_at, numbers, tile, length, block_stride, DIM,
              TOKEN_STRIDE, BLOCK_SIZE, by_block)  # fmt: skip
        numbers = coming


_IN_TURN = gl.constexpr("""{
.reg .pred never;
.reg .f32 most;
max.f32 most, $2, $3;
setp.eq.f32 never, most, 0f7F800000;
@never nanosleep.u32 1;
mov.b32 $0, $2;
mov.b32 $1, $3;
}""")
"""Sums of shares, which are never infinite, on which a branch depends: ptxas moves a wait for products before all that
does not need them, but not before a branch."""


@gluon.jit
def _multiply_keys(query_tile, keys, keys_ready, tile, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                   STAGES: gl.constexpr, units: gl.constexpr):  # fmt: skip
    """Begin to multiply the queries by a tile of keys."""
    slot, turn = tile % STAGES, tile // STAGES & 1
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, units)
    mbarrier.wait(keys_ready.index(slot), turn)
    fence_async_shared()
    return warpgroup_mma(query_tile, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_values(shares, sums, values, values_ready, tile, STAGES: gl.constexpr):
    """Begin to add a tile of values, each with its share."""
    slot, turn = tile % STAGES, tile // STAGES & 1
    mbarrier.wait(values_ready.index(slot), turn)
    fence_async_shared()
    return warpgroup_mma(shares, values.index(slot), sums, is_async=True)


@gluon.jit
def _attend(
    shares, sums, total, peak, query_tile, keys, values, keys_ready, keys_free, values_ready, values_free, first, end,
    query_position, scale, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
    units: gl.constexpr, out_units: gl.constexpr, parts: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles first..end. `shares` are those of the tile before, whose values are added while a tile's
    softmax is computed; those of the last are returned."""
    for tile in range(first, end):
        scores = _multiply_keys(query_tile, keys, keys_ready, tile, BLOCK_M, BLOCK_N, STAGES, units)
        sums = _add_values(shares, sums, values, values_ready, tile - 1, STAGES)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys_free.index(tile % STAGES), count=1)
        fresh, added, peak, shrink = _softmax(scores, peak, scale, query_position, tile, BLOCK_N, MASKED, units, parts)
        fresh = gl.convert_layout(fresh.to(keys.dtype), gl.DotOperandLayout(0, out_units, 2))
        # What is waited for with the sums is computed before, while they are.
        added = gl.inline_asm_elementwise(_IN_TURN, "=f,=f,f,f", [added], dtype=gl.float32, is_pure=False, pack=2)
        sums, shares, total, peak, shrink = warpgroup_mma_wait(0, deps=[sums, fresh, total, peak, shrink])
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, parts))[:, None] + added
        mbarrier.arrive(values_free.index((tile - 1) % STAGES), count=1)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, out_units))[:, None]
    return shares, sums, total, peak


@gluon.jit
def _consume(
    query_tile, keys, values, keys_ready, keys_free, values_ready, values_free, first_position, num_tiles, unmasked,
    out, num_queries, out_stride, scale, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the attention of one group's queries. `out` is the place of its first one's."""
    BLOCK_M: gl.constexpr = 64
    units: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_units: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    # The threads' parts of the sums of shares: four threads have a row of scores, each two rows.
    parts: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [BLOCK_M, 4]
    )
    query_position = first_position + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, units))
    peak = gl.full([BLOCK_M], _LEAST, gl.float32, gl.SliceLayout(1, units))
    sums = gl.zeros([BLOCK_M, DIM], gl.float32, out_units)
    scores = _multiply_keys(query_tile, keys, keys_ready, 0, BLOCK_M, BLOCK_N, STAGES, units)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys_free.index(0), count=1)
    fresh, total, peak, _ = _softmax(scores, peak, scale, query_position, 0, BLOCK_N, True, units, parts)
    shares = gl.convert_layout(fresh.to(keys.dtype), gl.DotOperandLayout(0, out_units, 2))
    shares, sums, total, peak = _attend(
        shares, sums, total, peak, query_tile, keys, values, keys_ready, keys_free, values_ready, values_free, 1,
        unmasked, query_position, scale, BLOCK_M, BLOCK_N, False, STAGES, units, out_units, parts,
    )  # fmt: skip
    shares, sums, total, peak = _attend(
        shares, sums, total, peak, query_tile, keys, values, keys_ready, keys_free, values_ready, values_free,
        gl.maximum(unmasked, 1), num_tiles, query_position, scale, BLOCK_M, BLOCK_N, True, STAGES, units, out_units,
        parts,
    )  # fmt: skip
    sums = _add_values(shares, sums, values, values_ready, num_tiles - 1, STAGES)
    sums = warpgroup_mma_wait(0, deps=[sums])
    total = gl.sum(total, axis=1)
    total = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, out_units))
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    line = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, out_units))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, out_units))
    gl.store(out + line[:, None] * out_stride + column[None, :], result, mask=(line < num_queries)[:, None])


@gluon.jit(do_not_specialize=["tables", "lengths", "query_starts", "table_stride", "num_rows", "num_sequences"])
def _wide_prefill_kernel(
    q, kv, tables, lengths, query_starts, out, num_rows, num_sequences,
    q_stride, block_stride, table_stride, out_stride, scale,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program takes 128 queries of one head."""
    BLOCK_M: gl.constexpr = 128
    HALF: gl.constexpr = BLOCK_M // 2
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = q.dtype.element_ty
    head = gl.program_id(0)
    wait_for_inputs(PDL)
    let_next_begin(PDL)
    sequence, rank = _find(query_starts, num_sequences, gl.program_id(1), BLOCK_M)
    origin = gl.load(query_starts)
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, by_row))
    line = gl.arange(0, HALF, layout=gl.SliceLayout(1, by_row))
    if sequence < 0:
        # Rows that no sequence owns lie behind the last one's. What is computed from them must not be NaN.
        nothing = gl.zeros([HALF, DIM], out.dtype.element_ty, by_row)
        spare = gl.load(query_starts + num_sequences) - origin + rank * BLOCK_M + line
        spare_at = out + spare[:, None] * out_stride + head * DIM + column[None, :]
        gl.store(spare_at, nothing, mask=(spare < num_rows)[:, None])
        gl.store(spare_at + HALF * out_stride, nothing, mask=(spare + HALF < num_rows)[:, None])
    else:
        start = gl.load(query_starts + sequence)
        count = (gl.load(query_starts + sequence + 1) - start).to(gl.int32)
        length = gl.load(lengths + sequence).to(gl.int32)
        own = (gl.cdiv(count, BLOCK_M) - 1 - rank) * BLOCK_M
        row = start - origin + own
        q_at = q + row * q_stride + head * DIM
        line_at = q_at + line[:, None] * q_stride + column[None, :]
        query = gl.load(line_at, mask=(own + line < count)[:, None], other=0.0)
        query_tile = gl.allocate_shared_memory(dtype, [HALF, DIM], shared, query)
        query = gl.load(line_at + HALF * q_stride, mask=(own + HALF + line < count)[:, None], other=0.0)
        other_tile = gl.allocate_shared_memory(dtype, [HALF, DIM], shared, query)
        keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], shared)
        values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], shared)
        keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(STAGES):
            # All threads of the producer, and both groups that compute.
            mbarrier.init(keys_ready.index(slot), count=128)
            mbarrier.init(values_ready.index(slot), count=128)
            mbarrier.init(keys_free.index(slot), count=2)
            mbarrier.init(values_free.index(slot), count=2)
        fence_async_shared()
        gl.thread_barrier()
        table = tables + sequence.to(gl.int64) * table_stride
        keys_at = kv + head // GROUP * DIM
        # Every query of the tile knows the tokens up to its first one's position.
        first_position = length - count + own
        num_tiles = gl.cdiv(gl.minimum(first_position + BLOCK_M, length), BLOCK_N)
        unmasked = gl.minimum((first_position + 1) // BLOCK_N, num_tiles)
        out_at = out + row * out_stride + head * DIM
        gl.warp_specialize(
            [
                (_consume, (query_tile, keys, values, keys_ready, keys_free, values_ready, values_free, first_position,
                            num_tiles, unmasked, out_at, count - own, out_stride, scale, BLOCK_N, DIM, STAGES)),
                (_consume, (other_tile, keys, values, keys_ready, keys_free, values_ready, values_free,
                            first_position + HALF, num_tiles, unmasked, out_at + HALF * out_stride, count - own - HALF,
                            out_stride, scale, BLOCK_N, DIM, STAGES)),
                (_produce, (keys, values, keys_ready, keys_free, values_ready, values_free, keys_at,
                            keys_at + KV_HEADS * DIM, table, length, num_tiles, block_stride, DIM, 2 * KV_HEADS * DIM,
                            BLOCK_N, BLOCK_SIZE, STAGES)),
            ],
            [4, 4],
            [216, 72],
        )  # fmt: skip


def wide_prefill_attention(
    qkv: Tensor,
    heads: HeadShape,
    kv: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Compute what `prefill_attention` returns into `out`: heads of 128 numbers of two bytes, blocks of 16 tokens."""
    num_rows, num_sequences = len(qkv), len(block_tables)
    _wide_prefill_kernel[(heads.num_heads, cdiv(num_rows, _QUERIES) + num_sequences)](
        qkv, kv, block_tables, lengths, query_starts, out, num_rows, num_sequences, qkv.stride(0), kv.stride(0),
        block_tables.stride(0), out.stride(0), scale,
        GROUP=heads.num_heads // heads.num_kv_heads, KV_HEADS=heads.num_kv_heads, DIM=HEAD_DIM, BLOCK_N=_TOKENS,
        BLOCK_SIZE=BLOCK_SIZE, STAGES=_STAGES, num_warps=4, **launch_options(),
    )  # fmt: skip
