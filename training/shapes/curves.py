"""A picture of a training run: its loss, of training and held out, over the steps, on a logarithmic scale.

python -m training.shapes.curves OUT/curves.csv curves.png
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, MARGIN = 900, 500, 60
COLOURS = {"loss": "#1f4fa8", "held_out_loss": "#d05a1f"}


def plot(rows: Sequence[dict[str, str]]) -> Image.Image:
    """Of the rows of a curves.csv, by the names of its columns."""
    page = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(14)
    steps = [int(row["step"]) for row in rows]
    values = [math.log10(float(row[name])) for name in COLOURS for row in rows]
    low, high = min(values), max(values)

    def x_of(step: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * step / steps[-1]

    def y_of(value: float) -> float:
        return MARGIN + (HEIGHT - 2 * MARGIN) * (high - value) / (high - low or 1.0)

    for value in (digit * 10.0**power for power in range(-4, 2) for digit in (1, 2, 5)):
        if low <= math.log10(value) <= high:
            y = y_of(math.log10(value))
            pen.line([(MARGIN, y), (WIDTH - MARGIN, y)], fill="#dddddd")
            pen.text((MARGIN - 6, y), f"{value:g}", fill="black", font=font, anchor="rm")
    for step in range(0, steps[-1] + 1, _round(steps[-1] // 6)):
        pen.text((x_of(step), HEIGHT - MARGIN + 8), f"{step:,}", fill="black", font=font, anchor="mt")
    for place, (name, colour) in enumerate(COLOURS.items()):
        points = [(x_of(step), y_of(math.log10(float(row[name])))) for step, row in zip(steps, rows, strict=True)]
        pen.line(points, fill=colour, width=2)
        pen.text((WIDTH - MARGIN, 20 + 18 * place), name.replace("_", " "), fill=colour, font=font, anchor="rm")
    pen.text((WIDTH / 2, HEIGHT - 20), "steps", fill="black", font=font, anchor="mm")
    return page


def _round(number: int) -> int:
    """Its first digit and zeros; at least 1."""
    unit = 10 ** (len(str(number)) - 1)
    return max(1, number // unit * unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with given.curves.open(newline="") as file:
        plot(list(csv.DictReader(file))).save(given.out)


if __name__ == "__main__":
    main()
