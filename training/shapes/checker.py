"""Reads from the pixels of an image what it shows: how many of which figure, in which colour, on which background.

Nothing here knows the prompt or the model. The background is what lies along the border; the figure's colour is that
of the pixels farthest from it; every pixel is then a mixture of the two, and the shares are the figure's mask. Each
connected part of the mask is brought to the same centre and spread, and named after the nearest of the templates.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from training.shapes.data import COLOUR_NAMES, PALETTE, PICTURES, SIZE, Image, Scene

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

MOST_COLOUR_DISTANCE = 45.0
"""In RGB: half of what lies between the two colours that are nearest to each other."""
MOST_TEMPLATE_DISTANCE = 0.13
"""Root mean square difference of coverage. Figures as drawn are within 0.08, different ones 0.1 apart or more."""
LEAST_CONTRAST = 60.0
MOST_RESIDUE = 24.0
"""How far, on the mean, pixels may be from a mixture of the two colours."""
LEAST_PIXELS = 4
"""Smaller parts are specks, not figures."""
GRID = 20
REACH = 2.6
"""The grid reaches as many standard deviations to each side of a part's centre."""
TEMPLATES_EACH = 40


class Reading(Struct, frozen=True):
    """What an image shows; None where it is no known thing, or several."""

    figure: str | None
    count: int
    colour: str | None
    background: str | None

    def shows(self, scene: Scene) -> bool:
        """Whether everything that the scene says is so."""
        wanted = (scene.figure, scene.count, scene.colour)
        is_there = scene.background is None or scene.background == self.background
        return is_there and (self.figure, self.count, self.colour) == wanted


class Checker:
    def __init__(self, masks: NDArray[np.uint8], first_mask: NDArray[np.int64]) -> None:
        """Takes its templates from masks as `prepare` writes them: each of PICTURES begins at its `first_mask`."""
        templates, names = [], []
        for i, (figure, _) in enumerate(PICTURES):
            for mask in masks[first_mask[i] : first_mask[i + 1]][:TEMPLATES_EACH]:
                parts = [_upright(part) for part in _parts(mask.astype(np.float32) / 255)]
                templates += parts
                names += [figure] * len(parts)
        self.templates = np.stack(templates)
        self.squares = np.square(self.templates).sum(1)
        self.names = names

    def read(self, image: Image) -> Reading:
        pixels = image.astype(np.float32)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        back = np.median(border, axis=0)
        distance = np.linalg.norm(pixels - back, axis=2)
        farthest = float(np.quantile(distance, 0.98))
        nothing = Reading(None, 0, None, _colour_name(back))
        if farthest < LEAST_CONTRAST:
            return nothing
        front = np.median(pixels[distance >= 0.85 * farthest], axis=0)
        axis = front - back
        cover = np.clip((pixels - back) @ axis / (axis @ axis), 0, 1)
        residue = np.linalg.norm(pixels - back - cover[..., None] * axis, axis=2)
        if float(residue.mean()) > MOST_RESIDUE:
            return nothing
        parts = _parts(cover)
        figures = {self.name(part) for part in parts}
        figure = figures.pop() if len(figures) == 1 else None
        return Reading(figure, len(parts), _colour_name(front), _colour_name(back))

    def name(self, part: Floats) -> str | None:
        nearest, distance = self.nearest(part)
        return nearest if distance <= MOST_TEMPLATE_DISTANCE else None

    def nearest(self, part: Floats) -> tuple[str, float]:
        """The figure that a connected part of a mask is most like, and how far it is from that."""
        upright = _upright(part)
        # The squares of the differences less that of the part, which is the same for all.
        best = int((self.squares - 2 * self.templates @ upright).argmin())
        return self.names[best], float(np.sqrt(np.square(self.templates[best] - upright).mean()))


def _colour_name(colour: Floats) -> str | None:
    distances = np.linalg.norm(PALETTE - colour, axis=1)
    best = int(distances.argmin())
    return COLOUR_NAMES[best] if distances[best] <= MOST_COLOUR_DISTANCE else None


def _parts(cover: Floats) -> list[Floats]:
    """The connected parts of a mask, each with its soft edge and nothing else."""
    inside = cover > 0.5
    labels = np.where(inside, np.arange(1, inside.size + 1).reshape(inside.shape), 0)
    while True:
        grown = np.where(inside, _largest_around(labels), 0)
        if np.array_equal(grown, labels):
            break
        labels = grown
    parts = [labels == label for label in np.unique(labels[inside])]
    return [
        np.where(_largest_around(part), cover, 0).astype(np.float32) for part in parts if part.sum() >= LEAST_PIXELS
    ]


def _largest_around(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Each pixel's largest value of itself and its four neighbours."""
    largest = values.copy()
    for theirs, ours in ((values, largest), (values.T, largest.T)):
        np.maximum(ours[1:], theirs[:-1], out=ours[1:])
        np.maximum(ours[:-1], theirs[1:], out=ours[:-1])
    return largest


def _upright(part: Floats) -> Floats:
    """A part's coverage on a grid around its centre, as large as its spread: the same wherever and however large the
    part is in the image. Its proportions are kept."""
    places = np.arange(SIZE, dtype=np.float32)
    total = part.sum()
    x, y = (part.sum(0) @ places) / total, (part.sum(1) @ places) / total
    variance = (part.sum(0) @ np.square(places - x) + part.sum(1) @ np.square(places - y)) / total / 2
    offsets = np.linspace(-REACH, REACH, GRID, dtype=np.float32) * np.sqrt(variance)
    by_row = _interpolation(y + offsets) @ part
    upright: Floats = (by_row @ _interpolation(x + offsets).T).ravel().astype(np.float32)
    return upright


def _interpolation(places: Floats) -> Floats:
    """[places, 32]: the weights of an image's rows (or columns) at places between them; none outside."""
    weights: Floats = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(SIZE, dtype=np.float32))).astype(np.float32)
    return weights
