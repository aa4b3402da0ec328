"""The pictures of figures: masks of how far a figure covers each pixel, drawn large with Pillow and made small."""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.shapes.data import SHAPES, SIZE, Mask

SUPERSAMPLING = 8
CENTRES = {1: [(16.0, 16.0)], 2: [(8.25, 16.0), (23.75, 16.0)], 3: [(16.0, 8.5), (8.25, 23.0), (23.75, 23.0)]}
"""Around which figures stand, by how many there are: a single one farther from it than one of several, which leave at
least a pixel between each other."""
RADII = {1: (8.5, 12.5), 2: (5.2, 6.4), 3: (5.0, 6.0)}


def draw(figure: str, count: int, seed: str) -> Mask:
    """[32, 32]: how far a figure, or several of it, cover each pixel, at places and of a size drawn by the seed."""
    drawing = random.Random(f"{seed} {figure} {count}")
    picture = Image.new("L", (SIZE * SUPERSAMPLING, SIZE * SUPERSAMPLING), 0)
    pen = ImageDraw.Draw(picture)
    if figure not in SHAPES:
        _draw_glyph(pen, figure, drawing)
    else:
        radius = drawing.uniform(*RADII[count])
        reach = min(15 - radius, 5.0) if count == 1 else 0.7
        for x, y in CENTRES[count]:
            _draw_shape(pen, figure, x + drawing.uniform(-reach, reach), y + drawing.uniform(-reach, reach), radius)
    return np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BOX))


def _draw_shape(pen: ImageDraw.ImageDraw, figure: str, x: float, y: float, radius: float) -> None:
    if figure in ("circle", "ring"):
        _disc(pen, x, y, radius, 255)
        if figure == "ring":
            _disc(pen, x, y, radius * 0.55, 0)
    else:
        points = [(SUPERSAMPLING * (x + dx * radius), SUPERSAMPLING * (y + dy * radius)) for dx, dy in outline(figure)]
        pen.polygon(points, fill=255)


def _disc(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, fill: int) -> None:
    corners = [SUPERSAMPLING * edge for edge in (x - radius, y - radius, x + radius, y + radius)]
    pen.ellipse(corners, fill=fill)


@cache
def outline(figure: str) -> list[tuple[float, float]]:
    """The corners of a shape around the origin, within a circle of about 1."""
    if figure == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if figure == "triangle":
        return [(0, -0.95), (1, 0.8), (-1, 0.8)]
    if figure == "diamond":
        return [(0, -1), (0.75, 0), (0, 1), (-0.75, 0)]
    if figure == "cross":
        a = 0.32
        quarter = [(a, -a), (a, -1), (-a, -1)]
        return [turned for k in range(4) for turned in [_quarter_turns(point, -k) for point in quarter]]
    if figure == "star":
        turns = [(1.0 if k % 2 == 0 else 0.42, math.pi * k / 5) for k in range(10)]
        return [(r * math.sin(angle), 0.05 - r * math.cos(angle)) for r, angle in turns]
    if figure == "heart":
        angles = [2 * math.pi * k / 60 for k in range(60)]
        return [
            (
                math.sin(a) ** 3,
                -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16 - 0.15,
            )
            for a in angles
        ]
    raise ValueError(f"{figure} has no corners")


def _quarter_turns(point: tuple[float, float], count: int) -> tuple[float, float]:
    x, y = point
    for _ in range(count % 4):
        x, y = -y, x
    return x, y


def _draw_glyph(pen: ImageDraw.ImageDraw, figure: str, drawing: random.Random) -> None:
    size = drawing.uniform(24, 30)
    x, y = (16 + drawing.uniform(-2, 2) for _ in range(2))
    pen.text(
        (x * SUPERSAMPLING, y * SUPERSAMPLING),
        figure,
        fill=255,
        font=_font(round(size * SUPERSAMPLING)),
        anchor="mm",
        stroke_width=round(0.6 * SUPERSAMPLING),
    )


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """The font that Pillow brings: the same on every machine."""
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
