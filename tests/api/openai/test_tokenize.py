"""Text to tokens and back over HTTP: what the tokenizer and the chat template say, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.http import post, request
from tests.api.scripted_engine import ScriptedEngine
from weft import __version__


def tokenize(**body: Any) -> httpx.Response:
    return post(ScriptedEngine(), "/tokenize", body)


def test_a_prompt_to_tokens_and_back() -> None:
    engine = ScriptedEngine()
    answer = tokenize(prompt="hello there", return_token_strs=True).json()
    assert answer["tokens"] == engine.tokenizer.encode("hello there")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == engine.model.max_model_len
    back = post(engine, "/detokenize", {"tokens": engine.tokenizer.encode("hello there", add_special_tokens=False)})
    assert back.json() == {"prompt": "hello there"}


def test_messages_go_through_the_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = tokenize(messages=messages).json()
    assert answer["tokens"] == ScriptedEngine().encode_chat(messages).token_ids
    assert answer["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "adds_special_tokens": True}, "adds_special_tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    response = post(ScriptedEngine(), path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_another_model_is_not_found() -> None:
    assert tokenize(prompt="a", model="other").status_code == 404


def test_the_version_is_told() -> None:
    assert request(ScriptedEngine(), "GET", "/version").json() == {"version": __version__}
