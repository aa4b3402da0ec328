"""Pages in a browser: those of other sites get nothing done, those that the operator allowed can use every answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api import raw
from tests.api.http import CHAT, HELLO, error_of, events, real_server, request
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.waiting import PATIENCE
from weft.api.app import build_app
from weft.api.middleware import allowed_origins
from weft.config import load
from weft.errors import ConfigError
from weft.options import ServerOptions

PAGE = "https://chat.example.org"
FOREIGN = ["http://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil.example:8000", "null", "",
           "http://", "chrome-extension://abc", "http://evil.example?localhost", "http://evil.example?.localhost",
           "http://evil-localhost"]  # fmt: skip
OWN = ["http://localhost", "http://localhost:3000", "https://127.0.0.1:8000", "http://[::1]:9", "tauri://localhost",
       "http://tauri.localhost"]  # fmt: skip
KEYS = {"api_key": ["k"]}


def sent(settings: dict[str, Any], method: str = "POST", path: str = CHAT, **options: Any) -> httpx.Response:
    return request(ScriptedEngine(answer("hello")), method, path, load(settings, env={}), **options)


@pytest.mark.parametrize("origin", FOREIGN)
def test_without_keys_pages_of_other_sites_are_refused(origin: str) -> None:
    engine = ScriptedEngine(answer("hello"))
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("OPTIONS", CHAT)):
        refused = request(engine, method, path, json=HELLO, headers={"origin": origin})
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (403, "foreign_origin")
        assert "--cors-origins" in error["message"] and "access-control-allow-origin" not in refused.headers
        assert refused.headers["connection"] == "close"
    assert not engine.submitted


def test_what_is_echoed_of_an_origin_is_short() -> None:
    refused = sent({}, json=HELLO, headers={"origin": "http://" + "x" * 5000})
    assert refused.status_code == 403 and len(error_of(refused)["message"]) < 300


def test_a_page_of_this_server_is_not() -> None:
    headers = {"origin": "http://weft.lan:8000", "host": "weft.lan:8000"}
    answered = sent({"allowed_host": ["weft.lan"]}, json=HELLO, headers=headers)
    assert answered.status_code == 200 and "access-control-allow-origin" not in answered.headers


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_key_comes_in_from_anywhere(origin: str) -> None:
    """No page has it by itself, as it would a cookie; applications that are pages inside send any origin."""
    assert sent(KEYS, json=HELLO, headers={"origin": origin, "x-api-key": "k"}).status_code == 200
    assert sent(KEYS, json=HELLO, headers={"origin": origin}).status_code == 401


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "text/json", "json",
     "multipart/form-data; boundary=x", "application/jsonp", "text/plain; application/json", "x" * 5000],
)  # fmt: skip
@pytest.mark.parametrize("settings", [{}, KEYS], ids=["no keys", "keys"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_a_body_must_be_said_to_be_json(content_type: str | None, settings: dict[str, Any], path: str) -> None:
    """The other types a page may send to any server without asking it first."""
    headers = {"x-api-key": "k"} | ({} if content_type is None else {"content-type": content_type})
    refused = sent(settings, path=path, content=json.dumps(HELLO), headers=headers)
    assert refused.status_code == 415
    message = refused.json()["error"]["message"]
    assert "Content-Type: application/json" in message and "--json" in message and len(message) < 300


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "application/json ;a=b"],
)
def test_json_by_any_of_its_names(content_type: str) -> None:
    assert sent({}, content=json.dumps(HELLO), headers={"content-type": content_type}).status_code == 200


def test_a_request_without_a_body_needs_no_type() -> None:
    admin = {"admin_key": ["root"]}
    assert sent(admin, path="/admin/drain", headers={"x-api-key": "root"}).status_code == 200
    assert sent({}).status_code == 400, "there is no JSON in it either"


# CORS.


def asked(origin: str = PAGE, **headers: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
        **headers,
    }


@pytest.mark.parametrize("settings", [{}, KEYS], ids=["no keys", "keys"])
@pytest.mark.parametrize("origin", OWN)
def test_pages_of_this_machine_need_no_leave(origin: str, settings: dict[str, Any]) -> None:
    asking = sent(settings, "OPTIONS", headers=asked(origin))
    assert (asking.status_code, asking.headers["access-control-allow-origin"]) == (204, origin)
    answered = sent(settings, json=HELLO, headers={"origin": origin, "x-api-key": "k"})
    assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, origin)


@pytest.mark.parametrize("settings", [{}, KEYS], ids=["no keys", "keys"])
@pytest.mark.parametrize("allowed", [PAGE, "*", f"http://other.example, {PAGE}"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models"])
def test_a_preflight_of_an_allowed_page_is_answered_without_a_key(
    settings: dict[str, Any], allowed: str, path: str
) -> None:
    response = sent({**settings, "cors_origins": [allowed]}, "OPTIONS", path, headers=asked())
    assert response.status_code == 204 and not response.content
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "origin" in response.headers["vary"].lower()
    assert {"GET", "HEAD", "POST", "DELETE"} <= {*response.headers["access-control-allow-methods"].split(", ")}
    assert response.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert int(response.headers["access-control-max-age"]) > 0
    assert "access-control-allow-credentials" not in response.headers
    assert "access-control-allow-private-network" not in response.headers


def test_a_page_may_reach_a_machine_in_its_own_network() -> None:
    private = asked(**{"access-control-request-private-network": "true"})
    response = sent({"cors_origins": [PAGE]}, "OPTIONS", headers=private)
    assert response.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("origin", ["https://chat.example.org.evil.example", "http://chat.example.org", PAGE + ":444"])
def test_an_allowed_origin_allows_no_other(origin: str) -> None:
    settings = {"cors_origins": [PAGE]}
    assert sent(settings, "OPTIONS", headers=asked(origin)).status_code == 403
    assert sent(settings, json=HELLO, headers={"origin": origin}).status_code == 403
    with_key = sent(settings | KEYS, json=HELLO, headers={"origin": origin, "x-api-key": "k"})
    assert with_key.status_code == 200 and "access-control-allow-origin" not in with_key.headers
    refused = sent(settings | KEYS, "OPTIONS", headers=asked(origin))
    assert refused.status_code == 403, "and not 401: a preflight never has a key"
    assert "access-control-allow-origin" not in refused.headers


def test_an_allowed_page_can_read_answers_errors_and_streams() -> None:
    config = load({**KEYS, "cors_origins": [PAGE.upper(), "http://other.example"]}, env={})
    with real_server(build_app(ScriptedEngine(answer("a", "b")), config), config) as url:

        def told(**options: Any) -> httpx.Response:
            headers = {"origin": PAGE, "x-api-key": "k", **options.pop("headers", {})}
            return httpx.post(url + CHAT, headers=headers, timeout=PATIENCE, **options)

        stream = told(json=HELLO | {"stream": True})
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in events(stream)) == "ab"
        answers = [told(json=HELLO), stream, told(json={}), told(json=HELLO, headers={"x-api-key": "wrong"})]
        assert [response.status_code for response in answers] == [200, 200, 400, 401]
        for response in answers:
            assert response.headers["access-control-allow-origin"] == PAGE
            assert response.headers["access-control-expose-headers"] == "*"
            assert "access-control-allow-credentials" not in response.headers
        assert "access-control-allow-origin" not in httpx.get(url + "/health/live", timeout=PATIENCE).headers


@pytest.mark.parametrize("origin", ["chat.example.org", "https://", "https://a.example/", "https://a.example/x", ""])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins"):
        allowed_origins(ServerOptions(cors_origins=[origin]))
    allowed_origins(ServerOptions(cors_origins=["*", PAGE, "http://localhost:3000", "chrome-extension://abc"]))


def test_the_setting_answers_to_its_old_name(tmp_path: Path) -> None:
    file = tmp_path / "weft.toml"
    file.write_text(f'[server]\nallowed_origin = ["{PAGE}"]\n')
    for config in (
        load({"allowed_origin": [PAGE]}, env={}),
        load(env={"WEFT_ALLOWED_ORIGIN": PAGE}),
        load(env={"WEFT_CORS_ORIGINS": PAGE}),
        load(file=file, env={}),
    ):
        assert config.server.cors_origins == [PAGE]


# Refusals and failures that no endpoint answers.


@pytest.mark.parametrize(
    ("headers", "status"), [({"host": "evil.example"}, 421), ({f"x-{n}": "1" for n in range(130)}, 431)]
)
def test_a_page_can_read_why_the_head_of_its_request_is_refused(headers: dict[str, str], status: int) -> None:
    refused = sent({}, json=HELLO, headers=headers | {"origin": OWN[1]})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (status, OWN[1])


def test_a_page_can_read_that_the_server_failed() -> None:
    failed = request(ScriptedEngine([ValueError("boom")]), "POST", CHAT, json=HELLO, headers={"origin": OWN[1]})
    assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (500, OWN[1])
    assert failed.headers["x-request-id"] in error_of(failed)["message"]


def test_a_page_can_read_that_the_head_of_its_request_has_no_end() -> None:
    config = load({"max_header_kb": 8}, env={})
    with real_server(build_app(ScriptedEngine(), config), config) as url:
        for origin in (OWN[1], FOREIGN[0]):
            with raw.connect(url) as connection:
                connection.sendall(f"GET / HTTP/1.1\r\norigin: {origin}\r\nx-long: {'a' * 8192}".encode())
                told = raw.everything(connection)
            assert raw.status_of(told) == 431
            assert (f"access-control-allow-origin: {origin}\r\n".encode() in told) is (origin == OWN[1])
