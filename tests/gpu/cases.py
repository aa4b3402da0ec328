"""Every kernel against its reference. `python3 -m tests.gpu.cases [part of a name]` runs them without pytest;
TRITON_INTERPRET=1 runs those that are small enough on the CPU."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch

from tests.gpu.steps import DEVICE, INTERPRETED, TOLERANCE, assert_near, paged, poisoned, randn
from weft.kernels import HeadShape, reference
from weft.kernels.triton import activation, attention, decode_attention, gemv, norm, prefill_attention, sampling
from weft.kernels.triton.rope_store import norm_rotate_and_store, rotate_and_store

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MHA, GQA, SMALL, ODD = HeadShape(32, 32, 128), HeadShape(40, 8, 128), HeadShape(9, 3, 64), HeadShape(3, 3, 64)


def check_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    tolerance = TOLERANCE[dtype] / 2
    kept = residual.clone()
    with poisoned():
        assert_near(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), tolerance)
        out = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert_near(out, reference.add_rms_norm(x, kept, weight, 1e-6), tolerance)
    assert torch.equal(residual, kept) or INTERPRETED


def check_strided_norm() -> None:
    row = randn(5, 12 * 64)
    x, weight = row[:, 64 : 9 * 64].view(5, 8, 64), randn(64)
    with poisoned():
        assert_near(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), TOLERANCE[BF16])
        narrow, weight = row[:, :128], randn(128)
        assert_near(norm.rms_norm(narrow, weight, 1e-6), reference.rms_norm(narrow, weight, 1e-6), TOLERANCE[BF16])


def check_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 10
    with poisoned():
        assert_near(activation.silu_mul(gate_up), reference.silu_mul(gate_up), TOLERANCE[dtype])


def check_rope_store(heads: HeadShape, dtype: torch.dtype, with_norm: bool) -> None:
    qkv, kv, batch = paged(heads, [1, 1, 20, 3], [31, 32, 40, 3], dtype)
    tokens, dim = qkv.shape[0], heads.head_dim
    rotations = torch.polar(torch.ones(tokens, dim // 2), torch.randn(tokens, dim // 2)).to(DEVICE)
    kv = torch.nan_to_num(kv)
    wanted, wanted_kv = qkv.clone(), kv.clone()
    q_norm, k_norm = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if with_norm else (None, None)
    if with_norm:
        ends = (0, heads.q_size, heads.q_size + heads.kv_size // 2)
        for start, stop, weight in ((ends[0], ends[1], q_norm), (ends[1], ends[2], k_norm)):
            by_head = wanted[:, start:stop].view(tokens, -1, dim)
            by_head.copy_(reference.rms_norm(by_head, weight, 1e-6))
    reference.rotate_and_store(wanted, heads, rotations, wanted_kv, batch.slots)
    if with_norm:
        norm_rotate_and_store(qkv, heads, rotations, kv, batch.slots, q_norm, k_norm, 1e-6)
    else:
        rotate_and_store(qkv, heads, rotations, kv, batch.slots)
    assert_near(qkv, wanted, TOLERANCE[dtype])
    assert_near(kv, wanted_kv, TOLERANCE[dtype])
    assert torch.equal(qkv[:, -heads.kv_size // 2 :], wanted[:, -heads.kv_size // 2 :]), "the values of qkv changed"


def check_attention(heads: HeadShape, news: list[int], lengths: list[int], dtype: torch.dtype, block: int = 16) -> None:
    qkv, kv, batch = paged(heads, news, lengths, dtype, block)
    wanted = reference.attention(qkv.float(), heads, kv.float(), batch)
    for _ in range(2):
        with poisoned():
            out = attention.attention(qkv, heads, kv, batch)
        assert out.dtype == dtype
        assert_near(out, wanted, TOLERANCE[dtype])


def check_one_query_prefill(heads: HeadShape, dtype: torch.dtype) -> None:
    """The prefill kernel takes decodes too, and sequences without queries."""
    qkv, kv, batch = paged(heads, [1, 1, 5], [17, 64, 70], dtype)
    starts = torch.tensor([0, 1, 2, 7, 7], dtype=torch.int32, device=DEVICE)
    tables = torch.cat([batch.block_tables, torch.zeros_like(batch.block_tables[:1])])
    lengths = torch.cat([batch.lengths_tensor, torch.zeros_like(batch.lengths_tensor[:1])])
    with poisoned():
        out = prefill_attention.prefill_attention(qkv, heads, kv, tables.int(), lengths.int(), starts, 5)
    assert_near(out, reference.attention(qkv.float(), heads, kv.float(), batch), TOLERANCE[dtype])


def check_padding(heads: HeadShape, dtype: torch.dtype) -> None:
    """Rows of length 0 give zeros, rows of length 1 in a null block of numbers give numbers; others do not notice."""
    lengths = [33, 200, 16]
    qkv, kv, batch = paged(heads, [1] * 5, [*lengths, 0, 0], dtype)
    kv[0] = 1.0
    real = batch._replace(query_starts=[0, 1, 2, 3], lengths=lengths, num_decodes=3)
    wanted = reference.attention(qkv[:3].float(), heads, kv.float(), real)
    tables, padded = batch.block_tables.int(), batch.lengths_tensor.int()
    padded[4] = 1
    with poisoned():
        out = decode_attention.decode_attention(qkv, heads, kv, tables, padded)
    assert_near(out[:3], wanted, TOLERANCE[dtype])
    assert not out[3].any() and bool((out[4] == 1).all())


def check_split_plans() -> None:
    for programs in (1, 8, 16, 128, 512, 1024, 4096, 100000):
        for context in (16, 200, 4096, 131072):
            plan = decode_attention.split_plan(programs, context, 16, 528)
            assert 1 <= plan.num_splits <= decode_attention.MAX_SPLITS and plan.min_tokens % 16 == 0
    assert decode_attention.split_plan(2048, 4096, 16, 528).num_splits == 1


def check_graph_replay(heads: HeadShape) -> None:
    """Captured once, replayed at other lengths: the splits follow the device."""
    rows, most = 3, 1000
    qkv, kv, batch = paged(heads, [1] * rows, [most] * rows, BF16)
    lengths = batch.lengths_tensor.clone()
    decode_attention.decode_attention(qkv, heads, kv, batch.block_tables, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention.decode_attention(qkv, heads, kv, batch.block_tables, lengths)
    for now in ([1, 16, 17], [most, 31, 500], [999, 1000, 1], [64, 65, 66]):
        lengths.copy_(torch.tensor(now, device=DEVICE))
        out.fill_(float("nan"))
        graph.replay()
        wanted = reference.attention(qkv.float(), heads, kv.float(), batch._replace(lengths=now))
        assert_near(out, wanted, TOLERANCE[BF16])


def check_gemv(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype) * k**-0.5, randn(n, dtype=dtype)
    residual, scale = randn(rows, n, dtype=dtype), 1 + randn(k, dtype=dtype) / 10
    tolerance = TOLERANCE[dtype]
    plain = x.float() @ weight.float().T
    normed = reference.rms_norm(x.float(), scale.float(), 1e-6) @ weight.float().T
    with poisoned():
        assert_near(gemv.gemv(x, weight), plain, tolerance)
        assert_near(gemv.linear(x, weight, bias), plain + bias.float(), tolerance)
        assert_near(gemv.norm_gemv(x, scale, 1e-6, weight, bias), normed + bias.float(), tolerance)
        total = residual.clone()
        gemv.gemv_add(x, weight, bias, total)
        assert_near(total, residual.float() + plain + bias.float(), tolerance)
        if n % 2 == 0:
            assert_near(gemv.gate_up_gemv(x, weight), reference.silu_mul(plain), 2 * tolerance)
            out = gemv.norm_gate_up_gemv(x, scale, 1e-6, weight)
            assert_near(out, reference.silu_mul(normed), 2 * tolerance)


def check_linear_of_many_rows() -> None:
    x, weight = randn(gemv.MAX_ROWS + 1, 64), randn(48, 64)
    assert_near(gemv.linear(x, weight), reference.linear(x, weight), 1e-3)


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
        tokens, peaks = sampling.argmax(logits)
    wanted_peaks, wanted = logits.float().max(dim=-1)
    assert torch.equal(tokens, logits.float().argmax(-1)), (tokens, wanted)
    assert peaks.dtype == FP32 and torch.equal(peaks.nan_to_num(nan=1e9), wanted_peaks.nan_to_num(nan=1e9))


def check_gumbel(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    from weft.worker.sampler import gumbel_noise

    logits = randn(rows, vocabulary, dtype=dtype)
    temperatures = torch.tensor([0.0, 1.0, 0.3, 2.5] * rows, device=DEVICE)[:rows]
    seeds = torch.tensor([0, -1, 2**62 + 12345, 77] * rows, device=DEVICE)[:rows]
    positions = torch.arange(rows, device=DEVICE) * 1000 + 1
    ids = torch.arange(vocabulary, device=DEVICE)
    with poisoned():
        tokens, peaks = sampling.gumbel_sample(logits, temperatures, seeds, positions)
    assert torch.equal(peaks, logits.float().max(dim=-1)[0])
    for i in range(rows):
        score, temperature = logits[i].float(), float(temperatures[i])
        if temperature:
            score = score / temperature + gumbel_noise(int(seeds[i]), int(positions[i]), ids).to(DEVICE)
        # Where two scores are a rounding apart either token is right.
        assert float(score.max() - score[tokens[i]]) <= 2e-5, f"row {i}"


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}

    def add(check: Callable[..., None], *arguments: object) -> None:
        text = "-".join(str(a).replace("torch.", "").replace("HeadShape", "").replace(" ", "") for a in arguments)
        found[f"{check.__name__[6:]}-{text}"] = partial(check, *arguments)

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
        add(check_padding, ODD, dtype)
        add(check_argmax, 5, 5003, dtype)
        add(check_gumbel, 6, 5003, dtype)
    add(check_strided_norm)
    add(check_attention, SMALL, [1, 40], [65, 64], FP16, 32)
    add(check_attention, ODD, [1, 40], [65, 64], FP16, 32)
    add(check_attention, ODD, [1, 1], [300, 77], BF16)
    add(check_one_query_prefill, SMALL, FP16)
    add(check_padding, SMALL, FP16)
    add(check_split_plans)
    add(check_linear_of_many_rows)
    for rows in (1, 2, 3, 4):
        add(check_gemv, rows, 50, 200, BF16)
    add(check_gemv, 1, 37, 2050, FP16)
    if INTERPRETED:
        return found
    for hidden in (4096, 5120, 8192):
        add(check_norm, 129, hidden, BF16)
    add(check_silu_mul, 65, 11008, BF16)
    for heads in (MHA, GQA):
        add(check_rope_store, heads, BF16, False)
        add(check_rope_store, heads, BF16, True)
        add(check_padding, heads, BF16)
        add(check_one_query_prefill, heads, BF16)
        add(check_graph_replay, heads)
        add(check_attention, heads, [1], [4095], BF16)
        add(check_attention, heads, [1] * 8, [1, 15, 16, 17, 127, 128, 129, 4095], BF16)
        add(check_attention, heads, [1] * 150, [(i * 37) % 400 + 1 for i in range(150)], BF16)
        add(check_attention, heads, [128], [128], BF16)
        add(check_attention, heads, [700, 513, 64], [700, 1500, 64], BF16)
        add(check_attention, heads, [1, 1, 1, 300, 17], [4095, 16, 900, 300, 1000], FP16)
    for n, k in ((12288, 4096), (4096, 4096), (4096, 11008), (7168, 5120), (5120, 17408), (22016, 4096)):
        for rows in (1, 3):
            add(check_gemv, rows, n, k, BF16)
    for vocabulary in (102400, 151936):
        add(check_argmax, 65, vocabulary, BF16)
        add(check_gumbel, 9, vocabulary, BF16)
    return found


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    failed = total = 0
    for name, check in cases().items():
        if wanted not in name:
            continue
        total += 1
        began = time.monotonic()
        torch.manual_seed(total)
        try:
            check()
        except Exception as error:
            failed += 1
            frame = traceback.extract_tb(error.__traceback__)[-1]
            print(f"FAILED {name}: {type(error).__name__} {error} ({frame.name}:{frame.lineno})"[:600], flush=True)
        else:
            seconds = time.monotonic() - began
            if seconds > 2:
                print(f"ok {name} {seconds:.1f} s", flush=True)
    print(f"{total - failed} of {total} passed on {DEVICE}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
