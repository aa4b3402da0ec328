"""Vectors over HTTP: what the engine is asked for, what clients read, and what is refused."""

from __future__ import annotations

import base64
import struct
from functools import partial
from typing import Any

import httpx
import pytest
from openai.types import CreateEmbeddingResponse

from tests import virtual_time
from tests.api.http import error_of, post, real_server, request
from tests.api.scripted_engine import ScriptedEngine, forever, next_turn
from tests.api.test_disconnect import post_raw
from tests.waiting import PATIENCE, wait_until
from weft.api.app import build_app
from weft.api.openai import embeddings
from weft.config import load
from weft.errors import ContextTooLong, Overloaded
from weft.serving import generation
from weft.types import Pooling

EMBEDDINGS = "/v1/embeddings"


def ask(engine: ScriptedEngine, **fields: Any) -> httpx.Response:
    return post(engine, EMBEDDINGS, {"model": "scripted", "input": "hi"} | fields)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [[104, 105]]),
        (["hi", "a"], [[104, 105], [97]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_kind_of_input(given: Any, prompts: list[list[int]]) -> None:
    engine = ScriptedEngine()
    body = ask(engine, input=given).json()
    assert [embedded.prompt for embedded in engine.embedded] == prompts
    assert body == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": [float(len(prompt)), float(prompt[0])]}
            for index, prompt in enumerate(prompts)
        ],
        "model": "scripted",
        "usage": {"prompt_tokens": sum(map(len, prompts)), "total_tokens": sum(map(len, prompts))},
    }
    CreateEmbeddingResponse.model_validate(body)


def test_base64_is_the_same_vector() -> None:
    body = ask(ScriptedEngine(), encoding_format="base64").json()
    assert struct.unpack("<2f", base64.b64decode(body["data"][0]["embedding"])) == (2.0, 104.0)


def test_fields_reach_the_engine() -> None:
    engine = ScriptedEngine()
    ask(engine, dimensions=2, user="u", pooling="last", cache_salt="s", priority=3, truncate_prompt_tokens=1)
    [embedded] = engine.embedded
    assert (embedded.pooling, embedded.cache_salt, embedded.priority) == (Pooling.LAST, "s", 3)
    assert embedded.prompt == list(b"i"), "the end is kept"
    ask(engine)
    assert engine.embedded[-1].pooling is Pooling.MEAN
    ask(engine, input="x" * 5000, truncate_prompt_tokens=-1)
    assert len(engine.embedded[-1].prompt) == engine.model.max_model_len - 1


def test_a_wrong_width_is_refused_with_the_first_vector() -> None:
    """The other inputs would never end: their refusal shows that nobody waited for them."""
    engine = ScriptedEngine()
    begun: list[int] = []

    async def first_alone() -> None:
        begun.append(len(begun))
        await (next_turn if len(begun) == 1 else forever)()

    engine.embed_when = first_alone
    response = ask(engine, input=["a", "b", "c"], dimensions=3)
    assert response.status_code == 400 and error_of(response)["param"] == "dimensions"
    assert not engine.open


def test_inputs_run_together_and_keep_their_order() -> None:
    engine = ScriptedEngine()
    engine.embed_when = partial(virtual_time.sleep, 0.05)
    texts = ["x" * length for length in range(1, 301)]
    body = {"model": "scripted", "input": texts}
    response = request(engine, "POST", EMBEDDINGS, run=virtual_time.run, json=body)
    assert [item["embedding"][0] for item in response.json()["data"]] == list(range(1, 301))
    assert response.elapsed.total_seconds() < 300 * 0.05 / 10


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [256]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 3}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        ({"dimension": 2}, "dimension"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine()
    response = ask(engine, **fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert not engine.open


def test_another_model_is_not_found() -> None:
    assert ask(ScriptedEngine(), model="other").status_code == 404


def test_one_input_that_fails_fails_the_request_and_ends_the_others() -> None:
    engine = ScriptedEngine(refuse=ContextTooLong("too long"))
    engine.refuse_from = 2
    engine.embed_when = forever
    response = ask(engine, input=["a", "b", "c"])
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert not engine.open
    full = ask(ScriptedEngine(refuse=Overloaded("full", retry_after_s=7)))
    assert (full.status_code, full.headers["retry-after"]) == (429, "7")


def test_a_request_that_takes_too_long_is_ended() -> None:
    engine = ScriptedEngine()
    engine.embed_when = partial(virtual_time.sleep, 5)
    config = load({"request_timeout_s": 0.05}, env={})
    body = {"model": "scripted", "input": ["a", "b"]}
    response = request(engine, "POST", EMBEDDINGS, config, run=virtual_time.run, json=body)
    assert response.status_code == 504
    assert not engine.open


def test_a_client_that_hangs_up_ends_its_inputs_and_every_end_is_counted() -> None:
    engine = ScriptedEngine()
    engine.embed_when = forever
    with real_server(build_app(engine, load(env={}))) as url:
        connection = post_raw(url, EMBEDDINGS, {"model": "scripted", "input": ["a", "b", "c"]})
        wait_until(lambda: len(engine.open) == 3)
        connection.close()
        wait_until(lambda: not engine.open)
        metrics = httpx.get(url + "/metrics", timeout=PATIENCE).text
    assert 'weft_request_success_total{finished_reason="abort",model_name="scripted"} 3.0' in metrics


def test_vectors_that_would_take_too_much_are_refused_when_the_first_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "WRITTEN_BYTES", {"float": 1 << 18, "base64": 1 << 16})
    monkeypatch.setattr(generation, "MAX_QUEUED_EMBEDS", 1)
    config = load({"max_answer_mb": 1}, env={})
    few = {"model": "scripted", "input": ["a"] * 2}
    assert request(ScriptedEngine(), "POST", EMBEDDINGS, config, json=few).status_code == 200
    engine = ScriptedEngine()
    many = {"model": "scripted", "input": ["a"] * 8}
    response = request(engine, "POST", EMBEDDINGS, config, json=many)
    assert response.status_code == 400
    assert "8 vectors of 2 numbers take 4 MiB; at most 1 MiB" in error_of(response)["message"]
    assert "--max-answer-mb" in error_of(response)["message"] and error_of(response)["param"] == "input"
    assert len(engine.embedded) < 8
    assert request(ScriptedEngine(), "POST", EMBEDDINGS, config, json=many | {"encoding_format": "base64"}).is_success


def test_many_vectors_are_written_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ask(ScriptedEngine(), input=["hi", "a"]).json()
    monkeypatch.setattr(embeddings, "LARGE_ANSWER_BYTES", 0)
    assert ask(ScriptedEngine(), input=["hi", "a"]).json() == few
