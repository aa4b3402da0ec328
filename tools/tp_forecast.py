"""Prints a forecast of decode speed on 2, 4 and 8 H200: python tools/tp_forecast.py. Nothing of it was measured but the
column of one GPU, which is read from docs/benchmarks.md.

A step of N ranks takes what cannot be divided, an N-th of the rest, and the time of its collective operations:

- what cannot be divided is what the step of one sequence takes beyond reading its weights at the memory's full speed;
- an all-reduce of B bytes takes a latency and 2 (N - 1) / N B / bandwidth, as a ring moves them; there are two in a
  layer and one of the embeddings. The logits are gathered once.
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
LAUNCH_S = 7e-3
"""The least time in which the kernels of a step are launched one by one (ADR 006): ranks have no CUDA graphs."""
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


def forecast(shape: Shape, batch: int, size: int, *, with_graphs: bool) -> float:
    """Return the tokens a second of so many GPUs."""
    speeds = measured(shape)
    undivided = 1 / speeds[1] - shape.num_weights * ITEM_BYTES / MEMORY_BYTES_PER_S
    own = undivided + (batch / speeds[batch] - undivided) / size
    moved = 2 * (size - 1) / size * batch * shape.hidden_size * ITEM_BYTES / LINK_BYTES_PER_S
    reduced = (2 * shape.num_layers + 1) * (LATENCY_S[size] + moved)
    gathered = LATENCY_S[size] + (size - 1) / size * batch * shape.vocab_size * ITEM_BYTES / LINK_BYTES_PER_S
    seconds = own + reduced + gathered
    return batch / (seconds if with_graphs else max(seconds, LAUNCH_S))


def table(shape: Shape) -> str:
    rows = [
        f"| {shape.name} shape, bfloat16, tok/s | one H200, measured | 2, forecast | 4, forecast | 8, forecast "
        "| 2 without graphs, as it is now, forecast |",
        "|---|---|---|---|---|---|",
    ]
    for batch, speed in measured(shape).items():
        sizes = [f"{forecast(shape, batch, size, with_graphs=True):,.0f}" for size in LATENCY_S]
        now = f"{forecast(shape, batch, 2, with_graphs=False):,.0f}"
        rows.append(f"| decode, batch {batch} | {speed:,.0f} | {' | '.join(sizes)} | {now} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(table(shape) for shape in SHAPES) + "\n")
