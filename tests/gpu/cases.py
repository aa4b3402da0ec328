"""Every kernel against its reference. `python3 -m tests.gpu.cases [part of a name]` runs them without pytest;
TRITON_INTERPRET=1 runs those that are small enough on the CPU."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from tests.gpu.steps import (
    DEVICE,
    INTERPRETED,
    TOLERANCE,
    as_fp8,
    assert_near,
    overwrite,
    padded,
    paged,
    poisoned,
    randn,
)
from weft.kernels import REFERENCE, AttentionBatch, HeadNorms, HeadShape, Ops, reference
from weft.kernels import sampling as draws
from weft.kernels.batch import AdapterGroups
from weft.kernels.fp8 import E4M3, GROUP, Fp8Weight, fp8_weight, quantise_rows, rounded_rows
from weft.kernels.int_weights import IntGroups, IntWeight, pack
from weft.kernels.kv_cache import Fp8Cache, LayerCache
from weft.kernels.rotated import SIDE, rotated_rows, rotated_weight
from weft.kernels.triton import (
    all_reduce,
    decode_attention,
    elementwise,
    fp8_linears,
    gemv,
    int_linears,
    linears,
    lora_linears,
    prefill_attention,
    sampling_kernels,
    triton_ops,
    w4a8_linears,
)
from weft.kernels.triton import prefill_attention as attention
from weft.kernels.triton.elementwise import gather_inputs, rotate_and_store
from weft.kernels.triton.launch import await_slow_kernels, overlapping_launches
from weft.kernels.triton.thresholds import keep_thresholds
from weft.kernels.weights import PlainWeight, SlotLowRank, Weight
from weft.machine.memory import slot_rank

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MHA, GQA, SMALL, ODD = HeadShape(32, 32, 128), HeadShape(40, 8, 128), HeadShape(9, 3, 64), HeadShape(3, 3, 64)
TINY, TINY_GROUPS = HeadShape(2, 2, 32), HeadShape(2, 1, 32)
Cache = Callable[[Tensor], LayerCache]
"""What a check makes of a cache in floats."""


W4A8_TILINGS = [
    w4a8_linears.BlockConfig(128, 2, 1, 8, 3, 128),
    w4a8_linears.BlockConfig(128, 2, 1, 4, 4, 64),
    w4a8_linears.BlockConfig(256, 2, 1, 8, 3, 128),
    w4a8_linears.BlockConfig(128, 4, 1, 8, 3, 64),
    w4a8_linears.BlockConfig(64, 4, 1, 8, 4, 64),
]


def floats(kv: Tensor) -> LayerCache:
    return kv


def expected(qkv: Tensor, heads: HeadShape, kv: LayerCache, batch: AttentionBatch) -> Tensor:
    return reference.attention(qkv.float(), heads, kv.float() if isinstance(kv, Tensor) else kv, batch)


def check_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    with poisoned():
        assert_near(elementwise.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), TOLERANCE[dtype] / 2)


def check_strided_norm() -> None:
    row = randn(5, 12 * 64)
    x, weight = row[:, 64 : 9 * 64].view(5, 8, 64), randn(64)
    with poisoned():
        assert_near(elementwise.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), TOLERANCE[BF16])
        narrow, weight = row[:, :128], randn(128)
        assert_near(
            elementwise.rms_norm(narrow, weight, 1e-6), reference.rms_norm(narrow, weight, 1e-6), TOLERANCE[BF16]
        )


def check_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 10
    with poisoned():
        assert_near(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up), TOLERANCE[dtype])


def check_rope_store(heads: HeadShape, dtype: torch.dtype, with_norm: bool) -> None:
    qkv, kv, batch = paged(heads, [1, 1, 20, 3], [31, 32, 40, 3], dtype)
    tokens, dim = qkv.shape[0], heads.head_dim
    rotations = torch.polar(torch.ones(tokens, dim // 2), torch.randn(tokens, dim // 2)).to(DEVICE)
    kv = torch.nan_to_num(kv)
    wanted, wanted_kv = qkv.clone(), kv.clone()
    norms = HeadNorms(randn(dim, dtype=dtype), randn(dim, dtype=dtype), 1e-6) if with_norm else None
    reference.rotate_and_store(wanted, heads, rotations, wanted_kv, batch.slots, norms)
    rotate_and_store(qkv, heads, rotations, kv, batch.slots, norms)
    assert_near(qkv, wanted, TOLERANCE[dtype])
    assert_near(kv, wanted_kv, TOLERANCE[dtype])
    assert torch.equal(qkv[:, -heads.kv_size // 2 :], wanted[:, -heads.kv_size // 2 :]), "the values of qkv changed"


def check_kv8_store(heads: HeadShape, dtype: torch.dtype, with_norm: bool) -> None:
    """Keys and values of all magnitudes, and zeros; the rest of the cache stays as it is."""
    qkv, plain, batch = paged(heads, [1, 1, 20, 3], [31, 32, 40, 3], dtype)
    tokens, dim = qkv.shape[0], heads.head_dim
    spread = torch.exp2(torch.randint(-6, 7, (tokens, 2 * heads.num_kv_heads), device=DEVICE).to(dtype))
    qkv[:, heads.q_size :] *= spread.repeat_interleave(dim, dim=1)
    qkv[0, heads.q_size :] = 0
    rotations = torch.polar(torch.ones(tokens, dim // 2), torch.randn(tokens, dim // 2)).to(DEVICE)
    norms = HeadNorms(randn(dim, dtype=dtype), randn(dim, dtype=dtype), 1e-6) if with_norm else None
    before, found, wanted = as_fp8(torch.nan_to_num(plain)), qkv, qkv.clone()
    cache, rounded = (Fp8Cache(*(part.clone() for part in before)) for _ in range(2))
    reference.rotate_and_store(
        wanted, heads, rotations, Fp8Cache(*(part.clone() for part in before)), batch.slots, norms
    )
    rotate_and_store(found, heads, rotations, cache, batch.slots, norms)
    assert_near(found, wanted, TOLERANCE[dtype])
    rounded.write(batch.slots, found[:, heads.q_size :].view(tokens, 2, heads.num_kv_heads, dim))
    assert torch.equal(cache.scales, rounded.scales), "the scales differ"
    numbers, rounded_numbers = (one.numbers.view(torch.uint8).int() for one in (cache, rounded))
    # The interpreter loses the carry of a mantissa that is rounded up to the next exponent.
    assert int((numbers - rounded_numbers).abs().max()) <= (8 if INTERPRETED else 0), "the numbers differ"


def check_attention(
    heads: HeadShape, news: list[int], lengths: list[int], dtype: torch.dtype, block: int = 16, cache: Cache = floats
) -> None:
    qkv, plain, batch = paged(heads, news, lengths, dtype, block)
    kv = cache(plain)
    wanted = expected(qkv, heads, kv, batch)
    for _ in range(2):
        with poisoned():
            out = attention.attention(qkv, heads, kv, batch)
        assert out.dtype == dtype
        assert_near(out, wanted, TOLERANCE[dtype])


def check_prompt_attention(heads: HeadShape, tokens: int, cache: Cache = floats) -> None:
    """A long prompt that is alone in its step: the library's attention, or what the cache holds where it rounds."""
    qkv, plain, batch = paged(heads, [tokens], [tokens], BF16)
    plain.view(-1, heads.kv_size)[batch.slots] = qkv[:, heads.q_size :]
    kv = cache(plain)
    wanted = expected(qkv, heads, kv, batch)
    assert_near(attention.attention(qkv, heads, kv, batch._replace(is_one_prompt=True)), wanted, TOLERANCE[BF16])


def check_splits(heads: HeadShape, lengths: list[int], dtype: torch.dtype, cache: Cache = floats) -> None:
    """However a decode is cut it is the same decode: a chip that never fills is given as many splits as there can be,
    one that is always full none."""
    qkv, plain, batch = paged(heads, [1] * len(lengths), lengths, dtype)
    kv = cache(plain)
    wanted = expected(qkv, heads, kv, batch)
    chip = decode_attention._FULL_CHIP, decode_attention._MIN_TOKENS, decode_attention._FEW_PROGRAMS
    try:
        for full, least, few in ((1, 64, 0), (10**6, 16, 0), (10**6, 64, 0), chip):
            decode_attention._FULL_CHIP, decode_attention._MIN_TOKENS, decode_attention._FEW_PROGRAMS = full, least, few
            for _ in range(2):
                with poisoned():
                    out = decode_attention.decode_attention(qkv, heads, kv, batch.block_tables, batch.lengths)
                assert_near(out, wanted, TOLERANCE[dtype])
    finally:
        decode_attention._FULL_CHIP, decode_attention._MIN_TOKENS, decode_attention._FEW_PROGRAMS = chip


def check_one_query_prefill(heads: HeadShape, dtype: torch.dtype, cache: Cache = floats) -> None:
    """The prefill kernel takes decodes too, and sequences without queries; its rows may begin anywhere."""
    qkv, plain, batch = paged(heads, [1, 1, 5], [17, 64, 70], dtype)
    kv = cache(plain)
    starts = torch.tensor([0, 1, 1, 2, 7, 7], dtype=torch.int32, device=DEVICE) + 3
    own = torch.tensor([0, 2, 3], device=DEVICE)
    tables, lengths = torch.zeros(5, batch.block_tables.shape[1]).to(DEVICE).int(), torch.zeros(5).to(DEVICE).int()
    tables[own], lengths[own] = batch.block_tables.int(), batch.lengths.int()
    with poisoned():
        out = prefill_attention.prefill_attention(qkv, heads, kv, tables, lengths, starts)
    assert_near(out, expected(qkv, heads, kv, batch), TOLERANCE[dtype])


def check_padded_step(
    heads: HeadShape,
    news: list[int],
    lengths: list[int],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    cache: Cache = floats,
) -> None:
    """A step in a larger shape gives what it gives alone, and zeros in the rows to spare."""
    qkv, plain, batch = paged(heads, news, lengths, dtype)
    kv = cache(plain)
    wide, padded_batch, rows = padded(qkv, batch, *shape)
    with poisoned():
        out = attention.attention(wide, heads, kv, padded_batch)
    assert_near(out[rows], expected(qkv, heads, kv, batch), TOLERANCE[dtype])
    out[rows] = 0
    assert not out.any(), "rows to spare are not zero"


def check_padding(heads: HeadShape, dtype: torch.dtype, cache: Cache = floats) -> None:
    """Rows of length 0 give zeros, rows of length 1 in a null block of numbers give numbers; others do not notice."""
    lengths = [33, 200, 16]
    qkv, plain, batch = paged(heads, [1] * 5, [*lengths, 0, 0], dtype)
    plain[0] = 1.0
    kv = cache(plain)
    real = batch._replace(query_starts=batch.query_starts[:4], lengths=batch.lengths[:3], num_decodes=3)
    wanted = expected(qkv[:3], heads, kv, real)
    tables, padded = batch.block_tables.int(), batch.lengths.int()
    padded[4] = 1
    with poisoned():
        out = decode_attention.decode_attention(qkv, heads, kv, tables, padded)
    assert_near(out[:3], wanted, TOLERANCE[dtype])
    assert not out[3].any() and bool((out[4] == 1).all())


def check_split_plans() -> None:
    for programs in (1, 8, 16, 128, 512, 1024, 4096, 100000):
        for context in (16, 200, 4096, 131072):
            plan = decode_attention.split_plan(programs, context)
            assert 1 <= plan.num_splits <= decode_attention.MAX_SPLITS and plan.min_tokens % 16 == 0
    assert decode_attention.split_plan(2048, 4096).num_splits == 1


def check_graph_replay(heads: HeadShape, cache: Cache = floats) -> None:
    """Captured once, replayed at other lengths: the splits follow the device."""
    rows, most = 3, 1000
    qkv, plain, batch = paged(heads, [1] * rows, [most] * rows, BF16)
    kv = cache(plain)
    lengths = batch.lengths.clone()
    decode_attention.decode_attention(qkv, heads, kv, batch.block_tables, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention.decode_attention(qkv, heads, kv, batch.block_tables, lengths)
    for now in ([1, 16, 17], [most, 31, 500], [999, 1000, 1], [64, 65, 66]):
        lengths.copy_(torch.tensor(now, device=DEVICE))
        out.fill_(float("nan"))
        graph.replay()
        wanted = expected(qkv, heads, kv, batch._replace(lengths=lengths))
        assert_near(out, wanted, TOLERANCE[BF16])


def check_step_replay(heads: HeadShape, cache: Cache = floats) -> None:
    """Decodes and prompts captured once in one shape, with launches that overlap, replayed for other steps."""
    shape, most_blocks = (8, 6, 512), 200
    steps = [
        ([1, 1, 300, 17], [400, 16, 300, 200]),
        ([1] * 8 + [85] * 6, [1, 2, 3, 4, 100, 200, 300, 400, 85, 86, 100, 200, 300, 400]),
        ([512], [512]),
        ([2, 3, 4], [2, 30, 400]),
        ([1, 1, 1], [33, 500, 1]),
    ]
    width = heads.q_size + heads.kv_size
    qkv = randn(shape[0] + shape[2], width)
    kv = cache(randn(most_blocks, 16, 2, heads.num_kv_heads, heads.head_dim))
    tables = torch.zeros(shape[0] + shape[1], 40, dtype=torch.int64, device=DEVICE)
    starts = torch.zeros(len(tables) + 1, dtype=torch.int64, device=DEVICE)
    lengths = torch.zeros(len(tables), dtype=torch.int64, device=DEVICE)
    batch = AttentionBatch(shape[0], starts, lengths, tables, starts)
    attention.attention(qkv, heads, kv, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with overlapping_launches(), torch.cuda.graph(graph):
        outs = [attention.attention(qkv, heads, kv, batch) for _ in range(3)]
    for seed, (news, wanted_lengths) in enumerate(steps * 2):
        own, plain, own_batch = paged(heads, news, wanted_lengths, BF16, seed=seed)
        own_kv = cache(plain)
        wide, padded_batch, rows = padded(own, own_batch, *shape)
        qkv.copy_(wide)
        overwrite(kv, own_kv)
        tables.zero_()[:, : padded_batch.block_tables.shape[1]] = padded_batch.block_tables
        starts.copy_(padded_batch.query_starts)
        lengths.copy_(padded_batch.lengths)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        wanted = expected(own, heads, own_kv, own_batch)
        for out in outs:
            assert_near(out[rows], wanted, TOLERANCE[BF16])
            assert bool(out.isfinite().all()), "rows to spare are not finite"


def check_gemv(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(1, k, dtype=dtype), randn(n, k, dtype=dtype) * k**-0.5, randn(n, dtype=dtype)
    residual, scale = randn(1, n, dtype=dtype), 1 + randn(k, dtype=dtype) / 10
    tolerance = TOLERANCE[dtype]
    plain = x.float() @ weight.float().T
    normed = reference.rms_norm(x.float(), scale.float(), 1e-6) @ weight.float().T
    with poisoned():
        assert_near(gemv.gemv(x, weight), plain, tolerance)
        assert_near(gemv.gemv(x, weight, bias), plain + bias.float(), tolerance)
        assert_near(gemv.norm_gemv(x, scale, 1e-6, weight, bias), normed + bias.float(), tolerance)
        total = residual.clone()
        gemv.gemv_add(x, weight, bias, total)
        assert_near(total, residual.float() + plain + bias.float(), tolerance)
        if n % 2 == 0:
            assert_near(gemv.gate_up_gemv(x, weight), reference.silu_mul(plain), 2 * tolerance)
            out = gemv.norm_gate_up_gemv(x, scale, 1e-6, weight)
            assert_near(out, reference.silu_mul(normed), 2 * tolerance)


def check_gemv_that_stands_in(n: int, k: int) -> None:
    """The kernels for every GPU, which multiply until the one for compute capability 9 is compiled."""
    await_slow_kernels(True)
    try:
        check_gemv(n, k, BF16)
        check_fp8_gemv(n, k, BF16, False)
    finally:
        await_slow_kernels(False)


def check_skinny(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = randn(rows, k + 24, dtype=dtype)[:, 8 : k + 8]
    weight, bias = randn(n, k, dtype=dtype) * k**-0.5, randn(n, dtype=dtype)
    tolerance = TOLERANCE[dtype]
    plain = x.float() @ weight.float().T
    assert linears.fits_skinny(x, weight)
    for _ in range(2):
        with poisoned():
            assert_near(linears.skinny_linear(x, weight, None, dtype), plain, tolerance)
            assert_near(linears.skinny_linear(x, weight, bias, dtype), plain + bias.float(), tolerance)
            wide = randn(rows, n + 40, dtype=dtype)
            kept, residual = wide.clone(), wide[:, 16 : n + 16]
            linears.skinny_linear_add(x, weight, bias, residual)
            assert_near(residual, kept[:, 16 : n + 16].float() + plain + bias.float(), tolerance)
            assert torch.equal(wide[:, :16], kept[:, :16]) and torch.equal(wide[:, n + 16 :], kept[:, n + 16 :])
            if n % 2 == 0:
                assert_near(linears.skinny_gate_up(x, weight, dtype), reference.silu_mul(plain), 2 * tolerance)


def check_skinny_cut(config: linears.SkinnyConfig, gated: bool) -> None:
    """However a product is cut it is the same product, and bit for bit the same one every time."""
    rows, n, k = config.rows - 3, 304, 1040
    x, weight = randn(rows, k, dtype=FP16), randn(n, k, dtype=FP16) * k**-0.5
    plain = x.float() @ weight.float().T
    wanted = reference.silu_mul(plain) if gated else plain
    first = torch.full_like(wanted, float("nan"), dtype=FP16)
    again = first.clone()
    for out in (first, again):
        with poisoned():
            linears._launch(x, weight, None, None, out, gated, config)
    assert_near(first, wanted, 2 * TOLERANCE[FP16])
    assert torch.equal(first, again)


def check_skinny_configs() -> None:
    """Whatever is asked for, tiles are powers of two, several are on their way, and they fit in shared memory."""
    for n, k in ((12288, 4096), (4096, 11008), (34816, 5120), (151936, 5120), (96, 64), (7, 3)):
        sizes = [(rows, 2) for rows in range(1, linears.MAX_ROWS + 1)]
        sizes += [(rows, 1) for rows in range(1, linears.MAX_FP8_ADDED_ROWS + 1)]
        for rows, itemsize in sizes:
            config = linears.skinny_config(rows, n, k, n % 2 == 0, itemsize)
            assert config.rows >= rows and config.stages >= 3 and 1 <= config.split_k <= max(1, k // config.block_k)
            assert itemsize * config.stages * config.block_k * (config.block_n + config.rows) <= 227 << 10
            assert all(size & (size - 1) == 0 for size in (config.rows, config.block_n, config.block_k))


def check_skinny_replay(rows: int, hidden: int, width: int) -> None:
    """A feed-forward layer captured once, its launches overlapping, replayed on other inputs."""
    x, residual = randn(rows, hidden), randn(rows, hidden)
    gate_up, down = randn(2 * width, hidden) * hidden**-0.5, randn(hidden, width) * width**-0.5

    def layer() -> None:
        linears.skinny_linear_add(linears.skinny_gate_up(x, gate_up, BF16), down, None, residual)

    layer()
    graph = torch.cuda.CUDAGraph()
    with overlapping_launches(), torch.cuda.graph(graph):
        for _ in range(3):
            layer()
    for _ in range(4):
        x.copy_(randn(rows, hidden))
        residual.copy_(randn(rows, hidden))
        gated = reference.silu_mul(x.float() @ gate_up.float().T)
        wanted = residual.float() + 3 * (gated @ down.float().T)
        graph.replay()
        assert_near(residual, wanted, 2 * TOLERANCE[BF16])


def check_linears(rows: int, dtype: torch.dtype) -> None:
    """Whichever kernel takes this number of rows, the table's ops mean what the reference's do."""
    x, weight, bias = randn(rows, 64, dtype=dtype), randn(96, 64, dtype=dtype) / 8, randn(96, dtype=dtype)
    scale, residual = 1 + randn(64, dtype=dtype) / 10, randn(rows, 96, dtype=dtype)
    wide = [tensor.float() for tensor in (x, weight, bias, scale)]
    tolerance = TOLERANCE[dtype]
    assert_near(linears.linear(x, weight, bias), reference.linear(*wide[:3]), tolerance)
    normed = reference.norm_linear(wide[0], wide[3], 1e-6, wide[1], wide[2])
    assert_near(linears.norm_linear(x, scale, 1e-6, weight, bias), normed, tolerance)
    gated = reference.norm_gate_up(wide[0], wide[3], 1e-6, wide[1])
    assert_near(linears.norm_gate_up(x, scale, 1e-6, weight), gated, 2 * tolerance)
    wanted = residual.float()
    reference.linear_add(*wide[:3], wanted)
    linears.linear_add(x, weight, bias, residual)
    assert_near(residual, wanted, tolerance)


FP8_TOLERANCE = {dtype: max(tolerance, 0.0 if INTERPRETED else 1e-3) for dtype, tolerance in TOLERANCE.items()}
"""The matrix units add products of eight bits with fewer bits than float32 has."""


def random_fp8(n: int, k: int, grouped: bool) -> Fp8Weight:
    """A weight with a scale for each row, or for every group of its columns, of all sizes."""
    weight = fp8_weight(randn(n, k, dtype=FP32) * k**-0.5)
    return weight._replace(scales=weight.scales * (0.5 + torch.rand(-(-k // GROUP) if grouped else 1, n).to(DEVICE)))


def check_fp8_gemv(n: int, k: int, dtype: torch.dtype, grouped: bool) -> None:
    """The kernels of one row, which do not round it."""
    x, weight, bias = randn(1, k, dtype=dtype), random_fp8(n, k, grouped), randn(n, dtype=dtype)
    residual, scale = randn(1, n, dtype=dtype), 1 + randn(k, dtype=dtype) / 10
    tolerance = TOLERANCE[dtype]
    wide = [tensor.float() for tensor in (x, bias, scale)]
    plain = reference.linear(wide[0], weight, wide[1])
    with poisoned():
        assert_near(linears.linear(x, weight, bias), plain, tolerance)
        normed = reference.norm_linear(wide[0], wide[2], 1e-6, weight, None)
        assert_near(linears.norm_linear(x, scale, 1e-6, weight), normed, tolerance)
        linears.linear_add(x, weight, bias, residual.copy_(total := residual.clone()))
        assert_near(residual, total.float() + plain, tolerance)
        if n % 2 == 0:
            gated = reference.norm_gate_up(wide[0], wide[2], 1e-6, weight)
            assert_near(linears.norm_gate_up(x, scale, 1e-6, weight), gated, 2 * tolerance)


def check_fp8_skinny(rows: int, n: int, k: int, dtype: torch.dtype, grouped: bool) -> None:
    x, weight, bias = randn(rows, k, dtype=dtype), random_fp8(n, k, grouped), randn(n, dtype=dtype)
    residual, quantised = randn(rows, n, dtype=dtype), quantise_rows(x)
    plain = reference.linear(rounded_rows(x.float()), weight)
    tolerance = FP8_TOLERANCE[dtype]
    assert linears.fits_skinny(quantised, weight)
    for _ in range(2):
        with poisoned():
            found = linears.skinny_linear(quantised, weight, bias, dtype)
            assert_near(found, plain + bias.float(), tolerance)
            total = residual.clone()
            linears.skinny_linear_add(quantised, weight, bias, total)
            assert_near(total, residual.float() + plain + bias.float(), tolerance)
            if n % 2 == 0:
                found = linears.skinny_gate_up(quantised, weight, dtype)
                assert_near(found, reference.silu_mul(plain), 2 * tolerance)


def check_fp8_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, scale = randn(rows, columns + 8, dtype=dtype)[:, :columns], 1 + randn(columns, dtype=dtype) / 10
    x[0] = 0
    for norm in (None, scale):
        numbers, scales = quantise_rows(x if norm is None else reference.rms_norm(x, norm, 1e-6))
        with poisoned():
            found = fp8_linears.quantise_rows(x, norm, 1e-6)
        assert_near(found.scales, scales, TOLERANCE[dtype])
        assert_near(found.numbers.float() * found.scales, numbers.float() * scales, 4 * TOLERANCE[dtype])


def check_fp8_ops(rows: int, n: int, k: int, dtype: torch.dtype, grouped: bool) -> None:
    weight = random_fp8(n, k, grouped)
    check_rounded(rows, weight, weight, dtype)


def check_w4a8(rows: int, n: int, k: int, group: int, dtype: torch.dtype, zeros: bool = True) -> None:
    """The weight is rounded for more rows than 256, and for fewer it is as it is, where its groups are whole blocks."""
    weight = random_int4(n, k, group, dtype, zeros).for_fp8_inputs()
    if w4a8_linears.is_for(rows, weight):
        check_rounded(rows, weight, weight.dequantised(), dtype)
        check_neighbours(rows, weight, dtype)
        return
    assert rows > w4a8_linears.MAX_ROWS
    check_rounded(rows, weight, rounded_int4(weight, dtype), dtype)


def rounded_int4(weight: IntWeight, dtype: torch.dtype) -> Fp8Weight:
    """A weight of w4a8 as many rows are multiplied by it."""
    numbers = (weight.dequantised().to(dtype).float() / weight.row_scales.T).to(E4M3)
    return Fp8Weight(numbers, weight.row_scales)


def check_neighbours(rows: int, weight: IntWeight, dtype: torch.dtype) -> None:
    """Columns beside the residual stay as they are."""
    n, k = weight.shape
    x, wide = randn(rows, k, dtype=dtype), randn(rows, n + 40, dtype=dtype)
    kept, residual = wide.clone(), wide[:, 16 : n + 16]
    linears.linear_add(x, weight, None, residual)
    wanted = kept[:, 16 : n + 16].float() + rounded_rows(x.float()) @ weight.dequantised().T
    assert_near(residual, wanted, FP8_TOLERANCE[dtype])
    assert torch.equal(wide[:, :16], kept[:, :16]) and torch.equal(wide[:, n + 16 :], kept[:, n + 16 :])


def check_w4a8_cut(config: w4a8_linears.BlockConfig, gated: bool, group: int, dtype: torch.dtype = FP16) -> None:
    """However a product is divided among programs it is the same product, and bit for bit the same one every time."""
    rows, n, k = 70 if config.rows == 64 else config.rows - 3, 256 if gated else 200, 1168
    x, weight = randn(rows, k, dtype=dtype), random_int4(n, k, group, dtype).for_fp8_inputs()
    plain = rounded_rows(x.float()) @ weight.dequantised().T
    wanted = reference.silu_mul(plain) if gated else plain
    first = torch.full_like(wanted, float("nan"), dtype=dtype)
    again = first.clone()
    for out in (first, again):
        with poisoned():
            w4a8_linears.product(w4a8_linears.block_rows(x), weight, None, None, out, gated, config)
    assert_near(first, wanted, 2 * FP8_TOLERANCE[dtype])
    assert torch.equal(first, again)


def check_w4a8_configs() -> None:
    for n, k in ((12288, 4096), (4096, 11008), (34816, 5120), (128, 64)):
        num_tiles, num_blocks = n // 64, -(-k // 128)
        for rows, gated in product(range(w4a8_linears.MIN_ROWS, w4a8_linears.MAX_ROWS + 1), (False, True)):
            config = w4a8_linears.w4a8_config(rows, num_tiles, num_blocks, gated)
            assert config.rows % config.at_once == 0 and (config.tiles % 2 == 0 or not gated)
            assert 2 * (config.stages * 128 * (config.rows + 32 * config.tiles) + 1024) <= 227 << 10
            assert 1 <= config.split_k <= max(1, num_blocks)
            assert 0 <= config.whole <= -(-rows // config.rows) * -(-num_tiles // config.tiles)


def check_block_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    """The numbers are those of other kernels in another order, and zeros behind them."""
    x, scale = randn(rows, columns + 8, dtype=dtype)[:, :columns], 1 + randn(columns, dtype=dtype) / 10
    x = x * torch.exp2(torch.randint(-12, 3, (1, columns), device=DEVICE).to(dtype))
    x[0] = 0
    order = w4a8_linears.block_order(DEVICE)
    for norm in (None, scale)[: 2 if columns <= 16384 else 1]:  # the norm's own kernel holds no longer rows
        # The interpreter cuts where hardware rounds, and a normalised row may differ in its last bit.
        given = x if norm is None else elementwise.rms_norm(x, norm, 1e-6)
        numbers, scales = quantise_rows(given) if INTERPRETED else fp8_linears.quantise_rows(given)
        with poisoned():
            found = w4a8_linears.block_rows(x, norm, 1e-6)
        stored = found.numbers.view(torch.uint8)[:, :rows].transpose(0, 1).contiguous()
        laid = torch.empty_like(stored)
        laid[:, :, order] = stored
        laid = laid.view(rows, -1)
        assert not laid[:, columns:].any(), "what is behind the columns is not zero"
        laid = laid[:, :columns].contiguous().view(E4M3)
        if norm is None:
            assert torch.equal(found.scales, scales) and torch.equal(laid.float(), numbers.float())
        assert_near(laid.float() * found.scales, numbers.float() * scales, 2 * TOLERANCE[dtype])
        sums = found.numbers[:, :rows].double().sum(-1)
        assert_near(found.sums[:, :rows], sums, 1e-6)


def check_rounded(rows: int, weight: Weight, rounded: PlainWeight, dtype: torch.dtype) -> None:
    """Whichever kernel takes this number of rows, they are rounded first, and the weight to the other one."""
    n, k = weight.shape
    x, bias = randn(rows, k, dtype=dtype), randn(n, dtype=dtype)
    residual, scale = randn(rows, n, dtype=dtype), 1 + randn(k, dtype=dtype) / 10
    # A normalised input near the border of two numbers may be rounded to either.
    tolerance, rough = FP8_TOLERANCE[dtype], 2 * TOLERANCE[BF16]
    plain = reference.linear(rounded_rows(x.float()), rounded, bias.float())
    normed = reference.linear(rounded_rows(reference.rms_norm(x, scale, 1e-6).float()), rounded, bias.float())
    with poisoned():
        assert_near(linears.linear(x, weight, bias), plain, tolerance)
        assert_near(linears.norm_linear(x, scale, 1e-6, weight, bias), normed, rough)
        total = residual.clone()
        linears.linear_add(x, weight, bias, total)
        assert_near(total, residual.float() + plain, tolerance)
        if n % 2 == 0:
            gated = reference.silu_mul(normed - bias.float())
            assert_near(linears.norm_gate_up(x, scale, 1e-6, weight), gated, 2 * rough)


def check_fp8_tiled(rows: int, n: int, k: int, dtype: torch.dtype, grouped: bool) -> None:
    """The kernel for what the library does not multiply."""
    x, weight, bias = randn(rows, k, dtype=dtype), random_fp8(n, k, grouped), randn(n, dtype=dtype)
    wide = randn(rows, n + 40, dtype=dtype)
    kept, residual = wide.clone(), wide[:, 16 : n + 16]
    quantised = quantise_rows(x)
    plain = reference.linear(rounded_rows(x.float()), weight, bias.float())
    tolerance = FP8_TOLERANCE[dtype]
    out = torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE)
    fp8_linears.tiled(quantised, weight, bias, None, out)
    assert_near(out, plain, tolerance)
    fp8_linears.tiled(quantised, weight, bias, residual, residual)
    assert_near(residual, kept[:, 16 : n + 16].float() + plain, tolerance)
    assert torch.equal(wide[:, :16], kept[:, :16]) and torch.equal(wide[:, n + 16 :], kept[:, n + 16 :])


def check_rotated(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Weights whose columns are rotated, by rows of which one column is much larger than the others."""
    x, bias, weight = randn(rows, k, dtype=dtype), randn(n, dtype=dtype), rotated_weight(randn(n, k, dtype=FP32))
    weight = weight._replace(scales=weight.scales * k**-0.5)
    x[:, 5] *= 30
    norm, residual = 1 + randn(k, dtype=dtype) / 10, randn(rows, n, dtype=dtype)

    def product(x: Tensor) -> Tensor:
        numbers, scales = rotated_rows(x)
        return (numbers.double() @ weight.numbers.double().T).float() * scales * weight.scales

    plain, normal = product(x), product(reference.rms_norm(x, norm, 1e-6))
    exact = x.float() @ weight.dequantised().T
    assert_near(plain, exact, 0.02)
    tolerance = 4 * TOLERANCE[dtype]
    with poisoned():
        assert_near(linears.linear(x, weight, bias), plain + bias.float(), tolerance)
        linears.linear_add(x, weight, bias, total := residual.clone())
        assert_near(total, residual.float() + plain + bias.float(), tolerance)
        if n % 2 == 0 and k <= 16384:  # the norm's own kernel holds no longer rows
            assert_near(linears.norm_linear(x, norm, 1e-6, weight), normal, tolerance)
            assert_near(linears.norm_gate_up(x, norm, 1e-6, weight), reference.silu_mul(normal), 2 * tolerance)


def check_wide(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """What the kernel for compute capability 9 multiplies is what the tiled one does; of whole numbers bit for bit."""
    x, bias, wide = randn(rows, k, dtype=dtype), randn(n, dtype=dtype), randn(rows, n + 40, dtype=dtype)
    floats = randn(n, k, dtype=FP32) * k**-0.5
    for quantised, weight in (
        (rotated_rows(x), rotated_weight(floats)), (quantise_rows(x), fp8_weight(floats)),
    ) if k % SIDE == 0 else ((quantise_rows(x), fp8_weight(floats)),):  # fmt: skip
        wanted, found = (torch.full((rows, n), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
        first, second = wide.clone(), wide.clone()
        fp8_linears.tiled(quantised, weight, bias, None, wanted)
        fp8_linears.wide_product()(quantised, weight, bias, None, found)
        for multiply, total in ((fp8_linears.tiled, first), (fp8_linears.wide_product(), second)):
            residual = total[:, 16 : n + 16]
            multiply(quantised, weight, None, residual, residual)
        for one, other in ((found, wanted), (second, first)):
            if quantised.numbers.dtype == torch.int8:
                assert torch.equal(one, other)
            assert_near(one, other.float(), FP8_TOLERANCE[dtype])
        assert torch.equal(second[:, :16], wide[:, :16]) and torch.equal(second[:, n + 16 :], wide[:, n + 16 :])


def check_mlp_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """SiLU·mul and the rounding of rows in one kernel give what they give apart, bit for bit."""
    wide = randn(rows, 2 * width + 24, dtype=dtype) * torch.rand(rows, 1, device=DEVICE).exp2().to(dtype) * 10
    wide[-1] = 0
    for x in (wide[:, 8 : 2 * width + 8], wide[:, 3 : 2 * width + 3], wide[:, : 2 * width].T.contiguous().T):
        wanted = fp8_linears.quantise_rows(elementwise.silu_mul(x))
        with poisoned():
            found = fp8_linears.quantise_gated(x)
        assert torch.equal(found.scales, wanted.scales), "the scales differ"
        assert torch.equal(found.numbers.view(torch.uint8), wanted.numbers.view(torch.uint8)), "the numbers differ"


def check_mlp(rows: int, hidden: int, width: int, dtype: torch.dtype, grouped: bool) -> None:
    gate_up, down = random_fp8(2 * width, hidden, grouped), random_fp8(hidden, width, grouped)
    check_same_mlp(rows, gate_up, down, gate_up, down, dtype)


def check_mlp_w4a8(rows: int, hidden: int, width: int, dtype: torch.dtype) -> None:
    gate_up, down = (random_int4(n, k, 128, dtype).for_fp8_inputs() for n, k in ((2 * width, hidden), (hidden, width)))
    check_same_mlp(rows, gate_up, down, rounded_int4(gate_up, dtype), rounded_int4(down, dtype), dtype)


def check_same_mlp(
    rows: int, gate_up: Weight, down: Weight, rounded_up: Fp8Weight, rounded_down: Fp8Weight, dtype: torch.dtype
) -> None:
    """The op is its parts, bit for bit, whichever kernels take this number of rows; and near the reference, where they
    round them."""
    hidden = gate_up.shape[1]
    residual, norm = randn(rows, hidden, dtype=dtype), 1 + randn(hidden, dtype=dtype) / 10
    with poisoned():
        linears.linear_add(linears.norm_gate_up(residual, norm, 1e-6, gate_up), down, None, wanted := residual.clone())
        linears.add_mlp(found := residual.clone(), norm, 1e-6, gate_up, down)
    assert torch.equal(found, wanted)
    normal = rounded_rows(reference.rms_norm(residual, norm, 1e-6).float())
    gated = rounded_rows(reference.silu_mul(reference.linear(normal, rounded_up)))
    if linears._is_e4m3(down, rows) and rows > 1:
        assert_near(found, residual.float() + reference.linear(gated, rounded_down), 4 * TOLERANCE[BF16])


def check_fp8_no_number(rows: int) -> None:
    """A row with a NaN gives NaN, and the others do not notice."""
    x, weight = randn(rows, 256), random_fp8(64, 256, False)
    wanted = linears.linear(x, weight)
    x[1, 7] = float("nan")
    found = linears.linear(x, weight)
    assert bool(found[1].isnan().all())
    found[1] = wanted[1]
    assert torch.equal(found, wanted)


def check_rotated_no_number(rows: int) -> None:
    """Rows with a NaN or an infinity give NaN, and the others do not notice."""
    x, weight = randn(rows, 256, dtype=FP16), rotated_weight(randn(64, 256, dtype=FP32))
    wanted = linears.linear(x, weight)
    x[0, 70], x[2, 7] = float("inf"), float("nan")
    found = linears.linear(x, weight)
    assert bool(found[::2][:2].isnan().all())
    found[::2][:2] = wanted[::2][:2]
    assert torch.equal(found, wanted)


def check_fp8_replay(rows: int, hidden: int, width: int) -> None:
    """A feed-forward layer captured once, its launches overlapping, replayed on other inputs."""
    residual, norm = randn(rows, hidden), torch.ones(hidden, dtype=BF16, device=DEVICE)
    gate_up, down = random_fp8(2 * width, hidden, False), random_fp8(hidden, width, False)

    def layer() -> None:
        linears.add_mlp(residual, norm, 1e-6, gate_up, down)

    layer()
    graph = torch.cuda.CUDAGraph()
    with overlapping_launches(), torch.cuda.graph(graph):
        for _ in range(3):
            layer()
    for _ in range(4):
        residual.copy_(randn(rows, hidden))
        wanted = residual.clone()
        for _ in range(3):
            linears.linear_add(linears.norm_gate_up(wanted, norm, 1e-6, gate_up), down, None, wanted)
        graph.replay()
        assert torch.equal(residual, wanted)


if INTERPRETED:
    # The interpreter runs one program after the other, each as slowly.
    int_linears._MULTIPROCESSORS = 1


def random_int4(n: int, k: int, group: int, dtype: torch.dtype, zeros: bool = True, turned: bool = False) -> IntWeight:
    """A weight whose groups have scales of all sizes, and zeros of their own up to GPTQ's 16."""
    numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=DEVICE)
    num_groups = -(-k // group)
    scales = (0.5 + torch.rand(n, num_groups, device=DEVICE)) * k**-0.5 / 4
    own = torch.randint(0, 17, (n, num_groups), device=DEVICE).float() if zeros else None
    return pack(IntGroups(numbers, scales, own, group, torch.randperm(k, device=DEVICE) if turned else None), dtype)


def random_minima(n: int, k: int, dtype: torch.dtype, bits: int, group: int = 32, minima: bool = True) -> IntWeight:
    """A weight of a GGUF file: groups have minima that are no multiples of their scales. Or one of eight bits without
    them, with the lowest number too."""
    shape, num_groups = (n, k), -(-k // group)
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE)
    if bits == 8:
        numbers = torch.randint(-128, 128, shape, dtype=torch.int8, device=DEVICE)
    scales = (0.5 + torch.rand(n, num_groups, device=DEVICE)) * k**-0.5 / (4 if bits == 4 else 64)
    least = (torch.rand(n, num_groups, device=DEVICE) - 1) * k**-0.5 if minima else None
    return pack(IntGroups(numbers, scales, None, group, None, least), dtype)


def check_int4(
    rows: int, n: int, k: int, group: int, dtype: torch.dtype, zeros: bool = True, turned: bool = False
) -> None:
    check_groups(rows, random_int4(n, k, group, dtype, zeros, turned), dtype)


def check_int4_minima(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    check_groups(rows, random_minima(n, k, dtype, 4), dtype)


def check_int8(rows: int, n: int, k: int, group: int, dtype: torch.dtype, minima: bool) -> None:
    check_groups(rows, random_minima(n, k, dtype, 8, group, minima), dtype)


def check_groups(rows: int, weight: IntWeight, dtype: torch.dtype) -> None:
    """Whichever kernel takes this number of rows, the ops mean what the reference's do."""
    n, k = weight.shape
    x, bias = randn(rows, k, dtype=dtype), randn(n, dtype=dtype)
    scale, wide = 1 + randn(k, dtype=dtype) / 10, randn(rows, n + 40, dtype=dtype)
    kept, residual = wide.clone(), wide[:, 16 : n + 16]
    floats, tolerance = weight.dequantised().to(dtype).float(), TOLERANCE[dtype]
    plain = x.float() @ floats.T
    normed = reference.rms_norm(x, scale, 1e-6).float() @ floats.T
    with poisoned():
        assert_near(linears.linear(x, weight), plain, tolerance)
        assert_near(linears.linear(x, weight, bias), plain + bias.float(), tolerance)
        linears.linear_add(x, weight, bias, residual)
        assert_near(residual, kept[:, 16 : n + 16].float() + plain + bias.float(), tolerance)
        assert torch.equal(wide[:, :16], kept[:, :16]) and torch.equal(wide[:, n + 16 :], kept[:, n + 16 :])
        if k > elementwise._MAX_HIDDEN:
            return
        assert_near(linears.norm_linear(x, scale, 1e-6, weight, bias), normed + bias.float(), tolerance)
        if n % 2 == 0:
            gated = linears.norm_gate_up(x, scale, 1e-6, weight)
            assert_near(gated, reference.silu_mul(normed), 2 * tolerance)


def check_int4_cut(config: int_linears.IntConfig, gated: bool) -> None:
    """However a product is divided among programs it is the same product, and bit for bit the same one every time."""
    rows, n, k = 20, 256 if gated else 200, 528
    x, weight = randn(rows, k, dtype=FP16), random_int4(n, k, k, FP16)
    plain = x.float() @ weight.dequantised().half().float().T
    wanted = reference.silu_mul(plain) if gated else plain
    first = torch.full_like(wanted, float("nan"), dtype=FP16)
    again = first.clone()
    for out in (first, again):
        with poisoned():
            int_linears.product(x, weight, None, None, out, gated, config)
    assert_near(first, wanted, 2 * TOLERANCE[FP16])
    assert torch.equal(first, again)


def check_int4_floats(n: int, k: int, group: int, dtype: torch.dtype, bits: int = 4, minima: bool = False) -> None:
    """Weights that are written out are the reference's, bit for bit; with minima they are rounded once less."""
    weight = random_minima(n, k, dtype, bits, group, minima) if minima or bits == 8 else random_int4(n, k, group, dtype)
    with poisoned():
        found = int_linears.dequantised(weight, dtype)
    wanted = weight.dequantised().to(dtype)
    if INTERPRETED or minima:
        near = torch.isclose(found.float(), wanted.float(), rtol=8e-3, atol=1e-6)
        assert bool(near.all()), f"{int((~near).sum())} of {near.numel()} differ"
    else:
        assert torch.equal(found, wanted)


def check_int_configs() -> None:
    for n, k in ((12288, 4096), (4096, 11008), (34816, 5120), (128, 64)):
        for rows in range(1, int_linears.MAX_ROWS + 1):
            for gated in (False, True):
                config = int_linears.int_config(rows, n // 64, -(-k // 128), gated)
                assert config.rows & (config.rows - 1) == 0 and config.tiles % (1 + gated) == 0
                assert config.stages * (4608 * config.tiles + 256 * config.rows) <= 227 << 10
                assert 1 <= config.split_k <= max(1, k // 128)
                jobs = -(-rows // config.rows) * -(-n // (64 * config.tiles))
                assert 0 <= config.whole <= jobs


def check_w4a8_replay(rows: int, hidden: int, width: int) -> None:
    check_layer_replay(
        rows,
        random_int4(2 * width, hidden, 128, BF16).for_fp8_inputs(),
        random_int4(hidden, width, 128, BF16).for_fp8_inputs(),
    )


def check_int4_replay(rows: int, hidden: int, width: int, bits: int = 4) -> None:
    gate_up, down = random_int4(2 * width, hidden, 128, BF16), random_int4(hidden, width, 128, BF16)
    if bits == 8:
        gate_up, down = random_minima(2 * width, hidden, BF16, 8), random_minima(hidden, width, BF16, 8, width, False)
    check_layer_replay(rows, gate_up, down)


def check_layer_replay(rows: int, gate_up: IntWeight, down: IntWeight) -> None:
    """A feed-forward layer captured once, its launches overlapping, replayed on other inputs."""
    hidden = down.shape[0]
    x, residual, norm = randn(rows, hidden), randn(rows, hidden), torch.ones(hidden, dtype=BF16, device=DEVICE)

    def layer(total: Tensor) -> None:
        linears.linear_add(linears.norm_gate_up(x, norm, 1e-6, gate_up), down, None, total)

    layer(residual)
    graph = torch.cuda.CUDAGraph()
    with overlapping_launches(), torch.cuda.graph(graph):
        for _ in range(3):
            layer(residual)
    for _ in range(4):
        x.copy_(randn(rows, hidden))
        residual.copy_(randn(rows, hidden))
        wanted = residual.clone()
        for _ in range(3):
            layer(wanted)
        graph.replay()
        assert torch.equal(residual, wanted)


def slot_groups(counts: list[int]) -> AdapterGroups:
    """Shuffled tokens: so many without an adapter, then so many of each slot."""
    starts = torch.tensor([0, *accumulate(counts)])
    return AdapterGroups(torch.randperm(sum(counts)).to(DEVICE), starts.to(DEVICE))


def random_slots(num_slots: int, ends: tuple[int, ...], k: int, rank: int, dtype: torch.dtype) -> SlotLowRank:
    """Slots whose adapters have a rank that may be below theirs."""
    held = slot_rank(rank)
    shrink, expand = torch.zeros(num_slots, len(ends), held, k), torch.zeros(num_slots, ends[-1], held)
    shrink[:, :, :rank] = torch.randn(num_slots, len(ends), rank, k) * k**-0.5
    expand[:, :, :rank] = torch.randn(num_slots, ends[-1], rank) * rank**-0.5
    return SlotLowRank(shrink.flatten(1, 2).to(DEVICE, dtype), expand.to(DEVICE, dtype), ends)


def check_lora_shrink(counts: list[int], parts: int, k: int, rank: int, dtype: torch.dtype) -> None:
    groups, x = slot_groups(counts), randn(sum(counts), k, dtype=dtype)
    weight = random_slots(len(counts) - 1, tuple(range(7, 7 * parts + 1, 7)), k, rank, dtype)
    with poisoned():
        found = lora_linears.lora_shrink(x, weight, groups)
    wanted = reference.lora_shrink(x, weight, groups)
    assert found.dtype == FP32
    assert_near(found.sum(0)[counts[0] :], wanted.sum(0)[counts[0] :], TOLERANCE[dtype])


def random_ranks(splits: int, counts: list[int], weight: SlotLowRank) -> Tensor:
    """What `lora_shrink` may return: no numbers where there is no adapter."""
    ranks = randn(splits, sum(counts), len(weight.ends) * weight.rank, dtype=FP32)
    ranks[:, : counts[0]] = float("nan")
    return ranks


def check_lora_expand_add(counts: list[int], ends: tuple[int, ...], splits: int, rank: int, dtype: torch.dtype) -> None:
    groups, weight = slot_groups(counts), random_slots(len(counts) - 1, ends, 16, rank, dtype)
    ranks, y = random_ranks(splits, counts, weight), randn(sum(counts), ends[-1], dtype=dtype)
    before, wanted = y.clone(), y.clone()
    reference.lora_expand_add(ranks, weight, groups, wanted)
    lora_linears.lora_expand_add(ranks, weight, groups, y)
    assert_near(y, wanted, TOLERANCE[dtype])
    without = groups.order[: counts[0]]
    assert torch.equal(y[without], before[without]), "a row without an adapter changed"


def check_lora_expand_gate(counts: list[int], width: int, splits: int, rank: int, dtype: torch.dtype) -> None:
    groups, weight = slot_groups(counts), random_slots(len(counts) - 1, (width, 2 * width), 16, rank, dtype)
    ranks, gate_up = random_ranks(splits, counts, weight), randn(sum(counts), 2 * width, dtype=dtype)
    wanted = reference.lora_expand_gate(gate_up.clone(), ranks, weight, groups)
    with poisoned():
        assert_near(lora_linears.lora_expand_gate(gate_up, ranks, weight, groups), wanted, 2 * TOLERANCE[dtype])


def check_one_shot(size: int, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sums of tensors of several sizes, one after the other, by ranks that are processes with shared memory. For GPUs
    tests/gpu/bench_all_reduce.py checks them."""
    inboxes = torch.zeros(size, all_reduce.inbox_bytes(size) // 8, dtype=torch.int64).share_memory_()
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    parts = [[randn(count, dtype=dtype) for count in counts] for _ in range(size + 1)]

    def reduce(rank: int) -> None:
        ours = all_reduce.OneShot(rank, addresses)
        for number, own in enumerate(parts[rank]):
            # Every second sum takes the place of a part.
            x, residual = own.clone(), None if number % 2 else parts[size][number].clone()
            ours.all_reduce(x, residual)
            added = [one[number].float() for one in parts[: size if residual is None else size + 1]]
            found = x if residual is None else residual
            assert_near(found, torch.stack(added).sum(0).to(dtype), TOLERANCE[dtype])

    in_forks([partial(reduce, rank) for rank in range(size)])


def in_forks(tasks: list[Callable[[], object]]) -> None:
    """Do each of the tasks in a fork of this process, all at once."""
    pids = []
    for task in tasks:
        if (pid := os.fork()) == 0:
            try:
                task()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert not any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), "a fork failed"


def check_lora_replay(rows: int, num_slots: int, hidden: int, width: int) -> None:
    """A feed-forward layer captured once, its launches overlapping, replayed with other adapters of other rows."""
    x, residual, norm = randn(rows, hidden), randn(rows, hidden), randn(hidden)
    gate_up, down = randn(2 * width, hidden) * hidden**-0.5, randn(hidden, width) * width**-0.5
    of_gates, of_down = ((width, 2 * width), hidden), ((hidden,), width)
    slots = [random_slots(num_slots, *shape, 16, BF16) for shape in (of_gates, of_down)]
    groups = slot_groups([rows] + [0] * num_slots)

    def layer(ops: Ops, x: Tensor, residual: Tensor, gate_up: Tensor, down: Tensor, slots: list[SlotLowRank]) -> None:
        normal = ops.rms_norm(x, norm.to(x.dtype), 1e-6)
        ranks = ops.lora_shrink(normal, slots[0], groups)
        gated = ops.lora_expand_gate(ops.linear(normal, gate_up, None), ranks, slots[0], groups)
        ranks = ops.lora_shrink(gated, slots[1], groups)
        ops.linear_add(gated, down, None, residual)
        ops.lora_expand_add(ranks, slots[1], groups, residual)

    ops = triton_ops()
    layer(ops, x, residual, gate_up, down, slots)
    graph = torch.cuda.CUDAGraph()
    with overlapping_launches(), torch.cuda.graph(graph):
        layer(ops, x, residual, gate_up, down, slots)
    for seed in range(6):
        rng = random.Random(seed)
        cuts = sorted(rng.randrange(rows + 1) for _ in range(num_slots))
        now = slot_groups([end - begin for begin, end in pairwise([0, *cuts, rows])])
        groups.order.copy_(now.order)
        groups.starts.copy_(now.starts)
        for held, shape in zip(slots, (of_gates, of_down), strict=True):
            other = random_slots(num_slots, *shape, 16, BF16)
            held.shrink.copy_(other.shrink)
            held.expand.copy_(other.expand)
        x.copy_(randn(rows, hidden))
        residual.copy_(randn(rows, hidden))
        wide = [SlotLowRank(held.shrink.float(), held.expand.float(), held.ends) for held in slots]
        wanted = residual.float()
        layer(REFERENCE, x.float(), wanted, gate_up.float(), down.float(), wide)
        graph.replay()
        assert_near(residual, wanted, 2 * TOLERANCE[BF16])


def check_gather_inputs(num_tokens: int, num_sequences: int, width: int, block_size: int) -> None:
    tokens = torch.randint(0, 100_000, (9, width * block_size), device=DEVICE)
    blocks = torch.randint(0, 5000, (9, width + 3), device=DEVICE)[:, :width]
    token_rows, sequence_rows = (torch.randint(0, 9, (count,), device=DEVICE) for count in (num_tokens, num_sequences))
    positions = torch.randint(0, width * block_size, (num_tokens,), device=DEVICE)
    given = tokens, blocks, block_size, token_rows, positions, sequence_rows
    with poisoned():
        gathered = gather_inputs(*given)
    for out, wanted in zip(gathered, reference.gather_inputs(*given), strict=True):
        assert torch.equal(out, wanted)


def check_argmax(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = randn(rows, vocabulary, dtype=dtype)
    logits[0, vocabulary // 2] = logits[0, vocabulary - 1] = 9.0
    if rows > 2:
        logits[1, 7] = float("nan")
        logits[1, 3] = float("inf")
        logits[2] = float("-inf")
    if rows > 3:
        logits[3] = -logits[3].abs()
        logits[3, 5:7] = torch.tensor([-0.0, 0.0])
    with poisoned():
        tokens, peaks = sampling_kernels.argmax(logits)
    wanted_peaks, wanted = logits.float().max(dim=-1)
    assert torch.equal(tokens, logits.float().argmax(-1)), (tokens, wanted)
    assert peaks.dtype == FP32 and torch.equal(peaks.nan_to_num(nan=1e9), wanted_peaks.nan_to_num(nan=1e9))


def check_gumbel(rows: int, vocabulary: int, dtype: torch.dtype, cut: bool) -> None:
    logits = randn(rows, vocabulary, dtype=dtype)
    temperatures = torch.tensor([0.0, 1.0, 0.3, 2.5, 1e-30] * rows, device=DEVICE)[:rows]
    seeds = torch.tensor([0, -1, 2**62 + 12345, 77] * rows, device=DEVICE)[:rows]
    positions = torch.arange(rows, device=DEVICE) * 1000 + 1
    least = torch.tensor([2.0, -math.inf, 1.5] * rows, device=DEVICE)[:rows] if cut else None
    ids = torch.arange(vocabulary, device=DEVICE)
    peaks = logits.float().max(dim=-1)[0]
    with poisoned():
        tokens = sampling_kernels.gumbel_sample(logits, peaks, temperatures, seeds, positions, least)
    for i in range(rows):
        score, temperature = logits[i].float(), float(temperatures[i])
        if temperature:
            dropped = score < (-math.inf if least is None else least[i])
            score = (score - peaks[i]) / temperature + draws.gumbel_noise(int(seeds[i]), int(positions[i]), ids)
            score[dropped] = -math.inf
        # Where two scores are a rounding apart either token is right.
        assert float(score.max() - score[tokens[i]]) <= 2e-5, f"row {i}"


def check_keep_thresholds(vocabulary: int, dtype: torch.dtype, spread: float) -> None:
    """Every rule alone and all together, for rows that are even, tied, cut off below, or no numbers at all."""
    rules = [
        (temperature, reach, top_k, top_p)
        for temperature in (1.0, 0.3, 5.0, 1e-30)
        for reach in (-math.inf, -2.0, -0.0)
        for top_k in (0, 1, 40, vocabulary - 1, vocabulary, 2**31 - 1)
        for top_p in (1.0, 1e-6, 0.5, 0.9, 0.999)
    ]
    random.Random(0).shuffle(rules)
    if INTERPRETED:
        rules = rules[:60]
    logits = randn(len(rules), vocabulary, dtype=dtype) * spread
    logits[0::5] = (logits[0::5] * 4).round() / 4
    logits[1::5, : vocabulary * 3 // 4] = -math.inf
    logits[2::5, 3] = math.nan
    logits[3::15] = 0.0
    assert_kept(logits, rules)


def check_keep_thresholds_of_a_crowd(vocabulary: int) -> None:
    """Far below one token are many whose probabilities are small, but not together."""
    rules = [(temperature, -math.inf, 0, top_p) for temperature in (0.5, 1.0, 2.0) for top_p in (0.3, 0.9, 0.999)]
    logits = randn(len(rules), vocabulary, dtype=FP32) / 10
    for row, (temperature, *_) in zip(logits, rules, strict=True):
        row[7] = temperature * math.log(vocabulary)
    assert_kept(logits, rules)


def assert_kept(logits: Tensor, rules: list[tuple[float, float, int, float]]) -> None:
    temperatures, reaches, top_k, top_p = (torch.tensor(column, device=DEVICE) for column in zip(*rules, strict=True))
    peaks = logits.float().max(dim=-1)[0]
    with poisoned():
        found = keep_thresholds(logits, peaks, temperatures, reaches, top_k, top_p)
    wanted = draws.keep_thresholds(logits, peaks, temperatures, reaches, top_k, top_p)
    without_top_p = draws.keep_thresholds(logits, peaks, temperatures, reaches, top_k, torch.ones_like(top_p))
    for i, (temperature, _, _, p) in enumerate(rules):
        row, lower, upper = logits[i].float(), torch.minimum(found[i], wanted[i]), torch.maximum(found[i], wanted[i])
        between = row[(row >= lower) & (row < upper)]
        if peaks[i].isnan() or not len(between):
            continue
        # At the border of top_p, where the sums of probabilities are a rounding apart, tokens may be in or out.
        masses = ((row.double() - peaks[i]) / temperature).exp() * (row >= without_top_p[i])
        for above in (row >= upper, row > between.min()):
            share = float(masses[above].sum() / masses.sum())
            assert abs(share - p) < 1e-5, f"row {i}: {rules[i]}"


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}

    def add(check: Callable[..., None], *arguments: object, prefix: str = "", **keywords: object) -> None:
        text = "-".join(str(a).replace("torch.", "").replace("HeadShape", "").replace(" ", "") for a in arguments)
        found[f"{prefix}{check.__name__[6:]}-{text}"] = partial(check, *arguments, **keywords)

    def add_kv8(check: Callable[..., None], *arguments: object) -> None:
        """Add a check with a cache of e4m3."""
        add(check, *arguments, prefix="kv8_", cache=as_fp8)

    dtypes = (BF16, FP16, FP32)
    for dtype in dtypes:
        add(check_norm, 7, 576, dtype)
        add(check_norm, 33, 128, dtype)
        add(check_silu_mul, 3, 1536, dtype)
        for heads in (SMALL, ODD):
            for with_norm in (False, True):
                add(check_rope_store, heads, dtype, with_norm)
            # The interpreter multiplies matrices of bfloat16 as if they were integers.
            if dtype != BF16 or not INTERPRETED:
                add(check_attention, heads, [1, 1, 1, 1], [1, 16, 17, 100], dtype)
                add(check_attention, heads, [1, 1, 5, 70, 16], [1, 33, 5, 90, 160], dtype)
                add(check_padded_step, heads, [1, 1, 5, 70], [1, 33, 5, 90], dtype, (4, 5, 100))
                add(check_padding, heads, dtype)
        add(check_argmax, 5, 5003, dtype)
        for cut in (False, True):
            add(check_gumbel, 6, 5003, dtype, cut)
        add(check_keep_thresholds, 1003, dtype, 3.0)
    add(check_keep_thresholds_of_a_crowd, 1003)
    add(check_strided_norm)
    add(check_gather_inputs, 5, 4, 7, 16)
    add(check_gather_inputs, 1500, 2, 1100, 32)
    add(check_attention, SMALL, [1, 40], [65, 64], FP16, 32)
    add(check_attention, ODD, [1, 40], [65, 64], FP16, 32)
    add(check_attention, ODD, [1, 1], [300, 77], FP16)
    add(check_attention, TINY_GROUPS, [2] * 33 + [66], [9] * 33 + [70], FP16, 32)
    add(check_one_query_prefill, SMALL, FP16)
    add(check_padded_step, ODD, [70, 2], [90, 2], FP16, (0, 16, 128))
    add(check_padded_step, ODD, [64, 64], [64, 64], FP16, (0, 2, 128))
    add(check_padded_step, ODD, [1, 1], [20, 300], FP16, (4, 3, 64))
    add(check_split_plans)
    for dtype in (BF16, FP16):
        for heads in (SMALL, ODD, TINY, TINY_GROUPS, HeadShape(5, 1, 96)):
            for with_norm in (False, True):
                add(check_kv8_store, heads, dtype, with_norm)
            add_kv8(check_attention, heads, [1, 1, 1, 1], [1, 16, 17, 100], dtype)
            add_kv8(check_attention, heads, [1, 1, 5, 70, 16], [1, 33, 5, 90, 160], dtype)
            add_kv8(check_padded_step, heads, [1, 1, 5, 70], [1, 33, 5, 90], dtype, (4, 5, 100))
            add_kv8(check_padding, heads, dtype)
    for block in (32, 48):
        add_kv8(check_attention, SMALL, [1, 40], [165, 64], FP16, block)
        add_kv8(check_attention, ODD, [1, 40], [165, 64], FP16, block)
    add_kv8(check_one_query_prefill, SMALL, FP16)
    for rows in (1, 4, 5, 40, 300):
        add(check_linears, rows, FP16 if INTERPRETED else BF16)
    add(check_gemv, 50, 200, BF16)
    add(check_gemv, 37, 2050, FP16)
    add(check_skinny_configs)
    for rows in (5, 8, 13, 16, 17, 32):
        add(check_skinny, rows, 200, 520, FP16)
    add(check_skinny, 21, 99, 2050, FP16)
    add(check_skinny, 1, 7, 3, FP16)
    for gated in (False, True):
        for config in (
            linears.SkinnyConfig(8, 32, 128, 1, 4, 4, 4),
            linears.SkinnyConfig(8, 64, 64, 3, 4, 4, 4),
            linears.SkinnyConfig(16, 32, 256, 4, 4, 3, 2),
            linears.SkinnyConfig(32, 128, 64, 16, 8, 3, 3),
        ):
            add(check_skinny_cut, config, gated)
    for grouped in (False, True):
        for rows in (1, 5, 20):
            add(check_fp8_skinny, rows, 200, 528, FP16, grouped)
        add(check_fp8_gemv, 200, 528, FP16, grouped)
        add(check_fp8_gemv, 37, 2050, FP16, grouped)
        for dtype in (FP16, FP32):
            add(check_fp8_tiled, 40, 99, 530, dtype, grouped)
    for rows, n, k, dtype in ((1, 200, 576, FP16), (5, 99, 128, FP16), (70, 130, 1088, FP16), (3, 64, 64, FP32)):
        add(check_rotated, rows, n, k, dtype)
    for rows in (3, 70):
        add(check_rotated_no_number, rows)
    for dtype in (BF16, FP16):
        for rows, width in ((1, 96), (3, 2500), (65, 96)):
            add(check_mlp_rows, rows, width, dtype)
    shared = [3, 1, 0, 2, 17, 40]
    for dtype in (FP16, FP32) if INTERPRETED else dtypes:
        add(check_lora_shrink, shared, 3, 1024, 16, dtype)
        add(check_lora_shrink, [0, 70, 0], 1, 577, 8, dtype)
        add(check_lora_shrink, [5, 2, 2], 2, 96, 64, dtype)
        add(check_lora_shrink, [1, 3], 1, 300, 130, dtype)
        add(check_lora_expand_add, shared, (96, 128, 160), 3, 16, dtype)
        add(check_lora_expand_add, [0, 70, 0], (577,), 1, 8, dtype)
        add(check_lora_expand_add, [5, 2, 2], (300, 637), 2, 33, dtype)
        add(check_lora_expand_add, [1, 3], (300, 310, 320), 9, 64, dtype)
        add(check_lora_expand_gate, shared, 200, 2, 16, dtype)
        add(check_lora_expand_gate, [70, 0, 1], 96, 1, 8, dtype)
        add(check_lora_expand_gate, [0, 2], 131, 3, 64, dtype)
    add(check_int_configs)
    for rows, n, k, group in ((1, 200, 160, 32), (3, 256, 320, 64), (5, 130, 256, 128), (20, 256, 200, 200)):
        add(check_int4, rows, n, k, group, FP16)
    add(check_int4, 2, 128, 384, 128, FP16, False)
    add(check_int4, 130, 256, 256, 128, FP16, True, True)
    for group in (32, 64, 128, 320):
        add(check_int4_floats, 100, 320, group, FP16)
        add(check_int4_floats, 100, 320, group, FP16, 8)
    for bits in (4, 8):
        add(check_int4_floats, 100, 320, 32, FP16, bits, True)
    shapes = ((1, 200, 160, 32, True), (5, 130, 256, 256, False), (20, 256, 200, 200, False), (3, 64, 96, 96, False))
    for rows, n, k, group, minima in shapes:
        add(check_int8, rows, n, k, group, FP16, minima)
    for rows in (2, 130):
        add(check_int4_minima, rows, 256, 320, FP16)
    for gated in (False, True):
        for config in (
            int_linears.IntConfig(8, 2, 3, 4, 2, ahead=3),
            int_linears.IntConfig(8, 2, 2, 4, 3, whole=1),
            int_linears.IntConfig(16, 4, 4, 4, 3),
            int_linears.IntConfig(128, 2, 2, 8, 3, whole=9),
        ):
            add(check_int4_cut, config, gated)
    add(check_w4a8_configs)
    for rows, columns in ((3, 200), (2, 1100)):
        for dtype in (FP16, FP32):
            add(check_block_rows, rows, columns, dtype)
    for rows, n, k, group, zeros in ((70, 200, 300, 128, True), (65, 128, 520, 256, False), (66, 70, 200, 200, True)):
        add(check_w4a8, rows, n, k, group, FP16, zeros)
    for gated in (False, True):
        for config in (
            w4a8_linears.BlockConfig(128, 2, 1, 8, 3, 128),
            w4a8_linears.BlockConfig(128, 2, 3, 8, 3, 64, whole=1),
            w4a8_linears.BlockConfig(64, 4, 2, 8, 3, 64),
        ):
            add(check_w4a8_cut, config, gated, 128)
    if INTERPRETED:
        for dtype in (FP16, FP32):
            for size in (2, 3):
                add(check_one_shot, size, (4096, 5, 7000, 64, 2048), dtype)
        add(check_splits, HeadShape(4, 1, 128), [129], FP16)
        for heads in (TINY, TINY_GROUPS):
            add(check_splits, heads, [1, 17, 129], FP16)
            add_kv8(check_splits, heads, [1, 17, 129], FP16)
        return found
    for hidden in (4096, 5120, 8192):
        add(check_norm, 129, hidden, BF16)
    add(check_silu_mul, 65, 11008, BF16)
    for heads in (MHA, GQA):
        add(check_rope_store, heads, BF16, False)
        add(check_rope_store, heads, BF16, True)
        add(check_padding, heads, BF16)
        add(check_one_query_prefill, heads, BF16)
        add(check_prompt_attention, heads, 1024)
        add(check_graph_replay, heads)
        add(check_step_replay, heads)
        add(check_splits, heads, [1, 15, 16, 17, 129, 300, 1000], BF16)
        add(check_attention, heads, [37] * 40, [i * 9 + 37 for i in range(40)], BF16)
        add(check_attention, heads, [1, 300, 129], [70, 1000, 129], BF16, 32)
        add(check_padded_step, heads, [1, 1, 1, 300, 17], [400, 16, 90, 300, 100], BF16, (8, 16, 384))
        add(check_attention, heads, [1], [4095], BF16)
        add(check_attention, heads, [1] * 8, [1, 15, 16, 17, 127, 128, 129, 4095], BF16)
        add(check_attention, heads, [1] * 150, [(i * 37) % 400 + 1 for i in range(150)], BF16)
        add(check_attention, heads, [128], [128], BF16)
        add(check_attention, heads, [700, 513, 64], [700, 1500, 64], BF16)
        add(check_attention, heads, [250, 3, 250], [2500, 3, 700], BF16)
        add(check_attention, heads, [1, 5, 800, 128], [300, 5, 1551, 4000], FP16)
        add(check_padded_step, heads, [1, 1, 900, 17], [400, 16, 2000, 100], BF16, (8, 16, 1024))
        add(check_attention, heads, [1, 1, 1, 300, 17], [4095, 16, 900, 300, 1000], FP16)
        for with_norm in (False, True):
            add(check_kv8_store, heads, BF16, with_norm)
        add_kv8(check_padding, heads, BF16)
        add_kv8(check_one_query_prefill, heads, BF16)
        add_kv8(check_prompt_attention, heads, 1024)
        add_kv8(check_graph_replay, heads)
        add_kv8(check_step_replay, heads)
        add_kv8(check_splits, heads, [1, 15, 16, 17, 129, 300, 1000], BF16)
        add_kv8(check_attention, heads, [1, 300, 129], [70, 1000, 129], BF16, 32)
        add_kv8(check_padded_step, heads, [1, 1, 1, 300, 17], [400, 16, 90, 300, 100], BF16, (8, 16, 384))
        add_kv8(check_attention, heads, [1] * 150, [(i * 37) % 400 + 1 for i in range(150)], BF16)
        add_kv8(check_attention, heads, [700, 513, 64], [700, 1500, 64], BF16)
        add_kv8(check_attention, heads, [1, 1, 1, 300, 17], [4095, 16, 900, 300, 1000], FP16)
    for n, k in ((2122, 128), (2121, 1408), (2500, 16384)):
        for dtype in (BF16, FP16):
            add(check_gemv, n, k, dtype)
            add(check_fp8_gemv, n, k, dtype, False)
    for n, k in ((12288, 4096), (4096, 4096), (4096, 11008), (7168, 5120), (5120, 17408), (22016, 4096)):
        add(check_gemv, n, k, BF16)
        add(check_gemv_that_stands_in, n, k)
        for rows in (5, 16, 32):
            add(check_skinny, rows, n, k, BF16)
        add(check_skinny, 11, n, k, FP16)
        for grouped in (False, True):
            add(check_fp8_gemv, n, k, BF16, grouped)
            for rows in (5, 32, 60):
                add(check_fp8_skinny, rows, n, k, BF16, grouped)
            for rows in (2, 33, 100, 300):
                add(check_fp8_ops, rows, n, k, BF16, grouped)
            for rows in (200, 500):
                add(check_fp8_tiled, rows, n, k, BF16, grouped)
        for rows in (1, 8, 33, 64, 100, 256, 300):
            add(check_rotated, rows, n, k, BF16)
        for rows in (65, 128, 200, 256):
            add(check_wide, rows, n, k, BF16)
        for group, zeros in ((128, True), (32, False)):
            add(check_w4a8, 300, n, k, group, BF16, zeros)
        for rows in (65, 100, 128, 129, 200, 256):
            add(check_w4a8, rows, n, k, 128, BF16, rows % 2 == 0)
    for rows in (65, 100, 128, 129, 200, 256):
        for n, k, group, zeros, dtype in (
            (4224, 1096, 128, True, BF16), (1003, 3008, 128, False, FP16), (6070, 1408, 256, True, FP16),
            (640, 4096, 4096, True, BF16), (320, 2000, 2000, False, FP16), (22016, 640, 128, True, FP16),
        ):  # fmt: skip
            add(check_w4a8, rows, n, k, group, dtype, zeros)
        # Parts of a tile and of a block, fewer blocks than are on their way, and several jobs to a program.
        for n, k, dtype in (
            (4224, 1088, BF16), (1003, 3008, FP16), (70, 208, BF16), (151936, 576, BF16), (102400, 4096, BF16),
        ):  # fmt: skip
            add(check_wide, rows, n, k, dtype)
    for n, k in ((102400, 4096), (151936, 1024)):
        for rows in (1, 2, 40, 256, 600):
            add(check_rotated, rows, n, k, BF16)
    for gated in (False, True):
        for config in W4A8_TILINGS:
            add(check_w4a8_cut, config, gated, 128, BF16)
            add(check_w4a8_cut, config._replace(split_k=3, whole=1), gated, 256, FP16)
    for rows in (8, 32):
        add(check_skinny_replay, rows, 4096, 11008)
    # The interpreter cuts float32 to e4m3 where hardware rounds.
    for grouped in (False, True):
        for rows in (3, 40):
            add(check_fp8_ops, rows, 99, 530, FP16, grouped)
    for dtype in dtypes:
        add(check_fp8_rows, 5, 200, dtype)
        add(check_block_rows, 5, 200, dtype)
        add(check_block_rows, 130, 1097, dtype)
    for hidden in (4096, 11008, 28672):
        add(check_fp8_rows, 129, hidden, BF16)
        add(check_block_rows, 129, hidden, BF16)
    for rows in (2, 40):
        add(check_fp8_no_number, rows)
    for dtype in (BF16, FP16):
        for width in (96, 11008, 14336, 17408, 28672):
            for rows in (1, 65, 256, 300):
                add(check_mlp_rows, rows, width, dtype)
        for rows in (1, 33, 64, 65, 128, 129, 256, 300):
            for grouped in (False, True):
                add(check_mlp, rows, 1024, 2816, dtype, grouped)
            add(check_mlp_w4a8, rows, 1024, 2816, dtype)
    for hidden, width in ((4096, 11008), (5120, 17408)):
        for rows in (100, 300, 2048):
            add(check_mlp, rows, hidden, width, BF16, False)
            add(check_mlp_w4a8, rows, hidden, width, BF16)
    for rows in (1, 8, 32, 48, 256):
        add(check_fp8_replay, rows, 4096, 11008)
    for n, k in ((12288, 4096), (4096, 11008), (5120, 17408), (22016, 4096)):
        for rows in (1, 6, 16, 32, 60, 100, 256, 300):
            add(check_int4, rows, n, k, 128, BF16)
        add(check_int4, 8, n, k, 64, BF16)
        add(check_int4, 40, n, k, 32, BF16)
        add(check_int4, 200, n, k, k, FP16, False)
        add(check_int4, 8, n, k, 128, BF16, True, True)
        add(check_int4_floats, n, k, 128, BF16)
        for rows in (1, 16, 60, 100, 300):
            add(check_int8, rows, n, k, k, BF16, False)
            add(check_int8, rows, n, k, 32, BF16, rows % 3 == 0)
            add(check_int4_minima, rows, n, k, BF16)
        add(check_int8, 8, n, k, 32, FP16, True)
        add(check_int8, 40, n, k, k, FP16, False)
        add(check_int4_minima, 8, n, k, FP16)
        for bits in (4, 8):
            add(check_int4_floats, n, k, 32, BF16, bits, True)
            add(check_int4_floats, n, k, 32, FP16, bits, True)
        add(check_int4_floats, n, k, k, BF16, 8)
        add(check_int4_floats, n, k, k, FP16, 8)
    add(check_int8, 300, 70_000, 128, 128, BF16, False)
    for rows in (1, 8, 32, 48, 128, 256, 300):
        add(check_int4_replay, rows, 4096, 11008)
        add(check_int4_replay, rows, 4096, 11008, 8)
        if rows > 48:
            add(check_w4a8_replay, rows, 4096, 11008)
    for counts in ([0, *[2] * 16], [20, 12, *[0] * 7], [0, 256]):
        add(check_lora_shrink, counts, 3, 4096, 16, BF16)
        add(check_lora_shrink, counts, 1, 11008, 16, BF16)
        add(check_lora_shrink, counts, 2, 5120, 64, BF16)
        add(check_lora_expand_add, counts, (4096, 8192, 12288), 8, 16, BF16)
        add(check_lora_expand_add, counts, (5120, 6144, 7168), 10, 64, BF16)
        add(check_lora_expand_gate, counts, 11008, 8, 16, BF16)
        add(check_lora_expand_gate, counts, 17408, 10, 64, BF16)
    for rows in (1, 8, 32, 100):
        add(check_lora_replay, rows, 16, 4096, 11008)
    for vocabulary in (102400, 151936):
        add(check_argmax, 65, vocabulary, BF16)
        add(check_gumbel, 9, vocabulary, BF16, True)
        for dtype, spread in ((BF16, 3.0), (FP32, 3.0), (FP32, 0.3)):
            add(check_keep_thresholds, vocabulary, dtype, spread)
        add(check_keep_thresholds_of_a_crowd, vocabulary)
    return found


def run(name: str) -> str:
    """What went wrong with a case; empty if nothing did."""
    torch.manual_seed(0)
    try:
        cases()[name]()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} {error} ({frame.name}:{frame.lineno})"[:600]
    return ""


def case_processes() -> ProcessPoolExecutor:
    """Return processes to share the cases: most of their time is the compiler's."""
    return ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn"))


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    names = [name for name in cases() if wanted in name]
    with case_processes() as pool:
        wrong = {name: what for name, what in zip(names, pool.map(run, names), strict=True) if what}
    for name, what in wrong.items():
        print(f"FAILED {name}: {what}")
    print(f"{len(names) - len(wrong)} of {len(names)} passed on {DEVICE}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
