"""The generator: the same for a seed, and what is held out is never shown in training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.training.small import prepared
from training.shapes.data import (
    COLOURS,
    PICTURES,
    SHAPES,
    Prompt,
    Scene,
    compose,
    held_out_prompts,
    phrasings,
    prompts,
    scenes,
)
from training.shapes.draw import draw
from training.shapes.prepare import PHRASINGS_EACH, read, write


def test_pictures_are_the_same_for_a_seed_and_others_for_another() -> None:
    for figure, count in PICTURES:
        assert np.array_equal(draw(figure, count, "a"), draw(figure, count, "a"))
        assert not np.array_equal(draw(figure, count, "a"), draw(figure, count, "b"))


def test_a_picture_lies_within_the_image() -> None:
    for figure, count in PICTURES:
        for seed in range(5):
            mask = draw(figure, count, f"{seed}")
            border = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
            assert border.max() == 0, (figure, count, seed)


def test_colours_are_those_asked_for() -> None:
    mask = np.zeros((32, 32), dtype=np.uint8)
    mask[4:8], mask[10] = 255, 127
    image = compose(mask, "red", "blue")
    assert image[5, 5].tolist() == list(COLOURS["red"])
    assert image[20, 5].tolist() == list(COLOURS["blue"])
    assert np.abs(image[10, 5] - np.mean([COLOURS["red"], COLOURS["blue"]], axis=0)).max() <= 1


def test_training_never_shows_what_is_held_out() -> None:
    held_out, shown = scenes(held_out=True), scenes(held_out=False)
    drawn = {Scene(s.figure, s.colour, background, s.count) for s in shown for background in s.backgrounds()}
    assert not drawn & set(held_out)
    without_background = {(s.figure, s.colour, s.count) for s in held_out if s.background is None}
    assert not {(s.figure, s.colour, s.count) for s in drawn} & without_background
    assert 0.1 < len(held_out) / (len(held_out) + len(shown)) < 0.2


def test_training_never_reads_a_prompt_that_is_judged() -> None:
    shown = {prompt.text for prompt in prompts(held_out=False, phrasings_each=PHRASINGS_EACH)}
    assert not shown & {prompt.text for prompt in held_out_prompts(600)}


def test_every_figure_and_colour_of_a_held_out_scene_is_in_training() -> None:
    parts = {(s.figure, s.count) for s in scenes(held_out=False)}, {s.colour for s in scenes(held_out=False)}
    for scene in scenes(held_out=True):
        assert (scene.figure, scene.count) in parts[0]
        assert scene.colour in parts[1]


def test_judged_prompts_are_always_the_same_and_of_every_category() -> None:
    judged = held_out_prompts(200)
    assert judged == held_out_prompts(600)[:200]
    assert len({prompt.text for prompt in judged}) == 200
    assert Counter(prompt.scene.category for prompt in judged) == {"shapes": 67, "glyphs": 67, "counts": 66}
    assert all(prompt.scene.is_held_out for prompt in judged)


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        (Scene("circle", "orange", "blue"), "an orange circle on a blue background"),
        (Scene("star", "red"), "A red star."),
        (Scene("cross", "yellow", "orange", 2), "two yellow crosses on an orange background"),
        (Scene("heart", "pink", None, 3), "Three pink hearts."),
        (Scene("7", "green"), "the number 7 in green"),
        (Scene("A", "black", "white"), "the letter A in black on white"),
    ],
)
def test_prompts_are_english(scene: Scene, text: str) -> None:
    assert text in phrasings(scene)


def test_what_is_prepared_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = prepared()
    write(tmp_path, made)
    again = read(tmp_path)
    assert again.prompts == made.prompts
    assert again.held_out == made.prompts[2:]
    assert np.array_equal(again.masks, made.masks)
    assert np.array_equal(again.first_mask, made.first_mask)
    assert np.array_equal(again.text.states, made.text.states)
    assert np.array_equal(again.text.places, made.text.places)
    assert np.array_equal(again.text.lengths, made.text.lengths)


def test_prompts_of_training_name_every_scene() -> None:
    asked = prompts(held_out=False, phrasings_each=PHRASINGS_EACH)
    assert {prompt.scene for prompt in asked} == set(scenes(held_out=False))
    assert Prompt("a red circle", Scene("circle", "red")) in asked
    assert {prompt.scene.figure for prompt in asked if prompt.scene.count == 3} == set(SHAPES)
