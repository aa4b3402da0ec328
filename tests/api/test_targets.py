"""What no decent client sends: it never goes round the lock, never breaks the server, and is never answered by one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.api import raw
from tests.api.http import COMPLETIONS, PROMPT, error_of, real_server, request
from tests.api.scripted_engine import ScriptedEngine, answer
from weft.api.app import build_app
from weft.config import load

KEYS = load({"api_key": ["sesame"], "admin_key": ["root"]}, env={})
KEY = b"Authorization: Bearer sesame\r\n"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer("x"))


@pytest.fixture(scope="module")
def locked(engine: ScriptedEngine) -> Iterator[str]:
    with real_server(build_app(engine, KEYS), KEYS) as url:
        yield url


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[str]:
    with real_server(build_app(ScriptedEngine(answer("x")), load(env={}))) as url:
        yield url


TARGETS = [
    b"//v1/models", b"/V1/Models", b"/v1/models/", b"/v1//models", b"/v1/%6dodels", b"/%2e%2e/v1/models",
    b"/health/live/../../v1/models", b"/health/live/%2e%2e/%2e%2e/v1/models", b"/health/live%2f..%2f..%2fv1/models",
    b"/health/live;/v1/models", b"/health/live%00", b"/health/live%20", b"/v1/models#",
    b"/v1/models?x=/health/live", b"http://localhost/v1/models", b"http://evil.example/v1/models",
    b"http://localhost:80/v1/models?x", b"https://localhost/v1/models", b"http://health/live", b"http://localhost",
    b"health/live", b"*", b"/", b"/%", b"/%zz", b"/%ff%fe", b"/\xff\xfe", b"/v1/models\t", b"/admin/drain",
    b"/ADMIN/requests", b"/admin/../v1/models", b"//health/live", b"/./health/live", b"/metrics", b"/openapi.json",
    b"/redoc", b"/v1/models/" + b"a/" * 500, b"/" + b"%25" * 2000 + b"2e", b"/v1/models\\..\\health",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=repr)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_no_target_opens_without_a_key(locked: str, target: bytes, method: bytes) -> None:
    told = raw.exchange(locked, b"%b %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (method, target))
    assert raw.status_of(told) in (400, 401, 404, 405)
    assert b"Traceback" not in told and b"scripted" not in told


@pytest.mark.parametrize("target", TARGETS, ids=repr)
def test_with_a_key_nothing_breaks(locked: str, target: bytes) -> None:
    told = raw.exchange(locked, b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%b\r\n" % (target, KEY))
    assert 200 <= raw.status_of(told) < 500
    assert b"Traceback" not in told


@pytest.mark.parametrize(
    "method", [b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH", b"TRACE", b"CONNECT", b"get", b"FOO"]
)
@pytest.mark.parametrize("target", [b"/v1/models", b"/health/live", b"*", b"localhost:80"])
def test_no_method_opens_without_a_key(locked: str, method: bytes, target: bytes) -> None:
    told = raw.exchange(locked, b"%b %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (method, target))
    is_open = (method, target) == (b"HEAD", b"/health/live")
    assert raw.status_of(told) in ((200,) if is_open else (0, 400, 401, 405))
    assert b"Traceback" not in told and b"scripted" not in told


HEADS = [
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost:\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: a\rb\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: a\nAuthorization: Bearer sesam\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n folded: yes\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization : Bearer sesame\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Api-Key\x00: sesame\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models\r\n\r\n",
    b"GET  /v1/models  HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAMAAABk\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_no_head_opens_without_a_key(locked: str, head: bytes) -> None:
    told = raw.exchange(locked, head)
    assert raw.status_of(told) in (0, 400, 401)
    assert b"Traceback" not in told and b"scripted" not in told


def smuggled(path: bytes = b"/v1/models") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path, KEY)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + KEY
SMUGGLING = [
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled(),
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + smuggled(),
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde" + smuggled(),
    POST + b"Content-Length: 5, 5\r\n\r\nabcde" + smuggled(),
    POST + b"Content-Length: +5\r\n\r\nabcde" + smuggled(),
    POST + b"Content-Length: -1\r\n\r\n" + smuggled(),
    POST + b"Content-Length: 99999999999999999999\r\n\r\n" + smuggled(),
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + smuggled(),
    POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + smuggled(),
    POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + smuggled(),
    POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + smuggled(),
    POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + smuggled(),
    POST + b'Transfer-Encoding: chunked\r\n\r\n5;a="\r\n"\r\nabcde\r\n0\r\n\r\n' + smuggled(),
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + smuggled(),
    POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + smuggled(),
]


@pytest.mark.parametrize("request_bytes", SMUGGLING, ids=repr)
def test_a_request_whose_end_is_in_doubt_hides_no_other(locked: str, request_bytes: bytes) -> None:
    told = raw.exchange(locked, request_bytes)
    assert raw.status_of(told) in (0, 400, 413)
    assert b"Traceback" not in told and b"HTTP/1.1 5" not in told
    assert b'"scripted"' not in told, "the second request was not answered"


def test_requests_in_a_row_are_each_locked(locked: str, engine: ScriptedEngine) -> None:
    """A key opens for its own request, and not for the next one on the connection."""
    keyed = raw.post_bytes(COMPLETIONS, PROMPT, KEY.decode())
    keyless = raw.post_bytes(COMPLETIONS, PROMPT)
    before = len(engine.submitted)
    told = raw.exchange(locked, keyed + keyless, num_answers=2)
    assert told.count(b"HTTP/1.1 200") == 1 and told.count(b"HTTP/1.1 401") == 1
    assert len(engine.submitted) == before + 1


def test_what_is_no_http_is_told_so_in_the_usual_shape(locked: str) -> None:
    told = raw.exchange(locked, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert raw.status_of(told) == 400
    assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_a_huge_request_line_is_refused(locked: str) -> None:
    told = raw.exchange(locked, b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 40_000))
    assert raw.status_of(told) == 431


# The names of a server that this machine alone reaches, and that has no keys.


@pytest.mark.parametrize(
    "host", [b"localhost", b"LOCALHOST:8000", b"127.0.0.1:80", b"127.1.2.3", b"[::1]:8000", b"localhost."]
)
def test_its_own_names_are_answered(open_to_all: str, host: bytes) -> None:
    assert raw.status_of(raw.exchange(open_to_all, b"GET /v1/models HTTP/1.0\r\nHost: %b\r\n\r\n" % host)) == 200


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"127.0.0.1.evil.example", b"0.0.0.0",
        b"[::]", b"192.168.0.1", b"localhost@evil.example", b"evil.example#localhost", b"", b"\xff",
    ],
)  # fmt: skip
def test_names_that_lead_here_from_elsewhere_are_not(open_to_all: str, host: bytes) -> None:
    told = raw.exchange(open_to_all, b"GET /v1/models HTTP/1.1\r\nHost: %b\r\n\r\n" % host)
    assert raw.status_of(told) in (400, 421)
    assert b"Traceback" not in told


def test_the_refusal_says_what_to_do() -> None:
    response = request(ScriptedEngine(), "GET", "/v1/models", headers={"host": "evil.example"})
    assert response.status_code == 421
    assert "--allowed-host" in error_of(response)["message"]


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_host": ["Weft.Internal"]},
        {"api_key": ["k"]},
        {"host": "0.0.0.0", "insecure": True},
        {"insecure": True},
    ],
)
def test_other_names_where_they_are_safe_or_wanted(settings: dict[str, object]) -> None:
    headers = {"host": "weft.internal:8000", "x-api-key": "k"}
    assert request(ScriptedEngine(), "GET", "/v1/models", load(settings, env={}), headers=headers).status_code == 200
