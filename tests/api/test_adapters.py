"""LoRA adapters at the endpoints: by the model's name or by a field, known before the engine is asked."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import grpc
import httpx
import pytest

from tests.api.grpc.calls import answer_to, ask, check_whole, refused, served
from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, error_of, events, post, request_app
from tests.api.scripted_engine import ScriptedEngine, answer
from weft import logs
from weft.api.app import build_app
from weft.config import load
from weft.types import Adapter, UnloadLora

ANTHROPIC = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO),
    (COMPLETIONS, PROMPT),
    ("/v1/messages", ANTHROPIC),
    ("/v1/responses", {"input": "hi"}),
]


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.adapters = [
        Adapter(name=name, number=number, path=f"/{name}") for number, name in enumerate(("red", "blue"))
    ]
    return engine


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_the_name_of_a_model_may_be_an_adapters(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> None:
    told = [post(engine, path, {**body, "model": name}).json()["model"] for name in ("red", "scripted", "blue")]
    assert told == ["red", "scripted", "blue"], "the answer names the model that was asked for"
    assert [asked.adapter for asked in engine.submitted] == ["red", None, "blue"]


def test_a_stream_names_it_too(engine: ScriptedEngine) -> None:
    chunks = events(post(engine, CHAT, {**HELLO, "model": "red", "stream": True}))
    assert {chunk["model"] for chunk in chunks} == {"red"}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_a_model_that_nobody_knows_is_not_found(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> None:
    response = post(engine, path, {**body, "model": "green"})
    assert response.status_code == 404
    assert "'scripted', 'red', 'blue'" in response.text and not engine.submitted


@pytest.mark.parametrize(("path", "body"), ENDPOINTS[:2])
def test_a_field_says_it_as_well(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> None:
    told = [post(engine, path, {**body, "adapter": adapter}).json()["model"] for adapter in ("red", "", None)]
    assert told == ["scripted"] * 3
    post(engine, path, {**body, "model": "red", "adapter": "red"})
    assert [asked.adapter for asked in engine.submitted] == ["red", "", None, "red"]
    for wrong in ({"adapter": "green"}, {"model": "red", "adapter": "blue"}, {"adapter": 1}):
        response = post(engine, path, {**body, **wrong})
        assert response.status_code == 400 and error_of(response)["param"] == "adapter"
    assert len(engine.submitted) == 4


def test_every_choice_of_an_answer_has_it(engine: ScriptedEngine) -> None:
    post(engine, COMPLETIONS, {**PROMPT, "model": "red", "n": 2, "prompt": ["a", "b"]})
    assert [asked.adapter for asked in engine.submitted] == ["red"] * 4


def test_models_are_listed_with_those_that_they_are_made_from(engine: ScriptedEngine) -> None:
    app = build_app(engine, load(env={}))
    cards = request_app(app, "GET", "/v1/models").json()["data"]
    assert [(card["id"], card.get("parent"), card.get("root")) for card in cards] == [
        ("scripted", None, None),
        ("red", "scripted", "scripted"),
        ("blue", "scripted", "scripted"),
    ]
    assert request_app(app, "GET", "/v1/models/blue").json() == cards[2]
    assert "/blue" not in request_app(app, "GET", "/v1/models").text, "a path of the operator's"


def test_words_are_counted_as_the_model_has_them(engine: ScriptedEngine) -> None:
    assert post(engine, "/tokenize", {"model": "red", "prompt": "hi"}).json()["tokens"] == [104, 105]
    assert post(engine, "/detokenize", {"model": "red", "tokens": [104]}).json()["prompt"] == "h"
    assert post(engine, "/v1/messages/count_tokens", {**ANTHROPIC, "model": "red"}).status_code in (200, 400)
    assert post(engine, "/tokenize", {"model": "green", "prompt": "hi"}).status_code == 404


def test_vectors_are_the_adapters(engine: ScriptedEngine) -> None:
    assert post(engine, "/v1/embeddings", {"model": "red", "input": "hi"}).json()["model"] == "red"
    assert post(engine, "/v1/embeddings", {"model": "scripted", "input": "hi"}).json()["model"] == "scripted"
    assert [asked.adapter for asked in engine.embedded] == ["red", None]


def test_figures_and_log_name_the_model_that_was_asked_for(engine: ScriptedEngine) -> None:
    app = build_app(engine, load(env={}))
    stream = io.StringIO()
    logs.set_up("info", stream=stream)
    for body in ({"model": "red"}, {"model": "scripted"}, {"adapter": "blue"}):
        request_app(app, "POST", CHAT, json={**HELLO, **body})
    metrics = request_app(app, "GET", "/metrics").text
    assert 'weft_request_success_total{finished_reason="stop",model_name="red"} 1.0' in metrics
    assert 'weft_request_success_total{finished_reason="stop",model_name="scripted"} 2.0' in metrics
    lines = [line for line in stream.getvalue().splitlines() if " request " in line and "model=" in line]
    assert [("model=red" in line, "adapter=red" in line, "adapter=blue" in line) for line in lines] == [
        (True, True, False),
        (False, False, False),
        (False, False, True),
    ]


def test_both_ways_over_grpc(engine: ScriptedEngine) -> None:
    async def scenario() -> None:
        async with served(engine) as opened:
            for request_ in (
                ask(adapter="red"),
                ask(model_id="blue"),
                ask(model_id="default"),
                ask(model_id="scripted"),
            ):
                check_whole(await answer_to(opened, request_))
            assert [asked.adapter for asked in engine.submitted] == ["red", "blue", None, None]
            for wrong, code in (
                (ask(adapter="green"), grpc.StatusCode.INVALID_ARGUMENT),
                (ask(model_id="red", adapter="blue"), grpc.StatusCode.INVALID_ARGUMENT),
                (ask(model_id="green"), grpc.StatusCode.NOT_FOUND),
            ):
                assert (await refused(opened.predict([wrong])))[0] is code
            assert (await opened.control("list_models")).payload["models"] == "scripted,red,blue"
            assert (await opened.health()).metrics["requests_success"] == "4"

    asyncio.run(scenario())


def test_an_adapter_that_goes_meanwhile_goes_on_where_it_has_begun(engine: ScriptedEngine) -> None:
    async def scenario() -> None:
        async def gone() -> None:
            await engine.control(UnloadLora("red"))

        engine.script = [gone, *answer("a")]
        transport = httpx.ASGITransport(build_app(engine, load(env={})))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = await client.post(CHAT, json={**HELLO, "model": "red"})
            assert first.status_code == 200 and first.json()["model"] == "red"
            assert (await client.post(CHAT, json={**HELLO, "model": "red"})).status_code == 404

    asyncio.run(scenario())
