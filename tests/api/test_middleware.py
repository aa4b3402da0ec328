"""What every answer has beside its body, HEAD, and the server's own card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api import raw
from tests.api.http import CHAT, HELLO, real_server, request
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.waiting import PATIENCE
from weft import __version__
from weft.api.app import build_app
from weft.config import load

KEYS = load({"api_key": ["k"]}, env={})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with real_server(build_app(ScriptedEngine(answer("hello")), load(env={}))) as url:
        yield url


def sent(method: str, path: str, **options: Any) -> httpx.Response:
    return request(ScriptedEngine(answer("hello")), method, path, **options)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CHAT, HELLO),
        ("POST", CHAT, HELLO | {"stream": True}),
        ("POST", CHAT, {}),
        ("GET", "/v1/models", None),
        ("GET", "/nothing", None),
        ("POST", "/v1/messages", {}),
        ("HEAD", "/", None),
    ],
)
def test_every_answer_has_both_ids_and_its_time(method: str, path: str, body: dict[str, Any] | None) -> None:
    told = sent(method, path, json=body, headers={"x-request-id": "mine"}).headers
    assert told["x-request-id"] == told["request-id"] == "mine"
    assert told["openai-processing-ms"].isdigit()


@pytest.mark.parametrize("path", ["/", "/version", "/v1/models", "/v1/models/scripted", "/health", "/health/live",
                                  "/metrics", "/openapi.json"])  # fmt: skip
def test_head_is_get_without_its_body(url: str, path: str) -> None:
    got = httpx.get(url + path, timeout=PATIENCE)
    head = httpx.head(url + path, timeout=PATIENCE)
    assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
    for name in ("content-type", "content-encoding", "vary"):
        assert head.headers.get(name) == got.headers.get(name)
    assert int(head.headers["content-length"]) > 0


def test_the_connection_goes_on_behind_a_head(url: str) -> None:
    """A body that was sent all the same would be taken for the next answer."""
    head = b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    told = raw.exchange(url, head + b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 2)
    assert told.count(b"HTTP/1.1 200") == 2 and b"scripted" not in told


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_what_has_no_get_has_no_head(path: str) -> None:
    refused = sent("HEAD", path)
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
    assert sent("POST", "/v1/models").headers["allow"] == "GET, HEAD"


def test_head_is_closed_without_a_key_but_at_the_root() -> None:
    for path, status in (("/v1/models", 401), ("/nothing", 401), ("/health/live", 200), ("/", 200)):
        assert request(ScriptedEngine(), "HEAD", path, KEYS).status_code == status
    assert request(ScriptedEngine(), "GET", "/", KEYS).status_code == 401


def test_the_root_names_the_server() -> None:
    assert sent("GET", "/").json() == {"name": "Weft", "version": __version__, "docs": "/openapi.json"}
