"""The log has one line for each event, whatever is in it."""

from __future__ import annotations

import io
import json
import logging

import pytest

from tests.api.http import COMPLETIONS, PROMPT, request
from tests.api.scripted_engine import ScriptedEngine, Step, answer
from weft import logs
from weft.config import load
from weft.types import Output


@pytest.fixture
def stream() -> io.StringIO:
    stream = io.StringIO()
    logs.set_up("info", stream)
    return stream


def test_a_line_carries_its_request(stream: io.StringIO) -> None:
    token = logs.request_id.set("r-1")
    logs.event(logging.getLogger("weft.x"), logging.INFO, "request", {"status": 200, "seconds": 0.5, "path": "/a b"})
    logs.request_id.reset(token)
    assert stream.getvalue().endswith('Z INFO weft.x request_id=r-1 request status=200 seconds=0.500 path="/a b"\n')


def test_an_event_stays_on_one_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("weft.x").exception("it\nbroke")
    logs.event(logging.getLogger("weft.x"), logging.INFO, "request", {"path": "/a\nb"})
    first, second = stream.getvalue().splitlines()
    assert "it\\nbroke traceback=" in first and "ValueError" in first
    assert second.endswith('path="/a\\nb"')


def test_the_level_is_the_operator_s(stream: io.StringIO) -> None:
    logging.getLogger("weft.x").debug("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    logging.getLogger("uvicorn.error").warning("loud")
    assert "quiet" not in stream.getvalue() and "loud" in stream.getvalue()


def said(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines(stream: io.StringIO) -> None:
    logs.set_up("info", stream, "json")
    token = logs.request_id.set("r-1")
    fields = {"status": 200, "seconds": 0.5, "path": "/a\nb", "message": "not mine", "odd": {1}}
    logs.event(logging.getLogger("weft.x"), logging.INFO, "request", fields)
    logs.request_id.reset(token)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("weft.x").exception("it broke")
    first, second = said(stream)
    assert (first["level"], first["logger"], first["message"]) == ("info", "weft.x", "request")
    assert (first["request_id"], first["status"], first["seconds"], first["path"]) == ("r-1", 200, 0.5, "/a\nb")
    assert str(first["time"]).endswith("Z") and first["odd"] == "{1}"
    assert second["message"] == "it broke" and "ValueError" in str(second["traceback"])
    assert "request_id" not in second


SCRIPT: list[Step] = [Output(text="ab", token_ids=[1, 2], queue_seconds=0.125), *answer("c")]


def generated(stream: io.StringIO, **settings: object) -> dict[str, object]:
    logs.set_up("info", stream, "json")
    config = load({"api_key": ["k"], **settings}, env={})
    body = PROMPT | {"prompt": "a secret thing"}
    headers = {"x-api-key": "k", "x-request-id": "r-7"}
    assert request(ScriptedEngine(SCRIPT), "POST", COMPLETIONS, config, json=body, headers=headers).status_code == 200
    [line] = [line for line in said(stream) if line["message"] == "generated"]
    return line


def test_an_answer_leaves_a_line_and_no_text(stream: io.StringIO) -> None:
    line = generated(stream)
    assert line["request_id"] == "r-7" and line["finish"] == "stop"
    assert (line["prompt_tokens"], line["tokens"], line["choices"]) == (14, 3, 1)
    assert line["queue_s"] == 0.125 and 0 <= line["first_token_s"] <= line["seconds"]  # type: ignore[operator]
    assert len(str(line["tenant"])) == 8
    assert "secret" not in stream.getvalue() and '"k"' not in stream.getvalue()


def test_prompts_are_logged_when_the_operator_wants_it(stream: io.StringIO) -> None:
    assert generated(stream, log_prompts=True)["prompts"] == ["a secret thing"]
