"""Tensors with a request for images, as JSON brings them: refused unless allowed, and then checked to the end."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from tests.frontend.http import error_of, request
from tests.frontend.scripted_engine import PAINTER, ScriptedEngine
from weft.config import load


def encoded(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


GOOD = {"data": encoded(1, 2, 3, 4), "shape": [2, 2], "dtype": "float32"}
TENSOR = {"entries": {"x": {"tensor": GOOD}}}


def refusal(allowed: bool = True, **fields: Any) -> dict[str, Any]:
    engine = ScriptedEngine(images=PAINTER)
    config = load({"allow_prompt_embeds": allowed}, env={})
    response = request(engine, "POST", "/v1/images/generations", config, json=fields)
    assert response.status_code == 400, response.text
    assert not engine.drawn
    return error_of(response)


def test_they_are_refused_unless_the_operator_allows_them() -> None:
    assert load(env={}).limits.allow_prompt_embeds is False
    for fields in ({"prompt_embeds": GOOD}, {"prompt": "a", "additional_information": TENSOR}):
        error = refusal(allowed=False, **fields)
        assert error["param"] == [*fields][-1]
        assert "--allow-prompt-embeds" in error["message"]


def test_what_is_right_is_not_drawn_from_yet() -> None:
    assert "not drawn from it yet" in refusal(prompt_embeds=GOOD)["message"]
    error = refusal(prompt="a", additional_information=TENSOR | {"entries": {"y": {"values": [1, 2.5, "a", True]}}})
    assert "not drawn from it yet" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"data": "no base64!"}, "prompt_embeds.data"),
        ({"data": encoded(1, 2, 3)}, "prompt_embeds.data"),
        ({"data": encoded(1, 2, 3, float("nan"))}, "prompt_embeds.data"),
        ({"shape": [4]}, "prompt_embeds.shape"),
        ({"shape": [2, -2]}, "prompt_embeds.shape"),
        ({"shape": [41, 2]}, "prompt_embeds.shape"),
        ({"shape": ["2", 2]}, "prompt_embeds.shape[0]"),
        ({"dtype": "int8"}, "prompt_embeds.dtype"),
        ({"sha256": "00"}, "prompt_embeds.sha256"),
        ({"extra": 1}, "prompt_embeds.extra"),
    ],
)
def test_every_violation_names_its_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(prompt_embeds=GOOD | fields)["param"] == param


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({}, ""),
        ({"tensor": GOOD, "values": [1]}, ""),
        ({"tensor": GOOD | {"data": "?"}}, ".tensor.data"),
        ({"tensor": GOOD | {"shape": [3]}}, ".tensor.data"),
        ({"values": [10**30]}, ".values"),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry: dict[str, Any], place: str) -> None:
    error = refusal(prompt="a", additional_information={"entries": {"x": entry}})
    assert error["param"] == f"additional_information.entries['x']{place}"


def test_a_prompt_and_embeds_exclude_each_other() -> None:
    assert refusal(prompt="a", prompt_embeds=GOOD)["param"] == "prompt"
