"""An image as a stream of events: their order, what each tells, and how a stream ends."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from openai.types.image_gen_completed_event import ImageGenCompletedEvent
from openai.types.image_gen_partial_image_event import ImageGenPartialImageEvent

from tests import virtual_time
from tests.api.http import error_of, request
from tests.api.openai.pixels import pixels_of
from tests.api.scripted_engine import PAINTER, ScriptedEngine, Step
from weft.config import load
from weft.errors import Overloaded
from weft.types import FinishReason, Output

PROGRESS, PARTIAL, COMPLETED = (f"image_generation.{kind}" for kind in ("progress", "partial_image", "completed"))


def stream(engine: ScriptedEngine, settings: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "a", "stream": True, **fields}
    config = load(settings or {}, env={})
    return request(engine, "POST", "/v1/images/generations", config, run=virtual_time.run, json=body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event has the name that its data has."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, last = response.text.split("\n\n")
    assert not last
    found = []
    for block in blocks:
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body.get('type', 'error')}"
        found.append(body)
    return found


def test_every_step_is_told_of_and_partial_images_stand_behind_theirs() -> None:
    found = events(stream(ScriptedEngine(images=PAINTER), partial_images=2, seed=9))
    told = [(event["type"], event.get("step", event.get("partial_image_index"))) for event in found]
    assert told == [
        (PROGRESS, 1), (PROGRESS, 2), (PARTIAL, 0), (PROGRESS, 3), (PROGRESS, 4), (PARTIAL, 1), (PROGRESS, 5),
        (PROGRESS, 6), (COMPLETED, None),
    ]  # fmt: skip
    assert all(event["steps"] == 6 for event in found if event["type"] == PROGRESS)
    assert found[-1]["seed"] == 9
    partial = [ImageGenPartialImageEvent.model_validate(event) for event in found if event["type"] == PARTIAL]
    completed = ImageGenCompletedEvent.model_validate(found[-1])
    shown = [pixels_of(base64.b64decode(event.b64_json)) for event in (*partial, completed)]
    assert [(width, height, rgb[1]) for width, height, rgb in shown] == [(4, 2, 2), (4, 2, 4), (4, 2, 6)]
    assert (completed.usage.input_tokens, completed.usage.output_tokens) == (1, 60)


def test_without_partial_images_there_is_one_image() -> None:
    found = events(stream(ScriptedEngine(images=PAINTER), num_inference_steps=1))
    assert [event["type"] for event in found] == [PROGRESS, COMPLETED]


def test_several_images_are_drawn_side_by_side_and_each_event_tells_whose_it_is() -> None:
    found = events(stream(ScriptedEngine(images=PAINTER), n=3, partial_images=2, seed=20))
    for index in range(3):
        own = [event for event in found if event["index"] == index]
        assert [event["step"] for event in own if event["type"] == PROGRESS] == [1, 2, 3, 4, 5, 6]
        assert [event["partial_image_index"] for event in own if event["type"] == PARTIAL] == [0, 1]
        assert own[-1]["type"] == COMPLETED and own[-1]["seed"] == 20 + index
        assert pixels_of(base64.b64decode(own[-1]["b64_json"]))[2][0] == 20 + index
    first_end = next(place for place, event in enumerate(found) if event["type"] == COMPLETED)
    assert {event["index"] for event in found[:first_end]} == {0, 1, 2}, "they were drawn one after the other"


def test_an_error_before_the_first_step_has_its_status() -> None:
    engine = ScriptedEngine(images=PAINTER, refuse=Overloaded("full"))
    assert stream(engine).status_code == 429
    engine = ScriptedEngine(images=PAINTER)
    engine.image_script = [Output(denoise_step=0, finish=FinishReason.ERROR, error="no luck")]
    response = stream(engine)
    assert response.status_code == 500 and "no luck" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Output(denoise_step=1, finish=FinishReason.ERROR, error="no luck"), "no luck"),
        (RuntimeError("boom in /home/secret"), "its log says how"),
        (60.0, "longer than 0.5 s"),
    ],
    ids=["failed", "defect", "late"],
)
def test_a_later_error_is_the_last_event(end: Step, said: str) -> None:
    engine = ScriptedEngine(images=PAINTER)
    engine.image_script = [Output(denoise_step=1), end]
    response = stream(engine, {"request_timeout_s": 0.5})
    assert response.status_code == 200
    progress, error = events(response)
    assert progress["type"] == PROGRESS
    assert said in error["error"]["message"] and "secret" not in response.text
    assert not engine.open


def test_a_stream_that_waits_says_so_until_its_first_step() -> None:
    engine = ScriptedEngine(images=PAINTER)
    picture = bytes(3 * 4 * 2)
    engine.image_script = [
        0.12, Output(denoise_step=1), 0.12, Output(denoise_step=2, image=picture, finish=FinishReason.STOP),
    ]  # fmt: skip
    text = stream(engine, {"keep_alive_s": 0.05}).text
    waited, first_step = text.split("event: ", 1)
    assert ": waiting" in waited
    assert ": waiting" not in first_step
    assert ": waiting" not in stream(engine, {"keep_alive_s": 0.0}).text
