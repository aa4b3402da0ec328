"""Tensors with a request for images, as JSON brings them: refused unless allowed, checked to the end, and then what is
drawn from."""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.api.http import error_of, request
from tests.api.scripted_engine import PAINTER, ScriptedEngine
from weft.config import load
from weft.errors import Overloaded
from weft.types import ImageModelInfo


def encoded(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


GOOD = {"data": encoded(1, 2, 3, 4), "shape": [2, 2], "dtype": "float32"}
NEGATIVE = {"entries": {"negative_prompt_embeds": {"tensor": GOOD}}}


def ask(engine: ScriptedEngine, allowed: bool = True, **fields: Any) -> httpx.Response:
    config = load({"allow_prompt_embeds": allowed}, env={})
    return request(engine, "POST", "/v1/images/generations", config, json=fields)


def refusal(allowed: bool = True, painter: ImageModelInfo = PAINTER, **fields: Any) -> dict[str, Any]:
    engine = ScriptedEngine(images=painter)
    response = ask(engine, allowed, **fields)
    assert response.status_code == 400, response.text
    assert not engine.drawn
    return error_of(response)


def test_they_are_refused_unless_the_operator_allows_them() -> None:
    assert load(env={}).limits.allow_prompt_embeds is False
    for fields in ({"prompt_embeds": GOOD}, {"prompt": "a", "additional_information": NEGATIVE}):
        error = refusal(allowed=False, **fields)
        assert error["param"] == [*fields][-1]
        assert "--allow-prompt-embeds" in error["message"]


def test_every_image_is_drawn_from_them() -> None:
    engine = ScriptedEngine(images=PAINTER)
    sound = GOOD | {"sha256": hashlib.sha256(base64.b64decode(GOOD["data"])).hexdigest()}
    response = ask(engine, prompt_embeds=sound, additional_information=NEGATIVE, n=2)
    assert response.status_code == 200, response.text
    for drawn in engine.drawn:
        assert drawn.prompt == []
        for given in (drawn.conditioning.prompt, drawn.conditioning.negative):
            assert given is not None and given.array().tolist() == [[1, 2], [3, 4]]
    assert len(engine.drawn) == 2 and response.json()["usage"]["input_tokens"] == 0, "no token is computed"


def test_a_prompt_can_go_with_tensors_of_what_to_steer_away_from() -> None:
    engine = ScriptedEngine(images=PAINTER)
    assert ask(engine, prompt="ab", additional_information=NEGATIVE).status_code == 200
    [drawn] = engine.drawn
    assert drawn.prompt == list(b"ab") and drawn.conditioning.prompt is None and drawn.conditioning.negative is not None


LATENTS = {"tensor": {"data": encoded(1, 2, 3, 4), "shape": [1, 2, 2], "dtype": "float32"}}


def test_a_tensor_and_a_list_reach_the_stage_that_declares_them() -> None:
    engine = ScriptedEngine(images=PAINTER)
    entries = {"latents": LATENTS, "sigmas": {"values": [1, 0.5, 0.25]}}
    response = ask(engine, prompt="ab", additional_information={"entries": entries})
    assert response.status_code == 200, response.text
    [drawn] = engine.drawn
    assert drawn.image.steps == 3, "as many as there are sigmas"
    assert drawn.conditioning.values("sigmas") == [1, 0.5, 0.25]
    latents = drawn.conditioning.tensor("latents")
    assert latents is not None and latents.array().tolist() == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize(
    ("fields", "entries", "param", "said"),
    [
        ({}, {"latents": {"values": [1]}}, "entries['latents']", "takes it as a tensor"),
        ({}, {"sigmas": LATENTS}, "entries['sigmas']", "takes it as a list of values"),
        ({}, {"sigmas": {"values": [0.5, 1]}}, "entries['sigmas'].values", "below the one before it"),
        ({"num_inference_steps": 3}, {"sigmas": {"values": [1, 0.5]}}, "entries['sigmas'].values", "has 3 steps"),
        ({"n": 2}, {"latents": LATENTS}, "n", "no effect with latents"),
        ({"seed": 2}, {"latents": LATENTS}, "seed", "no effect with latents"),
    ],
)
def test_an_input_that_the_image_cannot_have_is_refused(
    fields: dict[str, Any], entries: dict[str, Any], param: str, said: str
) -> None:
    error = refusal(prompt="a", additional_information={"entries": entries}, **fields)
    assert error["param"] == (param if param in fields else f"additional_information.{param}")
    assert said in error["message"]


def test_too_many_tensors_at_a_time_are_429() -> None:
    engine = ScriptedEngine(images=PAINTER, refuse=Overloaded("full"))
    assert ask(engine, prompt_embeds=GOOD).status_code == 429


VIOLATIONS = [
    ({"data": "no base64!"}, "data"),
    ({"data": encoded(1, 2, 3)}, "data"),
    ({"data": encoded(1, 2, 3, float("nan"))}, "data"),
    ({"shape": [4]}, "shape"),
    ({"shape": [2, -2]}, "shape"),
    ({"shape": [41, 2]}, "shape"),
    ({"shape": [1, 4]}, "shape"),
    ({"shape": ["2", 2]}, "shape[0]"),
    ({"dtype": "int8"}, "dtype"),
    ({"sha256": "00"}, "sha256"),
    ({"extra": 1}, "extra"),
]


@pytest.mark.parametrize(("fields", "place"), VIOLATIONS)
def test_every_violation_names_its_field(fields: dict[str, Any], place: str) -> None:
    assert refusal(prompt_embeds=GOOD | fields)["param"] == f"prompt_embeds.{place}"
    information = {"entries": {"negative_prompt_embeds": {"tensor": GOOD | fields}}}
    assert refusal(prompt="a", additional_information=information)["param"].endswith(f".tensor.{place}")


@pytest.mark.parametrize("entry", [{}, {"tensor": GOOD, "values": [1]}, {"values": [10**30]}, {"values": [1]}])
def test_an_entry_that_is_wrong_is_named(entry: dict[str, Any]) -> None:
    error = refusal(prompt="a", additional_information={"entries": {"negative_prompt_embeds": entry}})
    assert error["param"].startswith("additional_information.entries['negative_prompt_embeds']")


def test_an_entry_that_the_model_does_not_know_is_never_ignored() -> None:
    error = refusal(prompt="a", additional_information={"entries": {"pooled": {"values": [1]}}})
    assert error["param"] == "additional_information.entries['pooled']"
    assert "negative_prompt_embeds" in error["message"]
    other = replace(PAINTER, inputs={})
    assert "it knows none" in refusal(painter=other, prompt="a", additional_information=NEGATIVE)["message"]
    assert refusal(painter=other, prompt_embeds=GOOD)["param"] == "prompt_embeds"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "prompt_embeds": GOOD}, "prompt"),
        ({"additional_information": NEGATIVE}, "prompt"),
        ({"prompt": "a", "negative_prompt": "b", "additional_information": NEGATIVE}, "negative_prompt"),
        (
            {"prompt": "a", "guidance_scale": 1, "additional_information": NEGATIVE},
            "additional_information.entries['negative_prompt_embeds']",
        ),
    ],
)
def test_texts_exclude_each_other(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields)["param"] == param
