"""Keys over HTTP: every route is closed without one, whatever the path looks like; only liveness is open."""

from __future__ import annotations

import hmac

import pytest
from starlette.routing import Route

from tests.api.http import CHAT, HELLO, request
from tests.api.scripted_engine import ScriptedEngine, answer
from weft.api.app import build_app
from weft.api.middleware import OPEN_PATHS
from weft.api.server import check_reach
from weft.config import load
from weft.errors import ConfigError
from weft.options import ServerOptions
from weft.serving.auth import Keys

CONFIG = load({"api_key": ["first", "second"]}, env={})


def engine() -> ScriptedEngine:
    return ScriptedEngine(answer("hello"))


@pytest.mark.parametrize(
    "header", [{"authorization": "Bearer second"}, {"x-api-key": "first"}, {"Authorization": "bearer first"}]
)
def test_a_key_opens(header: dict[str, str]) -> None:
    response = request(engine(), "POST", CHAT, CONFIG, json=HELLO, headers=header)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"authorization": "second"},
        {"authorization": "Basic second"},
        {"x-api-key": "firs"},
        {"x-api-key": "first "},
        {"cookie": "x-api-key=first"},
    ],
)
def test_without_one_it_is_401(header: dict[str, str]) -> None:
    response = request(engine(), "POST", CHAT, CONFIG, json=HELLO, headers=header)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_every_route_is_closed_but_liveness() -> None:
    routes = [route for route in build_app(engine(), CONFIG).routes if isinstance(route, Route)]
    assert len(routes) >= 8
    for route in routes:
        path = route.path.replace("{model_id:path}", "scripted")
        for method in route.methods or ():
            status = request(engine(), method, path, CONFIG).status_code
            assert (status == 401) == (path not in OPEN_PATHS), (method, path, status)


@pytest.mark.parametrize(
    "path",
    [
        "/health/live/",
        "/HEALTH/LIVE",
        "//health/live",
        "/health/live/../../v1/models",
        "/v1/models?/health/live",
        "/none",
    ],
)
def test_paths_that_only_look_open_are_closed(path: str) -> None:
    assert request(engine(), "GET", path, CONFIG, headers={"host": "health/live"}).status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="no API key"):
        check_reach(ServerOptions(host=host))
    check_reach(ServerOptions(host=host, api_key=["k"]))
    check_reach(ServerOptions(host=host, insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone_needs_none(host: str) -> None:
    check_reach(ServerOptions(host=host))


def test_a_key_is_compared_with_every_known_one_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As digests, the first that fits included: how long it takes tells nothing of any key."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys(["first", "second", "third"])
    for shown in ("first", "third", "f", ""):
        compared.clear()
        keys.owner([shown])
        assert len({other for _, other in compared}) == 3
        assert {len(digest) for pair in compared for digest in pair} == {32}
