"""A stream that waits for its first token says so, and is whole afterwards."""

from __future__ import annotations

import json

import pytest

from tests import virtual_time
from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, error_of, request
from tests.api.scripted_engine import ScriptedEngine, Step, answer
from weft.config import load
from weft.errors import EngineFault
from weft.types import Output

WAITING = ": waiting\n\n"
OFTEN = load({"keep_alive_s": 0.05}, env={})


def streamed(script: list[Step], path: str = CHAT, config=OFTEN, **fields: object):
    body = (HELLO if path == CHAT else PROMPT) | {"stream": True} | fields
    return request(ScriptedEngine(script), "POST", path, config, run=virtual_time.run, json=body)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_comments_come_before_the_first_token_and_then_no_more(path: str) -> None:
    response = streamed([0.48, *answer("Hel"), 0.2], path)
    assert response.status_code == 200
    comments = response.text.count(WAITING)
    assert comments == 9, "one every 0.05 s of 0.48 s"
    assert response.text.startswith(WAITING * comments + "data: {")
    undisturbed = streamed(answer("Hel"), path).text
    assert WAITING not in undisturbed
    assert len(response.text) == len(undisturbed) + comments * len(WAITING)


def test_a_pause_between_tokens_is_left_alone() -> None:
    script: list[Step] = [Output(text="a", token_ids=[1]), 0.2, *answer("b")]
    assert WAITING not in streamed(script).text


def test_several_choices_open_the_stream_once() -> None:
    text = streamed([0.12, *answer("a", "b")], n=3).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("role")]
    assert sorted(roles) == [0, 1, 2]
    for index in range(3):
        mine = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(mine) == "ab"


def test_an_error_after_it_is_an_event() -> None:
    response = streamed([0.12, EngineFault("it broke")])
    assert response.status_code == 200
    last, done, _ = response.text.removeprefix(WAITING).removeprefix(WAITING).split("\n\n")
    assert "it broke" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"


def test_an_error_before_it_still_has_its_status() -> None:
    assert error_of(streamed([EngineFault("it broke")]))["type"] == "server_error"


@pytest.mark.parametrize("script", [answer("x"), [0.12, *answer("x")]])
def test_0_is_never(script: list[Step]) -> None:
    assert WAITING not in streamed(script, config=load({"keep_alive_s": 0}, env={})).text


def test_an_answer_in_one_piece_has_none() -> None:
    response = request(ScriptedEngine([0.12, *answer("x")]), "POST", CHAT, OFTEN, run=virtual_time.run, json=HELLO)
    assert response.json()["choices"][0]["message"]["content"] == "x"
