"""Finding out who answers, and saying what is wrong when it cannot be used."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.backends.openai_server.peer import Asked, Handler, Reply, ScriptedPeer, connected
from tests.generation import sample
from weft.backends.openai_server import start as starting
from weft.backends.openai_server.start import start
from weft.config import load
from weft.errors import ConfigError, ContextTooLong, InvalidRequest, Unavailable, WeftError
from weft.types import ResetPrefixCache, SamplingParams, StartProfile, StopProfile


def start_at(peer: ScriptedPeer | None = None, answer: Handler | None = None, **settings: Any) -> Any:
    """What an engine is like that was started so."""

    async def go() -> Any:
        async with peer or ScriptedPeer() as there:
            if answer is not None:
                there.answers["/v1/models"] = answer
            async with connected(there, **settings) as engine:
                return engine

    return asyncio.run(go())


def refusal(url: str, **settings: Any) -> WeftError:
    with pytest.raises(WeftError) as error:
        asyncio.run(start(load({"engine": "remote", "engine_url": url, **settings}, env={})))
    return error.value


@pytest.mark.parametrize("url", ["", "localhost:8001", "ftp://localhost/v1", "http://", "http://[::1", "/v1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    error = refusal(url)
    assert isinstance(error, ConfigError)
    assert "--engine-url" in error.hint


def test_nobody_there() -> None:
    error = refusal("http://127.0.0.1:9/v1")
    assert isinstance(error, Unavailable)
    assert "No server answers at http://127.0.0.1:9/v1" in error.message


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in str(refusal("http://user:hunter2@127.0.0.1:9/v1"))


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, {"error": {"message": "who?"}}, "refuses the key"),
        (403, {"error": {"message": "no"}}, "refuses the key"),
        (404, {"error": {"message": "nothing"}}, "does not list its models (status 404)"),
        (500, {"error": {"message": "broken"}}, "broken"),
        (200, {"models": []}, "not answer as an OpenAI-compatible server"),
        (200, {"data": []}, "has no models"),
        (200, ["x"], "not answer as an OpenAI-compatible server"),
    ],
)
def test_a_server_that_cannot_be_used(status: int, body: Any, words: str) -> None:
    async def answer(reply: Reply, asked: Asked) -> None:
        await reply.json(body, status)

    with pytest.raises(ConfigError) as error:
        start_at(answer=answer)
    assert words in error.value.message


def test_a_server_without_a_list_needs_the_models_name() -> None:
    async def nothing(reply: Reply, asked: Asked) -> None:
        await reply.json({"detail": "Not Found"}, 404)

    engine = start_at(answer=nothing, engine_model="gpt")
    assert engine.model.name == "gpt"


def test_a_server_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "POLL_S", 0.01)
    peer = ScriptedPeer()
    ready = peer.answers["/v1/models"]
    times = iter(range(100))

    async def loading(reply: Reply, asked: Asked) -> None:
        if next(times) < 3:
            await reply.json({"error": {"message": "Loading model", "code": 503}}, 503)
        else:
            await ready(reply, asked)

    assert start_at(peer, loading).model.name == "model"
    with pytest.raises(ConfigError, match="Loading model"):
        start_at(answer=always_loading, start_timeout_s=0.05)


async def always_loading(reply: Reply, asked: Asked) -> None:
    await reply.json({"error": {"message": "Loading model"}}, 503)


def test_the_key_is_shown_to_the_peer_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    peer = ScriptedPeer()
    with caplog.at_level(logging.DEBUG):
        engine = start_at(peer, engine_api_key="secret")
    assert {asked.headers["authorization"] for asked in peer.asked} == {"Bearer secret"}
    assert "secret" not in caplog.text
    assert "secret" not in repr(vars(engine))


def test_how_long_the_context_is(tiny_model: Path) -> None:
    assert start_at(ScriptedPeer(max_model_len=700)).model.max_model_len == 700
    assert start_at(ScriptedPeer(max_model_len=700), max_model_len=500).model.max_model_len == 500
    assert start_at(ScriptedPeer(max_model_len=None), max_model_len=500).model.max_model_len == 500
    assert start_at(ScriptedPeer(max_model_len=None)).model.max_model_len == 0
    with pytest.raises(ConfigError, match="how long the context") as error:
        start_at(ScriptedPeer(max_model_len=None), tokenizer=str(tiny_model))
    assert "--max-model-len" in error.value.hint


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "http://127.0.0.1:{}/", "http://127.0.0.1:{}/v1/"])
def test_the_address_may_be_short(url: str) -> None:
    async def go() -> list[str]:
        async with ScriptedPeer() as peer:
            engine = await start(load({"engine": "remote", "engine_url": url.format(peer.port)}, env={}))
            await engine.close()
            return [asked.path for asked in peer.asked]

    assert asyncio.run(go())[:2] == ["/v1/models", "/health"]


def test_engines_of_one_kind_are_taken_at_their_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = start_at(ScriptedPeer("tensorrt_llm"), engine="cuda-trt")
        assert (engine.name, engine.abilities.cache_salt) == ("cuda-trt", False)
        engine = start_at(ScriptedPeer("somebody"), engine="ascend-mindie")
        assert (engine.name, engine.abilities.min_p) == ("ascend-mindie", False)
        assert not caplog.records
        engine = start_at(ScriptedPeer("vllm"), engine="cuda-trt")
    assert "cuda-trt is asked for, and the server says that it is vLLM" in caplog.text


def test_a_peer_without_a_health_route_is_watched_by_its_list() -> None:
    peer = ScriptedPeer()
    del peer.answers["/health"]
    assert start_at(peer).health().ready


def test_without_a_tokenizer_a_prompt_that_is_too_long_is_the_peer_s_to_refuse(tiny_model: Path) -> None:
    async def refuses(reply: Reply, asked: Asked) -> None:
        await reply.json({"error": {"message": "that is too much", "code": 400}}, 400)

    async def go() -> None:
        async with ScriptedPeer(max_model_len=8) as peer:
            peer.answers["/v1/completions"] = refuses
            params = SamplingParams(max_tokens=1)
            async with connected(peer) as engine:
                with pytest.raises(InvalidRequest, match="that is too much"):
                    await engine.submit(sample("far too long " * 100, params))
            assert len(peer.generations()) == 1
            async with connected(peer, tokenizer=str(tiny_model)) as engine:
                with pytest.raises(ContextTooLong):
                    await engine.submit(sample([1] * 100, params))
            assert len(peer.generations()) == 1, "the peer has not heard of it"

    asyncio.run(go())


def test_what_a_peer_cannot_be_asked_for_says_so() -> None:
    async def go() -> None:
        async with ScriptedPeer() as peer, connected(peer) as engine:
            for message in (ResetPrefixCache(), StartProfile("x"), StopProfile()):
                with pytest.raises(WeftError, match="The engine remote cannot") as error:
                    await engine.control(message)
                assert error.value.status == 501
            with pytest.raises(WeftError, match="--tokenizer"):
                _ = engine.text.tokenizer
            with pytest.raises(WeftError, match="--tokenizer"):
                engine.text.encode_chat([])

    asyncio.run(go())
