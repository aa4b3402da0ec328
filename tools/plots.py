"""Draws the plots of docs/benchmarks.md from the tables of that page: python tools/plots.py [FOLDER].

A plot is an SVG file without scripts, fonts or numbers of its own. tests/test_docs.py fails when a table was changed
and the plot was not drawn again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
FOLDER = ROOT / "docs/images/plots"


@dataclass(frozen=True)
class Plot:
    """Bars of some columns for some rows of the table that begins with a certain head."""

    file: str
    title: str
    head: str
    """How the table's first line begins."""
    rows: tuple[str, ...]
    """How the first cells of the rows begin."""
    columns: tuple[tuple[int, str], ...]
    """Cells of a row, counted from 0, and what their bars are called."""
    unit: str


PLOTS = (
    Plot(
        "cpu_llama_cpp.svg",
        "SmolLM2-135M on two x86-64 cores, tokens a second",
        "| | Weft, Q4_1 as in the file |",
        ("decode, batch 1", "decode, batch 8", "decode, batch 32", "prompt of 512"),
        ((1, "Weft, Q4_1"), (4, "llama.cpp, Q4_0"), (3, "llama.cpp, Q4_1")),
        "tok/s",
    ),
    Plot(
        "gpu_decode.svg",
        "Decode of the deepseek-llm-7b shape on one H200, FP8, full steps",
        "| deepseek-llm-7b shape, full steps |",
        ("decode, batch 1,", "decode, batch 8,", "decode, batch 32,", "decode, batch 128,", "decode, batch 256,"),
        ((1, "Weft"), (2, "vLLM 0.26.0")),
        "tok/s",
    ),
    Plot(
        "gpu_http.svg",
        "Through HTTP on one H200, the same shape: output of all connections",
        "| connections, in → out |",
        ("1, 128", "32, 128", "128, 128", "256, 128", "128, 512"),
        ((1, "Weft"), (5, "vLLM 0.26.0")),
        "tok/s",
    ),
    Plot(
        "cpu_images.svg",
        "Longest waits between tokens while images are made (p95, 50 steps, two Neoverse-N1 cores)",
        "| mode | 50 steps: total s | between tokens p50 / p95, ms |",
        ("text only", "**together**", "blocking |"),
        ((2, "p95 between tokens"),),
        "ms",
    ),
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(cell: str) -> float:
    """Return the first number of a cell; of two with a stroke between, as in p50 / p95, the second."""
    found = re.findall(r"[\d,]*\d(?:\.\d+)?", cell.replace("**", ""))
    value = found[1] if re.search(r"\d \*{0,2}/", cell) else found[0]
    return float(value.replace(",", ""))


def data(plot: Plot, page: str) -> list[tuple[str, list[float]]]:
    """Return the label of every row, and the numbers of its bars."""
    lines = page[page.index(plot.head) :].split("\n\n", 1)[0].splitlines()
    found = []
    for begins in plot.rows:
        (line,) = (line for line in lines if line.startswith(f"| {begins}"))
        row = cells(line)
        label = re.sub(r"\*\*|, tok/s$", "", row[0])
        found.append((label, [number(row[column]) for column, _ in plot.columns]))
    return found


COLOURS = ("#2f6fde", "#d9822b", "#8a94a6")
WIDTH, LEFT, RIGHT, BAR, GAP = 720, 150, 90, 16, 14
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.title { font-weight: 600; font-size: 14px; }
.axis { stroke: #8a94a6; }
@media (prefers-color-scheme: dark) { text { fill: #e6e6e6; } }
</style>"""


def draw(plot: Plot, rows: Sequence[tuple[str, list[float]]]) -> str:
    top = 52
    scale = (WIDTH - LEFT - RIGHT) / max(value for _, values in rows for value in values)
    parts, y = [], top
    for label, values in rows:
        middle = y + len(values) * BAR / 2 + 5
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for value, colour in zip(values, COLOURS, strict=False):
            width = value * scale
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + BAR - 4}">{value:,g}</text>')
            y += BAR
        y += GAP
    legend, x = [], LEFT
    for (_, name), colour in zip(plot.columns, COLOURS, strict=False):
        legend.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>')
        legend.append(f'<text x="{x + 17}" y="43">{escape(name)}, {plot.unit}</text>')
        x += 40 + 8 * (len(name) + len(plot.unit) + 2)
    axis = f'<line class="axis" x1="{LEFT}" y1="{top - 4}" x2="{LEFT}" y2="{y - GAP + 4}"/>'
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img" '
        f'aria-label="{escape(plot.title)}">'
    )
    title = f'<text class="title" x="8" y="20">{escape(plot.title)}</text>'
    return "\n".join([opening, STYLE, title, *legend, axis, *parts, "</svg>"]) + "\n"


def drawn() -> dict[str, str]:
    """Return the text of every plot by the name of its file."""
    page = PAGE.read_text()
    return {plot.file: draw(plot, data(plot, page)) for plot in PLOTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where the plots are written")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in drawn().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
