"""One table of what each kernel takes at the shapes of both models: `python3 -m tests.gpu.bench_kernels [part]`.
With `tile_7b` it prints the tilings of w4a8 that are tried instead.

Each figure is the median over replays of a CUDA graph that runs the kernel once on each of several sets of inputs,
together larger than the L2 cache. GB is what must be moved, GFLOP what must be multiplied.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import HeadNorms, HeadShape
from weft.kernels.batch import AdapterGroups
from weft.kernels.fp8 import E4M3, fp8_weight
from weft.kernels.int_weights import TILE, IntGroups, IntWeight, int8_rows, pack, quantised_groups
from weft.kernels.kv_cache import LayerCache, zero_cache
from weft.kernels.rotated import rotated_weight
from weft.kernels.triton import decode_attention as decode_module
from weft.kernels.triton import (
    elementwise,
    fp8_linears,
    launch,
    linears,
    lora_linears,
    sampling_kernels,
    w4a8_linears,
)
from weft.kernels.triton.decode_attention import decode_attention
from weft.kernels.triton.elementwise import rotate_and_store
from weft.kernels.triton.prefill_attention import prefill_attention
from weft.kernels.weights import SlotLowRank

COLD_BYTES = 256 << 20
"""The sets of inputs of one measurement take at least so much together: four times the L2."""
MODELS = {
    "7b": (HeadShape(32, 32, 128), 4096, 11008, 102400),
    "14b": (HeadShape(40, 8, 128), 5120, 17408, 151936),
}
FP8_TILES = [
    (16, 3, 1), (16, 5, 1), (16, 8, 1), (32, 2, 1), (32, 4, 1), (32, 5, 1), (64, 2, 1), (64, 3, 1), (64, 4, 1),
    (32, 3, 2), (64, 3, 2), (64, 3, 4), (128, 2, 4), (128, 3, 4),
]  # fmt: skip
"""Tokens, stages and warps of the decode kernel of a cache of e4m3 that are tried."""
W4A8_TILINGS = [
    (128, 2, 8, 4, 128), (256, 2, 8, 3, 128), (64, 4, 8, 4, 64), (128, 1, 4, 4, 128), (256, 1, 4, 3, 128),
    (128, 2, 4, 4, 64),
]  # fmt: skip
"""Rows, tiles, warps, stages, and rows at once of the products of w4a8 that are tried."""
ONLY = sys.argv[1] if len(sys.argv) > 1 else ""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Of one call."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 20 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    graph.replay()
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / (rounds * len(calls)))
    return statistics.median(times)


def report(name: str, make: Callable[[], Callable[[], object]], moved: float, multiplied: float = 0.0) -> None:
    """`make` allocates a set of inputs and returns the call on it."""
    if ONLY not in name:
        return
    sets = min(64, max(2, int(COLD_BYTES // max(moved, 1)) + 1))
    took = microseconds([make() for _ in range(sets)])
    rate = f"{multiplied / took / 1e6:8.1f} TFLOP/s" if multiplied else f"{moved / took / 1e6:8.2f} TB/s"
    print(f"{name:<44} {took:9.1f} us {rate}", flush=True)


def decode_call(heads: HeadShape, rows: int, context: int, kv: LayerCache, max_context: int) -> Callable[[], object]:
    each = -(-context // 16)
    num_blocks = len(kv if isinstance(kv, Tensor) else kv.numbers)
    qkv = randn(rows, heads.q_size + heads.kv_size)
    tables = torch.zeros(rows, -(-max_context // 16), dtype=torch.int64, device="cuda")
    tables[:, :each] = torch.randperm(num_blocks - 1, device="cuda")[: rows * each].view(rows, each) + 1
    lengths = torch.full((rows,), context, device="cuda")
    return lambda: decode_attention(qkv, heads, kv, tables, lengths)


def prefill_call(heads: HeadShape, prompts: int, tokens: int, kv: Tensor, before: int = 0) -> Callable[[], object]:
    """Each prompt's last `tokens` tokens, behind so many that are cached."""
    qkv = randn(prompts * tokens, heads.q_size + heads.kv_size)
    num_blocks = prompts * (before + tokens) // 16
    tables = (torch.randperm(kv.shape[0] - 1, device="cuda")[:num_blocks] + 1).view(prompts, -1)
    lengths = torch.full((prompts,), before + tokens, device="cuda")
    starts = torch.arange(0, prompts * tokens + 1, tokens, device="cuda")
    return lambda: prefill_attention(qkv, heads, kv, tables, lengths, starts)


def bench_attention(model: str, heads: HeadShape) -> None:
    kv = torch.randn(6400, 16, 2, heads.num_kv_heads, heads.head_dim, device="cuda", dtype=torch.bfloat16)
    for rows, context in [(rows, 200) for rows in (1, 8, 16, 32, 64, 128, 256)] + [(32, 640), (1, 4096), (8, 4096)]:
        moved = 2.0 * rows * (context * heads.kv_size + 2 * heads.q_size)
        report(
            f"{model} decode {rows} x {context}",
            lambda rows=rows, context=context: decode_call(heads, rows, context, kv, 4096),
            moved,
        )
    whole = ((1, 128), (1, 512), (1, 2048), (4, 512), (16, 512))
    chunks = ((256, 15360), (1024, 7168), (1024, 15360), (2048, 14336))
    for prompts, tokens, before in [(*each, 0) for each in whole] + [(1, *each) for each in chunks]:
        flops = 4.0 * heads.q_size * prompts * tokens * (before + (tokens + 1) / 2)
        report(
            f"{model} prefill {prompts} x {tokens}" + (f" behind {before}" if before else ""),
            lambda prompts=prompts, tokens=tokens, before=before: prefill_call(heads, prompts, tokens, kv, before),
            2e7 * prompts * tokens / 128,
            flops,
        )


def bench_fp8_cache(name: str, heads: HeadShape) -> None:
    """The attention of a decode and the store over a cache of e4m3, for several tiles, beside one of bfloat16."""
    rows, context, num_blocks = 256, 200, 6400
    shape = (1, num_blocks, 16, 2, heads.num_kv_heads, heads.head_dim)
    plain = randn(*shape)[0]
    [fp8] = zero_cache(shape, E4M3, plain.device)
    fp8.write(torch.arange(num_blocks * 16, device="cuda"), plain.flatten(0, 1))
    around = 4.0 * rows * heads.q_size
    chosen = decode_module._FP8_TOKENS, decode_module._FP8_STAGES, decode_module._FP8_WARPS

    def attend(kv: LayerCache) -> Callable[[], object]:
        return decode_call(heads, rows, context, kv, 4096)

    def store(kv: LayerCache) -> Callable[[], object]:
        qkv, slots = randn(rows, heads.q_size + heads.kv_size), torch.randperm(num_blocks * 16, device="cuda")[:rows]
        turns = torch.view_as_complex(torch.randn(rows, heads.head_dim // 2, 2, device="cuda"))
        return lambda: rotate_and_store(qkv, heads, turns, kv, slots)

    wide, narrow = 2.0 * heads.kv_size, 2.0 * heads.num_kv_heads * (heads.head_dim + 2)
    report(f"kv8 {name} decode {rows} x {context} bfloat16", lambda: attend(plain), around + rows * context * wide)
    for tokens, stages, warps in [chosen, *FP8_TILES]:
        decode_module._FP8_TOKENS, decode_module._FP8_STAGES, decode_module._FP8_WARPS = tokens, stages, warps
        label = f"kv8 {name} decode {rows} x {context} fp8 {tokens}/{stages}/{warps}"
        report(label, lambda: attend(fp8), around + rows * context * narrow)
    decode_module._FP8_TOKENS, decode_module._FP8_STAGES, decode_module._FP8_WARPS = chosen
    for kind, kv, moved in (("bfloat16", plain, wide), ("fp8", fp8, narrow)):
        report(f"kv8 {name} rope_store {rows} {kind}", lambda kv=kv: store(kv), rows * (moved + 2.0 * heads.q_size))


def bench_small(model: str, heads: HeadShape, hidden: int, width: int, vocabulary: int) -> None:
    size = heads.q_size + heads.kv_size
    kv = randn(400, 16, 2, heads.num_kv_heads, heads.head_dim)

    def normed(rows: int) -> Callable[[], object]:
        x, weight = randn(rows, hidden), randn(hidden)
        return lambda: elementwise.rms_norm(x, weight, 1e-6)

    def silu(rows: int) -> Callable[[], object]:
        x = randn(rows, 2 * width)
        return lambda: elementwise.silu_mul(x)

    def rope(rows: int) -> Callable[[], object]:
        qkv, scale = randn(rows, size), randn(heads.head_dim)
        turns = torch.view_as_complex(torch.randn(rows, heads.head_dim // 2, 2, device="cuda"))
        slots = torch.randperm(6399, device="cuda")[:rows] + 1
        norms = HeadNorms(scale, scale, 1e-6) if model == "14b" else None
        return lambda: rotate_and_store(qkv, heads, turns, kv, slots, norms)

    def greedy(rows: int) -> Callable[[], object]:
        logits = randn(rows, vocabulary)
        return lambda: sampling_kernels.argmax(logits)

    def gumbel(rows: int) -> Callable[[], object]:
        logits, ones = randn(rows, vocabulary), torch.ones(rows, device="cuda")
        seeds = torch.arange(rows, device="cuda")
        return lambda: sampling_kernels.gumbel_sample(logits, ones, ones, seeds, seeds)

    for rows in (1, 256, 2048):
        report(f"{model} rms_norm {rows}", lambda rows=rows: normed(rows), 4.0 * rows * hidden)
        report(f"{model} silu_mul {rows}", lambda rows=rows: silu(rows), 6.0 * rows * width)
        report(f"{model} rope_store {rows}", lambda rows=rows: rope(rows), 4.0 * rows * size)
    for rows in (1, 256):
        report(f"{model} argmax {rows}", lambda rows=rows: greedy(rows), 2.0 * rows * vocabulary)
        report(f"{model} gumbel {rows}", lambda rows=rows: gumbel(rows), 2.0 * rows * vocabulary)


def bench_linear(model: str, heads: HeadShape, hidden: int, width: int, vocabulary: int) -> None:
    shapes = {
        "qkv": (heads.q_size + heads.kv_size, hidden), "o": (hidden, heads.q_size), "gate_up": (2 * width, hidden),
        "down": (hidden, width), "head": (vocabulary, hidden),
    }  # fmt: skip
    for name, (n, k) in shapes.items():
        moved = 2.0 * n * k
        weights = [randn(n, k) for _ in range(max(2, int(COLD_BYTES // moved) + 1))]
        for rows in (1, 8, 32, 128):
            x, scale, total = randn(rows, k), randn(k), randn(rows, n)
            turn = iter(range(10**9))

            def by(call: Callable[[Tensor], object], turn=turn, weights=weights) -> Callable[[], Callable[[], object]]:
                def make() -> Callable[[], object]:
                    weight = weights[next(turn) % len(weights)]
                    return lambda: call(weight)

                return make

            label = f"{model} {name} {n}x{k} rows {rows}"
            report(f"{label} cublas", by(lambda w, x=x: F.linear(x, w)), moved)
            if name in ("qkv", "head"):
                report(f"{label} norm_linear", by(lambda w, x=x, s=scale: linears.norm_linear(x, s, 1e-6, w)), moved)
            elif name == "gate_up":
                report(f"{label} norm_gate_up", by(lambda w, x=x, s=scale: linears.norm_gate_up(x, s, 1e-6, w)), moved)
            else:
                report(f"{label} linear_add", by(lambda w, x=x, t=total: linears.linear_add(x, w, None, t)), moved)
        del weights


def bench_eight_bits(model: str, heads: HeadShape, hidden: int, width: int, vocabulary: int) -> None:
    """The products alone, of rows that are rounded already: by the kernel that is chosen, and by the tiled one."""
    shapes = {
        "qkv": (heads.q_size + heads.kv_size, hidden), "o": (hidden, heads.q_size), "gate_up": (2 * width, hidden),
        "down": (hidden, width), "head": (vocabulary, hidden),
    }  # fmt: skip
    for name, (n, k) in shapes.items():
        if ONLY not in f"{model} fp8 {name}":
            continue
        is_head, is_added = name == "head", name in ("o", "down")
        weights = [
            (rotated_weight if is_head else fp8_weight)(randn(n, k))
            for _ in range(max(2, int(COLD_BYTES // (n * k)) + 1))
        ]
        for rows in (65, 128, 160, 256):
            plain, total = randn(rows, k), randn(rows, n)
            x = (fp8_linears.rotated_rows if is_head else fp8_linears.quantise_rows)(plain)
            tiled = microseconds(
                [partial(fp8_linears.tiled, x, one, None, total if is_added else None, total) for one in weights]
            )
            chosen = microseconds(
                [
                    partial(fp8_linears.linear_add, x, one, None, total)
                    if is_added
                    else partial(fp8_linears.linear, x, one, None, torch.bfloat16)
                    for one in weights
                ]
            )
            print(f"{model} fp8 {name} {n}x{k} rows {rows:<4} {chosen:9.1f} us, tiled {tiled:9.1f} us", flush=True)
        del weights


def in_blocks(groups: IntGroups) -> IntGroups:
    """Return the weight with scales for 32 columns, and minima, as GGUF files have them."""
    scales = groups.scales.repeat_interleave(groups.group_size // 32, dim=1)
    return IntGroups(groups.numbers, scales, None, 32, minima=-scales)


KINDS: dict[str, Callable[[Tensor], IntGroups]] = {
    "int4": quantised_groups,
    "w4a8": quantised_groups,
    "Q4_K": lambda weight: in_blocks(quantised_groups(weight)),
    "int8": int8_rows,
    "Q8_0": lambda weight: int8_rows(weight, 32),
    "Q5_K": lambda weight: in_blocks(int8_rows(weight, 32)),
}


def packed(kind: str, n: int, k: int) -> IntWeight:
    weight = pack(KINDS[kind](randn(n, k)), torch.bfloat16)
    return weight.for_fp8_inputs() if kind == "w4a8" else weight


def bench_int4(model: str, kind: str, heads: HeadShape, hidden: int, width: int) -> None:
    """Of weights of four or eight bits `moved` counts what is beside the numbers as well."""
    shapes = {
        "qkv": (heads.q_size + heads.kv_size, hidden), "o": (hidden, heads.q_size), "gate_up": (2 * width, hidden),
        "down": (hidden, width),
    }  # fmt: skip
    for name, (n, k) in shapes.items():
        first = packed(kind, n, k)
        moved = sum(
            held.nbytes for held in (first.numbers, first.scales, first.zeros, first.minima) if held is not None
        )
        weights = [packed(kind, n, k) for _ in range(int(COLD_BYTES // moved) + 1)]
        for rows in (96, 128, 192, 256) if kind == "w4a8" else (1, 8, 32, 64, 128, 256, 2048):
            x, scale, total = randn(rows, k), randn(k), randn(rows, n)
            turn = iter(range(10**9))

            def make(x=x, scale=scale, total=total, turn=turn, weights=weights, name=name) -> Callable[[], object]:
                weight = weights[next(turn) % len(weights)]
                if name == "gate_up":
                    return lambda: linears.norm_gate_up(x, scale, 1e-6, weight)
                if name == "qkv":
                    return lambda: linears.norm_linear(x, scale, 1e-6, weight)
                return lambda: linears.linear_add(x, weight, None, total)

            report(f"{model} {kind} {name} {n}x{k} rows {rows}", make, moved, 2.0 * rows * n * k if rows > 64 else 0.0)
        del weights


def bench_w4a8_tilings(model: str, heads: HeadShape, hidden: int, width: int) -> None:
    """Print what the products of a layer take by each tiling, all of them, and the best of each together."""
    if not ONLY or ONLY not in f"tile_{model}":
        return
    shapes = {
        "qkv": (heads.q_size + heads.kv_size, hidden), "o": (hidden, heads.q_size), "gate_up": (2 * width, hidden),
        "down": (hidden, width),
    }  # fmt: skip
    all_rows = (128, 256)
    tried = {
        (rows, name, f"{'/'.join(map(str, tiling))}{' shared' * is_shared}"): config
        for name, (n, k) in shapes.items()
        for rows in all_rows
        for tiling in W4A8_TILINGS
        for is_shared in (False, True)
        if (config := w4a8_tiling(tiling, is_shared, rows, n, k))
    }
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        tasks = [(name, rows, *shapes[name], config) for (rows, name, _), config in tried.items()]
        list(pool.map(compile_w4a8, tasks, chunksize=2))
    took: dict[tuple[int, str, str], float] = {}
    for name, (n, k) in shapes.items():
        weights = [packed("w4a8", n, k) for _ in range(int(COLD_BYTES // (n * k / 2)) + 1)]
        norm = randn(k) if name in ("qkv", "gate_up") else None
        for rows in all_rows:
            plain, total = randn(rows, k), randn(rows, n)
            x = w4a8_linears.block_rows(plain, norm, 1e-6)
            quantising = partial(w4a8_linears.block_rows, plain, norm, 1e-6)
            one = microseconds([quantising] * 8)
            print(f"tile_{model} w4a8 {name} rows {rows} block_rows {one:.1f} us", flush=True)
            for (own, of, label), config in tried.items():
                if (own, of) == (rows, name):
                    calls = [partial(w4a8_product, name, x, weight, total, config) for weight in weights]
                    took[rows, name, label] = microseconds(calls)
        del weights
    for rows in all_rows:
        for label in dict.fromkeys(label for own, _, label in took if own == rows):
            found = [took.get((rows, name, label), float("nan")) for name in shapes]
            each = " ".join(f"{name} {one:6.1f}" for name, one in zip(shapes, found, strict=True))
            print(f"tile_{model} w4a8 rows {rows} {label:<20} {each}  sum {sum(found):6.1f} us", flush=True)
        best = {name: min((took[key], key[2]) for key in took if key[:2] == (rows, name)) for name in shapes}
        print(f"tile_{model} w4a8 rows {rows} best {sum(one for one, _ in best.values()):.1f} us: {best}", flush=True)


def w4a8_tiling(
    tiling: tuple[int, int, int, int, int], is_shared: bool, rows: int, n: int, k: int
) -> w4a8_linears.BlockConfig | None:
    """Return the tiling, jobs that are no whole turn of the chip shared by as many programs as fit if they are to be;
    None where it is not possible or the same as without."""
    padded, tiles, warps, stages, at_once = tiling
    jobs = -(-rows // padded) * -(-n // (TILE * tiles))
    rest = jobs % 132
    split_k = min(132 // max(1, rest), k // 512) if is_shared else 1
    if padded > rows or split_k < 1 + is_shared:
        return None
    return w4a8_linears.BlockConfig(
        padded, tiles, split_k, warps, stages, at_once, whole=jobs - rest if is_shared else jobs
    )


def w4a8_product(
    name: str,
    x: w4a8_linears.BlockRows,
    weight: IntWeight,
    total: Tensor,
    config: w4a8_linears.BlockConfig,
) -> None:
    if name == "gate_up":
        rows, n = total.shape
        out = torch.empty(rows, n // 2, dtype=total.dtype, device=total.device)
        w4a8_linears.product(x, weight, None, None, out, True, config)
    else:
        w4a8_linears.product(x, weight, None, total if name in ("o", "down") else None, total, False, config)


def compile_w4a8(task: tuple[str, int, int, int, w4a8_linears.BlockConfig]) -> None:
    """Compile a product into Triton's cache."""
    name, rows, n, k, config = task
    on = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    tiles, blocks = -(-n // TILE), -(-k // 128)
    weight = IntWeight(
        on(tiles, blocks, 2048, dtype=torch.int16), on(tiles, blocks, TILE), on(tiles, blocks, TILE), 128, (n, k)
    )
    for kernel in (w4a8_linears._block_rows_kernel, w4a8_linears._w4a8_kernel):
        # What an earlier task compiled would be launched, not recorded.
        kernel.device_caches.clear()
    with launch.recorded_launches((9, 0)) as launches, torch.inference_mode():
        w4a8_product(name, w4a8_linears.block_rows(on(rows, k)), weight, on(rows, n), config)
    for one in launches:
        one.compile()


def bench_lora(model: str, heads: HeadShape, hidden: int, width: int, num_slots: int = 16, rank: int = 16) -> None:
    """Two rows of each adapter."""
    rows, size = 2 * num_slots, heads.q_size + heads.kv_size
    shapes = {
        "qkv": ((heads.q_size, size - heads.kv_size // 2, size), hidden), "o": ((hidden,), heads.q_size),
        "gate_up": ((width, 2 * width), hidden), "down": ((hidden,), width),
    }  # fmt: skip
    starts = torch.tensor([0, *range(0, rows + 1, 2)], device="cuda")
    groups = AdapterGroups(torch.randperm(rows, device="cuda"), starts)
    for name, (ends, k) in shapes.items():

        def weight(ends=ends, k=k) -> SlotLowRank:
            return SlotLowRank(randn(num_slots, len(ends) * rank, k), randn(num_slots, ends[-1], rank), ends)

        def shrink(k=k, weight=weight) -> Callable[[], object]:
            x, slots = randn(rows, k), weight()
            return lambda: lora_linears.lora_shrink(x, slots, groups)

        def expand(ends=ends, k=k, weight=weight) -> Callable[[], object]:
            slots, y = weight(), randn(rows, ends[-1])
            ranks = lora_linears.lora_shrink(randn(rows, k), slots, groups)
            if len(ends) == 2:
                return lambda: lora_linears.lora_expand_gate(y, ranks, slots, groups)
            return lambda: lora_linears.lora_expand_add(ranks, slots, groups, y)

        report(f"{model} lora shrink {name} rows {rows}", shrink, 2.0 * num_slots * rank * len(ends) * k)
        report(f"{model} lora expand {name} rows {rows}", expand, 2.0 * num_slots * rank * ends[-1])


def main() -> None:
    began = time.monotonic()
    torch.manual_seed(0)
    for name, heads in (("mha", HeadShape(32, 32, 128)), ("gqa", HeadShape(32, 8, 128))):
        if not ONLY.startswith("tile"):
            bench_fp8_cache(name, heads)
    for model, (heads, hidden, width, vocabulary) in MODELS.items() if not ONLY.startswith("kv8") else ():
        if ONLY.startswith("tile"):
            bench_w4a8_tilings(model, heads, hidden, width)
            continue
        bench_attention(model, heads)
        bench_small(model, heads, hidden, width, vocabulary)
        bench_linear(model, heads, hidden, width, vocabulary)
        bench_eight_bits(model, heads, hidden, width, vocabulary)
        for kind in KINDS:
            bench_int4(model, kind, heads, hidden, width)
        bench_lora(model, heads, hidden, width)
    print(f"{time.monotonic() - began:.0f} s; launches overlap: {launch.launch_options()['PDL']}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
