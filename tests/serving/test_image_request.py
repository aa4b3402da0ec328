"""What a client says of its images becomes requests to the engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.scripted_engine import PAINTER, ScriptedEngine
from weft.backends.contract import Abilities
from weft.errors import InvalidRequest
from weft.serving.image_request import ImageOptions, image_requests, sides
from weft.types import GenerateImage, ImageParams

ENGINE = ScriptedEngine(images=PAINTER)


def images(**options: Any) -> list[ImageParams]:
    requests = image_requests(ImageOptions(**{"prompt": "a", **options}), ENGINE)
    return [request.task.params for request in requests if isinstance(request.task, GenerateImage)]


def test_defaults_are_the_models() -> None:
    [params] = images(seed=5)
    assert params == ImageParams(width=4, height=2, steps=6, guidance_scale=3.0, seed=5)
    assert images()[0].seed != images()[0].seed


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 10))
def test_every_image_has_a_seed_of_its_own_and_the_first_the_given_one(seed: int, n: int) -> None:
    seeds = [image.seed for image in images(seed=seed, n=n)]
    assert seeds[0] == seed
    assert len(set(seeds)) == n
    assert all(-(2**63) <= each < 2**63 for each in seeds)
    assert [(each - seed) % 2**64 for each in seeds] == list(range(n))


@given(st.integers(1, 1000), st.integers(0, 3))
def test_previews_are_never_more_than_asked_for_and_all_of_them_where_there_is_room(steps: int, previews: int) -> None:
    [params] = images(steps=steps, previews=previews)
    shown = [step for step in range(1, steps) if params.preview_every and step % params.preview_every == 0]
    assert len(shown) <= previews
    if steps >= (previews + 1) ** 2:
        assert len(shown) == previews


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"prompt": ""}, "prompt", "1 to 4000"),
        ({"prompt": "x" * 4001}, "prompt", "1 to 4000"),
        ({"prompt": "x" * 41}, "prompt", "at most 40"),
        ({"negative_prompt": "x" * 41}, "negative_prompt", "at most 40"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "negative_prompt", "guidance_scale 1"),
        ({"width": 2, "height": 2}, "size", "painter draws 4x2"),
        ({"width": 0}, "size", "painter draws 4x2"),
        ({"steps": 0}, "num_inference_steps", "at least 1"),
        ({"steps": 1001}, "num_inference_steps", "at most 1000"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "at least 0"),
        ({"guidance_scale": 50.5}, "guidance_scale", "at most 50"),
        ({"seed": 2**63}, "seed", "seed"),
        ({"n": 0}, "n", "1 to 10"),
        ({"n": 11}, "n", "1 to 10"),
        ({"previews": 21}, "partial_images", "0 to 20"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_what_can(options: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        images(**options)
    assert refused.value.param == param


def test_a_model_that_does_not_draw_says_so() -> None:
    engine = ScriptedEngine()
    with pytest.raises(InvalidRequest, match="no model that draws images") as refused:
        image_requests(ImageOptions(prompt="a"), engine)
    assert "--image-model" in refused.value.hint
    engine.abilities = Abilities(images=False)
    with pytest.raises(InvalidRequest, match="no model that draws images") as refused:
        image_requests(ImageOptions(prompt="a"), engine)
    assert "--image-model" not in refused.value.hint and "--engine" in refused.value.hint


@pytest.mark.parametrize(("size", "expected"), [("auto", (None, None)), ("4x2", (4, 2)), ("1024x768", (1024, 768))])
def test_sizes(size: str, expected: tuple[int | None, int | None]) -> None:
    assert sides(size) == expected


@pytest.mark.parametrize(
    "size", ["", "4", "4x", "x4", "0x4", "4X2", "-4x2", "4x2 ", "04x2", "٤x٢", "999999x1", "4x2x3"]
)
def test_what_is_no_size(size: str) -> None:
    with pytest.raises(InvalidRequest, match="32x32"):
        sides(size)
