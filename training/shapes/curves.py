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

    for part in range(5):
        value, step = low + (high - low) * part / 4, steps[-1] * part // 4
        pen.line([(MARGIN, y_of(value)), (WIDTH - MARGIN, y_of(value))], fill="#dddddd")
        pen.text((MARGIN - 6, y_of(value)), f"{10**value:.3g}", fill="black", font=font, anchor="rm")
        pen.text((x_of(step), HEIGHT - MARGIN + 8), f"{step:,}", fill="black", font=font, anchor="mt")
    for place, (name, colour) in enumerate(COLOURS.items()):
        points = [(x_of(step), y_of(math.log10(float(row[name])))) for step, row in zip(steps, rows, strict=True)]
        pen.line(points, fill=colour, width=2)
        pen.text((WIDTH - MARGIN, 20 + 18 * place), name.replace("_", " "), fill=colour, font=font, anchor="rm")
    pen.text((WIDTH / 2, HEIGHT - 20), "steps", fill="black", font=font, anchor="mm")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with given.curves.open(newline="") as file:
        plot(list(csv.DictReader(file))).save(given.out)


if __name__ == "__main__":
    main()
