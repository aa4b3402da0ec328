"""A model that reads prompts itself: it is sent their text, and no tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from tests.api.http import error_of, post, request
from tests.api.scripted_engine import PAINTER, ScriptedEngine
from weft import logs
from weft.config import load
from weft.types import ImageParams

IMAGES = "/v1/images/generations"
READER = replace(PAINTER, reads_text=True, inputs={}, max_prompt_tokens=3)


def test_it_is_sent_the_text_as_it_stands() -> None:
    engine = ScriptedEngine(images=READER)
    body = {"prompt": "A red circle ", "negative_prompt": "Blue", "seed": 1, "n": 2}
    answer = post(engine, IMAGES, body)
    assert answer.status_code == 200
    assert [drawn.prompt for drawn in engine.drawn] == [[], []]
    assert engine.drawn[0].image == ImageParams(
        width=4, height=2, steps=6, guidance_scale=3.0, seed=1, prompt_text="A red circle ", negative_text="Blue"
    )
    assert engine.drawn[1].image == replace(engine.drawn[0].image, seed=2)
    assert answer.json()["usage"]["input_tokens"] == 0


def test_one_that_reads_tokens_is_sent_no_text() -> None:
    engine = ScriptedEngine(images=PAINTER)
    assert post(engine, IMAGES, {"prompt": "red", "negative_prompt": "blue"}).status_code == 200
    [drawn] = engine.drawn
    assert (drawn.prompt, drawn.image.prompt_text, drawn.image.negative_text) == (list(b"red"), "", "")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"sampler": "heun"}, "sampler"),
        ({"prompt": "x" * 4001}, "prompt"),
        ({"negative_prompt": "x" * 4001}, "negative_prompt"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "negative_prompt"),
    ],
    ids=["sampler", "prompt", "negative prompt", "no guidance"],
)
def test_what_it_does_not_do_is_a_bad_request(wrong: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(images=READER)
    answer = post(engine, IMAGES, {"prompt": "a red circle"} | wrong)
    assert answer.status_code == 400 and error_of(answer)["param"] == param
    assert engine.drawn == []


def test_its_prompt_is_logged_where_prompts_are(caplog: pytest.LogCaptureFixture) -> None:
    for logs_prompts in (False, True):
        caplog.clear()
        caplog.handler.setFormatter(logs.LineFormatter())
        with caplog.at_level(logging.INFO, "weft.api.middleware"):
            settings = load({"log_prompts": logs_prompts}, env={})
            request(ScriptedEngine(images=READER), "POST", IMAGES, settings, json={"prompt": "a secret thing"})
        assert "images=1" in caplog.text and ("a secret thing" in caplog.text) == logs_prompts
