"""Prints a forecast of decode speed on 2, 4 and 8 H200: python tools/tp_forecast.py. Nothing of it was measured but the
column of one GPU, which is read from docs/benchmarks.md, and what a one-shot all-reduce takes on one GPU.

A step of N ranks takes what cannot be divided, an N-th of the rest, and the time of its collective operations:

- what cannot be divided is what the step of one sequence takes beyond reading its weights at the memory's full speed;
- there are two all-reduces in a layer and one of the embeddings. One of B bytes takes what it takes on one GPU, the
  latency of the link and (N - 1) B / bandwidth in one shot, up to so many bytes; by NCCL, a latency and
  2 (N - 1) / N B / bandwidth, as a ring moves them;
- NCCL gathers the logits once, and broadcasts the tokens once.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
MEMORY_BYTES_PER_S = 4.8e12
LINK_BYTES_PER_S = 450e9
"""NVLink of an H200: 900 GB/s, half of it in each direction."""
LATENCY_S = {2: 12e-6, 4: 15e-6, 8: 20e-6}
"""An all-reduce of a few bytes by NCCL: assumed."""
ONE_SHOT_S, ONE_SHOT_BYTES = {2: 2.15e-6, 4: 4.5e-6, 8: 9.07e-6}, 512 * 1024
"""A one-shot all-reduce of 8 KiB in a graph, whose ranks are all on one H200, and the most bytes that it takes. Those
of 2 and 8 were measured: python -m tests.gpu.bench_all_reduce streams 8; the one of 4 is between them."""
LINK_LATENCY_S = 2e-6
"""A write to the memory of another GPU, and the flag behind it: assumed."""
ITEM_BYTES = 2


@dataclass(frozen=True)
class Shape:
    name: str
    num_weights: float
    hidden_size: int
    num_layers: int
    vocab_size: int


SHAPES = (Shape("deepseek-llm-7b", 6.9e9, 4096, 30, 102400), Shape("qwen3-14b", 14.8e9, 5120, 40, 151936))


def measured(shape: Shape) -> dict[int, float]:
    """Return the tokens a second of one GPU by the batch, from the table of a shape."""
    table = PAGE.read_text().split(f"| {shape.name} shape | Weft |", 1)[1].split("\n\n", 1)[0]
    found = re.findall(r"^\| decode, batch (\d+), tok/s \| \*\*([\d,.]+)\*\*", table, re.MULTILINE)
    return {int(batch): float(speed.replace(",", "")) for batch, speed in found}


def all_reduce_s(num_bytes: int, size: int, *, one_shot: bool) -> float:
    if one_shot and num_bytes <= ONE_SHOT_BYTES:
        return ONE_SHOT_S[size] + LINK_LATENCY_S + (size - 1) * num_bytes / LINK_BYTES_PER_S
    return LATENCY_S[size] + 2 * (size - 1) / size * num_bytes / LINK_BYTES_PER_S


def forecast(shape: Shape, batch: int, size: int, *, one_shot: bool = True) -> float:
    """Return the tokens a second of so many GPUs."""
    speeds = measured(shape)
    undivided = 1 / speeds[1] - shape.num_weights * ITEM_BYTES / MEMORY_BYTES_PER_S
    own = undivided + (batch / speeds[batch] - undivided) / size
    reduced = all_reduce_s(batch * shape.hidden_size * ITEM_BYTES, size, one_shot=one_shot)
    gathered = LATENCY_S[size] + (size - 1) / size * batch * shape.vocab_size * ITEM_BYTES / LINK_BYTES_PER_S
    return batch / (own + (2 * shape.num_layers + 1) * reduced + gathered + LATENCY_S[size])


def table(shape: Shape) -> str:
    rows = [
        f"| {shape.name} shape, bfloat16, tok/s | one H200, measured | 2, forecast | 4, forecast | 8, forecast "
        "| 2 by NCCL alone, forecast |",
        "|---|---|---|---|---|---|",
    ]
    for batch, speed in measured(shape).items():
        sizes = [f"{forecast(shape, batch, size):,.0f}" for size in LATENCY_S]
        by_nccl = f"{forecast(shape, batch, 2, one_shot=False):,.0f}"
        rows.append(f"| decode, batch {batch} | {speed:,.0f} | {' | '.join(sizes)} | {by_nccl} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(table(shape) for shape in SHAPES) + "\n")
