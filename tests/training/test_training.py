"""Training and judging, from prepared data to a score and its pictures, as small as they can be."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.small import WIDTH, prepared
from training.shapes import train as training
from training.shapes.checker import Checker
from training.shapes.curves import plot
from training.shapes.data import COLOUR_NAMES, PALETTE, Scene, compose
from training.shapes.draw import draw
from training.shapes.evaluate import Settings, draw_held_out, generate, judge
from training.shapes.sheet import sheet
from training.shapes.train import Examples, TrainOptions, train
from weft.model.diffusion.dit import Dit, DitConfig, load, save

CONFIG = DitConfig(width=64, depth=2, num_heads=2, text_width=WIDTH, max_text_tokens=16)
CPU = torch.device("cpu")


def examples(rows: list[int]) -> Examples:
    return Examples(prepared(), CPU, np.array(rows))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dit, list[dict[str, str]]]:
    path = tmp_path_factory.mktemp("trained") / "curves.csv"
    options = TrainOptions(steps=40, batch_size=8, learning_rate=4e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LOG_EVERY", 10)
        patch.setattr(training, "WARM_UP_STEPS", 10)
        model = train(CONFIG, options, examples([0, 1]), examples([0, 1]), path)
    with path.open(newline="") as file:
        return model, list(csv.DictReader(file))


def test_examples_show_what_their_prompts_say() -> None:
    torch.manual_seed(0)
    batch = examples([0, 1]).batch(40)
    assert batch.images.shape == (40, 3, 32, 32)
    corners = ((batch.images[:, :, 0, 0] + 1) * 127.5).numpy()
    backgrounds = [COLOUR_NAMES[int(np.abs(PALETTE - corner).sum(1).argmin())] for corner in corners]
    has_named_one = (batch.lengths == int(prepared().text.lengths[0])).tolist()
    named = {name for name, is_named in zip(backgrounds, has_named_one, strict=True) if is_named}
    free = {name for name, is_named in zip(backgrounds, has_named_one, strict=True) if not is_named}
    assert named == {"white"}
    assert len(free) > 3
    assert "blue" not in free


def test_a_few_steps_reduce_the_loss(trained: tuple[Dit, list[dict[str, str]]]) -> None:
    _, curves = trained
    assert [int(row["step"]) for row in curves] == [10, 20, 30, 40]
    assert float(curves[-1]["loss"]) < 0.8 * float(curves[0]["loss"])
    assert float(curves[-1]["held_out_loss"]) < 0.8 * float(curves[0]["held_out_loss"])
    assert float(curves[-1]["learning_rate"]) < float(curves[1]["learning_rate"])


def test_training_is_the_same_for_a_seed(tmp_path: Path) -> None:
    def weights(seed: int) -> torch.Tensor:
        options = TrainOptions(steps=10, batch_size=2, seed=seed)
        return train(CONFIG, options, examples([0, 1]), examples([0]), tmp_path / "curves.csv").patches_out.weight

    first = weights(1)
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)


def test_a_trained_model_draws_the_same_after_a_round_trip(
    trained: tuple[Dit, list[dict[str, str]]], tmp_path: Path
) -> None:
    model, _ = trained
    save(model, tmp_path, torch.float32)
    settings = Settings(num_steps=3, guidance_scale=2.0)
    images = draw_held_out(model, prepared(), range(2), settings, seed=5)
    assert images.shape == (2, 32, 32, 3)
    assert np.array_equal(draw_held_out(load(tmp_path), prepared(), range(2), settings, seed=5), images)
    assert np.array_equal(draw_held_out(model, prepared(), range(1, 2), settings, seed=5), images[1:])


def test_guidance_of_one_is_the_prompt_alone(trained: tuple[Dit, list[dict[str, str]]]) -> None:
    model, _ = trained
    text = torch.randn(1, 4, WIDTH)
    images = [
        generate(model, text, torch.tensor([4]), [3], Settings(num_steps=2, guidance_scale=scale))
        for scale in (1.0, 1.0 + 1e-7, 4.0)
    ]
    assert np.abs(images[0].astype(int) - images[1]).max() <= 1
    assert not np.array_equal(images[0], images[2])


def test_a_score_counts_what_the_pixels_show() -> None:
    asked = prepared().held_out[:6]
    images = np.stack([_truth(prompt.scene) for prompt in asked])
    images[4] = _truth(Scene("heart", "black", "white"))
    checker = Checker(prepared().masks, prepared().first_mask)
    scores = judge(checker, asked, images, Settings(num_steps=1, guidance_scale=1))
    assert (scores.right, scores.asked) == (5, 6)
    assert scores.by_category == {"shapes": "2 of 2", "glyphs": "1 of 2", "counts": "2 of 2"}
    assert [text for text, _ in scores.wrong] == [asked[4].text]


def _truth(scene: Scene) -> np.ndarray:
    background = scene.background or ("white" if scene.colour != "white" else "black")
    return compose(draw(scene.figure, scene.count, "truth"), scene.colour, background)


def test_pictures_of_a_run_show_its_images_and_curves(trained: tuple[Dit, list[dict[str, str]]]) -> None:
    images = np.stack([_truth(Scene("circle", "red", "white"))] * 3)
    page = sheet(images, ["one", "two", "three"], {"two"}, columns=2)
    colours = {colour for _, colour in page.getcolors(1 << 20) or []}
    assert (255, 0, 0) in colours  # the frame of the one that is wrong
    assert (220, 30, 40) in colours
    assert sheet(images, ["one", "two", "three"], set(), columns=3).size == (page.width * 3 // 2, page.height // 2)
    drawn = {colour for _, colour in plot(trained[1]).getcolors(1 << 20) or []}
    assert {(0x1F, 0x4F, 0xA8), (0xD0, 0x5A, 0x1F)} <= drawn
