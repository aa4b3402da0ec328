"""A contact sheet of images that `evaluate` kept, each over its prompt; a red frame marks those that miss it.

python -m training.shapes.sheet OUT sheet.png
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image as Picture
from PIL import ImageDraw, ImageFont

from training.shapes.data import SIZE, Image
from training.shapes.evaluate import Scores

ZOOM = 3
MARGIN = 6
LINES = 3
LINE_HEIGHT = 11
LETTERS_A_LINE = 17


def sheet(images: Image, texts: list[str], wrong: set[str], columns: int = 20) -> Picture.Image:
    """[images, 32, 32, 3], row after row."""
    side, cell_width = SIZE * ZOOM, SIZE * ZOOM + 2 * MARGIN
    cell_height = cell_width + LINES * LINE_HEIGHT
    rows = -(-len(images) // columns)
    page = Picture.new("RGB", (columns * cell_width, rows * cell_height), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(LINE_HEIGHT - 1)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        x, y = i % columns * cell_width + MARGIN, i // columns * cell_height + MARGIN
        if text in wrong:
            pen.rectangle((x - 3, y - 3, x + side + 2, y + side + 2), fill="red")
        page.paste(Picture.fromarray(image).resize((side, side), Picture.Resampling.NEAREST), (x, y))
        lines = textwrap.wrap(text, LETTERS_A_LINE)[:LINES]
        pen.multiline_text((x, y + side + 3), "\n".join(lines), fill="black", font=font, spacing=1)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where images.npz and scores.json are")
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=20)
    given = parser.parse_args()
    scores = msgspec.json.decode((given.folder / "scores.json").read_bytes(), type=Scores)
    wrong = {text for text, _ in scores.wrong}
    with np.load(given.folder / "images.npz") as kept:
        sheet(kept["images"], kept["texts"].tolist(), wrong, given.columns).save(given.out)


if __name__ == "__main__":
    main()
