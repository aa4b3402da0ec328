"""The log has one line for each event, whatever is in it."""

from __future__ import annotations

import io
import json
import logging

import pytest

from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, request
from tests.api.scripted_engine import PAINTER, ScriptedEngine, Step, answer
from weft import logs
from weft.config import load
from weft.types import Output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    [line] = said(stream)
    return line


def test_a_request_leaves_one_line_and_no_text(stream: io.StringIO) -> None:
    line = generated(stream)
    assert (line["message"], line["request_id"], line["finish"]) == ("request", "r-7", "stop")
    assert (line["method"], line["path"], line["status"], line["model"]) == ("POST", COMPLETIONS, 200, "scripted")
    assert (line["prompt_tokens"], line["tokens"], line["choices"]) == (14, 3, 1)
    assert line["queue_s"] == 0.125 and 0 <= line["ttft_s"] <= line["seconds"]  # type: ignore[operator]
    assert line["tok_per_s"] > 0  # type: ignore[operator]
    assert len(str(line["tenant"])) == 8
    assert "secret" not in stream.getvalue() and '"k"' not in stream.getvalue()


def test_prompts_are_logged_when_the_operator_wants_it(stream: io.StringIO) -> None:
    assert generated(stream, log_prompts=True)["prompts"] == ["a secret thing"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "reason"),
    [
        (CHAT, HELLO | {"temperature": "hot"}, 400, None, "temperature: "),
        (CHAT, HELLO | {"model": "gpt-9"}, 404, "model_not_found", "There is no model 'gpt-9' here; this server has "),
        (CHAT, HELLO | {"max_tokens": -1}, 400, None, "max_tokens"),
        ("/v1/none", {}, 404, "unknown_url", "There is no POST /v1/none."),
    ],
)
def test_a_refusal_has_its_reason(
    stream: io.StringIO, path: str, body: dict[str, object], status: int, code: str | None, reason: str
) -> None:
    logs.set_up("info", stream, "json")
    assert request(ScriptedEngine(), "POST", path, json=body).status_code == status
    [line] = said(stream)
    assert line["status"] == status and reason in str(line["reason"])
    assert code is None or line["code"] == code


def test_a_reason_quotes_nothing_that_a_client_wrote(stream: io.StringIO) -> None:
    for text in ('it\'s "a secret" thing', "a secret " * 100, "x\ny a secret"):
        body = HELLO | {"messages": [{"role": text, "content": text}], "stop": text, "tool_choice": text, text: 1}
        assert request(ScriptedEngine(), "POST", CHAT, json=body).status_code == 400
    assert "secret" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 3


def test_a_missing_key_is_a_reason_and_no_key_is_shown(stream: io.StringIO) -> None:
    config = load({"api_key": ["sesame"]}, env={})
    headers = {"authorization": "Bearer wrong-sesame"}
    assert request(ScriptedEngine(), "POST", CHAT, config, json=HELLO, headers=headers).status_code == 401
    assert "status=401 " in stream.getvalue() and "reason=" in stream.getvalue()
    assert "sesame" not in stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("character", ["\n", "\r", "\x0b", "\x1b[31m", "\x85", "\u2028", "\u2029", "\u202e"])
def test_no_character_of_a_client_ends_a_line_or_steers_a_terminal(
    stream: io.StringIO, character: str, form: logs.LogFormat
) -> None:
    logs.set_up("info", stream, form)
    logs.event(logging.getLogger("weft.x"), logging.INFO, "request", {"path": f"/a{character}b", "own": [character]})
    logging.getLogger("weft.x").info("said %s", f"a{character}b")
    try:
        raise ValueError(character)
    except ValueError:
        logging.getLogger("weft.x").exception("it broke")
    assert len(stream.getvalue().splitlines()) == 3
    assert stream.getvalue().replace("\n", "").isprintable()


def test_ids_are_short_on_a_terminal_alone() -> None:
    for stream, shown in ((io.StringIO(), "chatcmpl-0123456789abcdef"), (Terminal(), "chatcmpl-01234567")):
        logs.set_up("info", stream)
        token = logs.request_id.set("fedcba9876543210")
        logs.event(logging.getLogger("weft.x"), logging.INFO, "request", {"answer_id": "chatcmpl-0123456789abcdef"})
        logs.request_id.reset(token)
        ids = "fedcba98" if stream.isatty() else "fedcba9876543210"
        assert stream.getvalue().endswith(f" request_id={ids} request answer_id={shown}\n")


def test_a_table_is_one_on_a_terminal_and_values_elsewhere() -> None:
    def written(stream: io.StringIO, form: logs.LogFormat) -> str:
        logs.set_up("info", stream, form)
        fields = {"model": "m", "kv_gib": 0.5, "problem": None}
        logs.event(logging.getLogger("weft.x"), logging.INFO, "plan", fields, table=lambda: ["memory  GiB", "kv  0.50"])
        return stream.getvalue()

    assert written(io.StringIO(), "text").endswith(" plan model=m kv_gib=0.500\n")
    assert written(Terminal(), "text").splitlines()[1:] == ["  memory  GiB", "  kv  0.50"]
    found = json.loads(written(Terminal(), "json"))
    assert (found["message"], found["model"], found["kv_gib"]) == ("plan", "m", 0.5)


def test_images_and_vectors_are_one_line_too(stream: io.StringIO) -> None:
    logs.set_up("info", stream, "json")
    engine = ScriptedEngine(images=PAINTER)
    request(engine, "POST", "/v1/images/generations", json={"prompt": "a secret thing", "n": 2})
    request(engine, "POST", "/v1/embeddings", json={"input": ["a secret thing", "another"]})
    image, vectors = said(stream)
    assert (image["images"], image["steps"], image["model"], image["finish"]) == (2, 6, "painter", "stop")
    assert (vectors["inputs"], vectors["prompt_tokens"], vectors["model"]) == (2, 21, "scripted")
    assert "secret" not in stream.getvalue()
