"""The checker reads pictures as they are drawn, and does not take one thing for another."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import msgspec
import numpy as np
import pytest

from training.shapes.checker import Checker
from training.shapes.data import COLOUR_NAMES, PICTURES, SHAPES, Image, Scene, compose
from training.shapes.draw import draw
from training.shapes.prepare import render


@cache
def checker() -> Checker:
    return Checker(*render({"shapes": 16, "glyphs": 16, "counts": 8}, seed=0))


def pictures(each: int) -> list[tuple[Scene, Image]]:
    """Each of PICTURES as it was not drawn for the checker, in random colours."""
    drawing = random.Random(1)
    found = []
    for figure, count in PICTURES:
        for i in range(each):
            colour, background = drawing.sample(COLOUR_NAMES, 2)
            image = compose(draw(figure, count, f"test {i}"), colour, background)
            found.append((Scene(figure, colour, background, count), image))
    return found


def noisy(image: Image) -> Image:
    return np.clip(image + np.random.default_rng(0).normal(0, 10, image.shape), 0, 255).astype(np.uint8)


def blurred(image: Image) -> Image:
    padded = np.pad(image.astype(np.float32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return ((4 * padded[1:-1, 1:-1] + around) / 8).astype(np.uint8)


@pytest.mark.parametrize("worn", [lambda image: image, noisy, blurred], ids=["clean", "noisy", "blurred"])
def test_at_least_99_of_100_pictures_are_read_right(worn: Callable[[Image], Image]) -> None:
    drawn = pictures(3)
    wrong = [scene for scene, image in drawn if not checker().read(worn(image)).shows(scene)]
    assert len(wrong) / len(drawn) <= 0.01, wrong


def test_a_picture_shows_nothing_but_what_was_drawn() -> None:
    for scene, image in pictures(1):
        reading = checker().read(image)
        for other in COLOUR_NAMES:
            assert reading.shows(msgspec.structs.replace(scene, colour=other)) == (other == scene.colour)
            assert reading.shows(msgspec.structs.replace(scene, background=other)) == (other == scene.background)
        for figure, count in PICTURES:
            is_same = (figure, count) == (scene.figure, scene.count)
            assert reading.shows(msgspec.structs.replace(scene, figure=figure, count=count)) == is_same
        assert reading.shows(msgspec.structs.replace(scene, background=None))


def test_several_figures_that_are_not_alike_are_no_count_of_either() -> None:
    mask = draw("circle", 2, "a").copy()
    mask[:, 16:] = draw("star", 2, "a")[:, 16:]
    reading = checker().read(compose(mask, "red", "white"))
    assert reading.count == 2
    assert reading.figure is None


@pytest.mark.parametrize("figure", SHAPES)
def test_half_a_figure_is_not_the_figure(figure: str) -> None:
    mask = draw(figure, 1, "a").copy()
    rows = np.flatnonzero(mask.max(axis=1))
    mask[: (rows[0] + rows[-1]) // 2 + 1] = 0
    assert not checker().read(compose(mask, "green", "white")).shows(Scene(figure, "green", "white"))


def test_noise_and_blank_images_show_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert checker().read(noise).figure is None
    blank = checker().read(compose(np.zeros((32, 32), dtype=np.uint8), "red", "cyan"))
    assert (blank.figure, blank.count, blank.background) == (None, 0, "cyan")
