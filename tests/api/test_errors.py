"""Every error has a status, OpenAI's shape, and nothing private in it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests import virtual_time
from tests.api.http import CHAT, COMPLETIONS, chat, complete, error_of, events, request, request_app
from tests.api.scripted_engine import PAINTER, ScriptedEngine, ScriptedTokenizer, Step, next_turn
from weft.api.app import admission_app
from weft.backends.contract import Health
from weft.config import load
from weft.errors import EngineFault, InvalidRequest, Overloaded, RequestTimeout, Unavailable, WeftError
from weft.serving.admission import Admission
from weft.types import FinishReason, Output

FIRST = Output(text="Hel", token_ids=[1])
SECRET = "boom in /usr/lib/weft/secret.py at 0x7fff12345678"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/org/other", 404),
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/health", 405),
        ("PUT", "/metrics", 405),
    ],
)
def test_what_is_not_there_is_refused_in_the_same_shape(method: str, path: str, status: int) -> None:
    response = request(ScriptedEngine(), method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (InvalidRequest("too long", param="prompt"), 400, "invalid_request_error", None, None),
        (Overloaded("full", retry_after_s=7), 429, "rate_limit_error", "overloaded", "7"),
        (Unavailable("restarting"), 503, "server_error", "unavailable", "1"),
        (RequestTimeout("late"), 504, "server_error", "timeout", None),
        (EngineFault("NaN logits"), 500, "server_error", "engine_fault", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(
    error: WeftError, status: int, kind: str, code: str | None, retry_after: str | None, stream: bool
) -> None:
    for endpoint in (chat, complete):
        response = endpoint(ScriptedEngine(refuse=error), stream=stream)
        assert response.status_code == status
        said = error_of(response)
        assert (said["type"], said["code"], said["param"]) == (kind, code, error.param)
        assert error.message in said["message"]
        assert response.headers.get("retry-after") == retry_after


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        (FinishReason.TIMEOUT, 504),
        (FinishReason.ERROR, 500),
        (FinishReason.ABORT, 503),
        (FinishReason.REJECTED, 400),
    ],
)
def test_an_answer_that_ends_badly(finish: FinishReason, status: int) -> None:
    last = Output(finish=finish, error="It went wrong.")
    for stream in (False, True):
        response = chat(ScriptedEngine([last]), stream=stream)
        assert response.status_code == status, "nothing was sent yet, so the status can still tell"
        assert "It went wrong." in error_of(response)["message"]
    assert chat(ScriptedEngine([FIRST, last])).status_code == status
    *_, error = events(chat(ScriptedEngine([FIRST, last]), stream=True))
    assert "It went wrong." in error["error"]["message"]
    assert error["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("end", [[RuntimeError(SECRET)], [Output(finish=FinishReason.ERROR, error=SECRET)], []])
@pytest.mark.parametrize("began", [[], [FIRST]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_is_answered_without_its_secrets(
    end: list[Step], began: list[Step], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine([*began, *end] or [next_turn])
    response = request(
        engine,
        "POST",
        CHAT,
        json={"model": "scripted", "messages": [{"role": "user", "content": "private"}], "stream": stream},
        headers={"x-request-id": "find-me"},
    )
    if stream and began:
        assert response.status_code == 200
        message = events(response)[-1]["error"]["message"]
    else:
        assert response.status_code == 500
        message = error_of(response)["message"]
    assert "find-me" in message
    for secret in ("boom", "/usr", "0x7fff", "Traceback"):
        assert secret not in response.text
    assert not engine.open
    assert not end or "boom" in caplog.text, "the log holds what the client does not see"
    assert "private" not in caplog.text


def test_an_unexpected_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    chat(ScriptedEngine([ValueError(SECRET)]))
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None


class NoText(ScriptedTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        raise AssertionError("a request that is refused was encoded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        (COMPLETIONS, {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/v1/images/generations", {"prompt": "hi", "model": "painter"}),
    ],
)
def test_a_full_queue_refuses_before_anything_is_encoded(path: str, body: dict[str, Any]) -> None:
    engine = ScriptedEngine(tokenizer=NoText(), images=PAINTER)
    engine.is_full = True
    response = request(engine, "POST", path, json={"model": "scripted", **body})
    assert response.status_code == 429
    assert response.headers["retry-after"]
    assert not engine.submitted


def test_a_full_queue_still_counts_tokens() -> None:
    engine = ScriptedEngine()
    engine.is_full = True
    assert request(engine, "POST", "/tokenize", json={"prompt": "hi"}).status_code == 200


def test_one_prompt_too_many_ends_the_others() -> None:
    engine = ScriptedEngine(refuse=Overloaded("full"))
    engine.refuse_from = 2
    assert complete(engine, prompt=["a", "b", "c"]).status_code == 429
    assert len(engine.submitted) == 2
    assert not engine.open


def test_one_failed_choice_fails_the_request() -> None:
    engine = ScriptedEngine([FIRST, EngineFault("one broke")])
    assert complete(engine, prompt=["a", "b"]).status_code == 500
    assert not engine.open


def test_a_request_that_takes_too_long_is_ended() -> None:
    config = load({"request_timeout_s": 0.05}, env={})
    engine = ScriptedEngine([FIRST, 3600.0])
    hello: dict[str, Any] = {"model": "scripted", "prompt": "x"}
    response = request(engine, "POST", COMPLETIONS, config, run=virtual_time.run, json=hello)
    assert response.status_code == 504
    assert error_of(response)["code"] == "timeout"
    assert not engine.open
    streamed = request(engine, "POST", COMPLETIONS, config, run=virtual_time.run, json=hello | {"stream": True})
    *_, last = events(streamed)
    assert last["error"]["code"] == "timeout"
    assert not engine.open


JSON = {"content-type": "application/json"}


async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes // 1024):
        yield b" " * 1024


@pytest.mark.parametrize("content", [b" " * (2**20 + 1), pieces(2**20 + 1024)], ids=["announced", "chunked"])
def test_a_body_too_large_is_refused(content: Any) -> None:
    response = request(ScriptedEngine(), "POST", CHAT, load({"max_body_mb": 1}, env={}), content=content, headers=JSON)
    assert response.status_code == 413
    assert "1 MiB" in error_of(response)["message"]
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("sent", ["abc-1.2_X", "a" * 128])
def test_a_sane_request_id_is_echoed(sent: str) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        assert request(ScriptedEngine(), "GET", path, headers={"x-request-id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a" * 129, "a b", "a\tb", "<x>", "ä".encode("latin-1")])
def test_another_request_id_is_replaced(sent: Any) -> None:
    given = request(ScriptedEngine(), "GET", "/health", headers={"x-request-id": sent}).headers["x-request-id"]
    assert len(given) == 32
    assert given.isalnum()


def test_a_server_without_its_engine_says_so() -> None:
    admission = Admission(load(env={}))
    app = admission_app(admission)
    for method, path in (("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/health")):
        response = request_app(app, method, path, content=b"{}")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        error_of(response)
    assert "starting" in request_app(app, "GET", "/health").text
    assert request_app(app, "GET", "/health/live").status_code == 200
    assert request_app(app, "GET", "/metrics").status_code == 200
    admission.open(ScriptedEngine())
    assert request_app(app, "GET", "/health").status_code == 200
    admission.drain()
    assert "draining" in request_app(app, "GET", "/health").text
    assert request_app(app, "POST", CHAT, content=b"{}").status_code == 503
    assert request_app(app, "GET", "/health/live").status_code == 200


def test_health_is_the_engine_s() -> None:
    engine = ScriptedEngine()
    assert request(engine, "GET", "/health").status_code == 200
    engine.state = Health(False, "restarting")
    response = request(engine, "GET", "/health")
    assert response.status_code == 503
    assert "restarting" in error_of(response)["message"]
    assert not engine.submitted


def test_models() -> None:
    response: httpx.Response = request(ScriptedEngine(), "GET", "/v1/models")
    [card] = response.json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("scripted", "model", 1000)
    assert request(ScriptedEngine(), "GET", "/v1/models/scripted").json()["id"] == "scripted"
    named = load({"served_model_name": "org/name"}, env={})
    assert request(ScriptedEngine(), "GET", "/v1/models/org/name", named).json()["id"] == "org/name"
    assert error_of(request(ScriptedEngine(), "GET", "/v1/models/scripted", named))["code"] == "model_not_found"
