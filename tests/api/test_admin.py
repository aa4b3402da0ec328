"""The operator's routes: nobody else's key opens them, and each does what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from starlette.routing import Route

from tests.api.grpc.calls import Client, ask, failed, served
from tests.api.http import CHAT, HELLO, error_of, request
from tests.api.scripted_engine import PAINTER, ScriptedEngine, answer, forever
from tests.waiting import PATIENCE, until
from weft.api.app import admission_app, build_app
from weft.config import load
from weft.options import Config
from weft.serving.admission import Admission
from weft.types import Output

ADMIN = {"authorization": "Bearer root"}
USER = {"authorization": "Bearer user"}
CONFIG = load({"api_key": ["user"], "admin_key": ["root"]}, env={})
ENDLESS = [Output(text="Hel", token_ids=[1, 2]), forever]

Scenario = Callable[[httpx.AsyncClient, Admission, ScriptedEngine], Awaitable[None]]


def admin_paths() -> list[tuple[str, str]]:
    routes = [route for route in build_app(ScriptedEngine(), CONFIG).routes if isinstance(route, Route)]
    found = [(m, r.path) for r in routes for m in r.methods or () if r.path.startswith("/admin") and m != "HEAD"]
    assert len(found) == 16
    return found


def run(scenario: Scenario, script: Any = ENDLESS, config: Config = CONFIG) -> None:
    async def go() -> None:
        engine = ScriptedEngine(script)
        admission = Admission(config)
        admission.open(engine)
        transport = httpx.ASGITransport(admission_app(admission))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE) as client:
            await scenario(client, admission, engine)

    asyncio.run(go())


async def asked(client: httpx.AsyncClient, engine: ScriptedEngine, **headers: str) -> asyncio.Task[httpx.Response]:
    """A request that the engine is at work on."""
    before = len(engine.submitted)
    task = asyncio.create_task(client.post(CHAT, json=HELLO, headers=USER | headers))
    await until(lambda: len(engine.submitted) > before)
    return task


def test_no_other_key_opens_any_of_them() -> None:
    engine = ScriptedEngine()
    for method, path in admin_paths():
        assert request(engine, method, path, CONFIG).status_code == 401, path
        assert request(engine, method, path, CONFIG, headers={"x-api-key": "roo"}).status_code == 401, path
        refused = request(engine, method, path, CONFIG, headers=USER)
        assert refused.status_code == 403, path
        assert error_of(refused)["code"] == "permission_denied"
    assert engine.cache_resets == 0


@pytest.mark.parametrize("path", ["/admin", "/admin/", "/admin/none", "/admin//drain"])
def test_unknown_paths_below_it_are_closed_too(path: str) -> None:
    assert request(ScriptedEngine(), "POST", path, CONFIG, headers=USER).status_code == 403
    assert request(ScriptedEngine(), "POST", path, CONFIG, headers=ADMIN).status_code == 404


@pytest.mark.parametrize(
    "path", ["/ADMIN/drain", "//admin/drain", "/v1/../admin/drain", "/%61dmin/drain", "/admin/drain/"]
)
def test_no_spelling_goes_round_the_lock(path: str) -> None:
    status = request(ScriptedEngine(), "POST", path, CONFIG, headers=USER).status_code
    assert status in (403, 404)


def test_an_admin_key_opens_nothing_else() -> None:
    assert request(ScriptedEngine(), "POST", CHAT, CONFIG, json=HELLO, headers=ADMIN).status_code == 401


def test_without_an_admin_key_they_are_not_there() -> None:
    config = load({"api_key": ["user"]}, env={})
    for method, path in admin_paths():
        assert request(ScriptedEngine(), method, path, config).status_code == 401
        assert request(ScriptedEngine(), method, path, config, headers=USER).status_code == 404
        assert request(ScriptedEngine(), method, path).status_code == 404


def test_they_are_locked_even_where_everything_else_is_open() -> None:
    config = load({"admin_key": ["root"]}, env={})
    assert request(ScriptedEngine(), "POST", CHAT, config, json=HELLO).status_code == 200
    assert request(ScriptedEngine(), "POST", "/admin/drain", config).status_code == 401
    assert request(ScriptedEngine(), "POST", "/admin/drain", config, headers=ADMIN).status_code == 200


def test_admin_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("ops: from-file\n")
    config = load({"admin_key_file": str(file)}, env={})
    headers = {"x-api-key": "from-file"}
    assert request(ScriptedEngine(), "GET", "/admin/requests", config, headers=headers).status_code == 200


def test_drain_lets_nobody_in_and_those_inside_go_on() -> None:
    ended = asyncio.Event()

    async def scenario(client: httpx.AsyncClient, admission: Admission, engine: ScriptedEngine) -> None:
        running = await asked(client, engine)
        drained = await client.post("/admin/drain", headers=ADMIN)
        assert drained.json() == {"state": "draining", "open_requests": 1}
        health = await client.get("/health", headers=USER)
        assert health.status_code == 503 and "draining" in health.text
        refused = await client.post(CHAT, json=HELLO, headers=USER)
        assert refused.status_code == 503 and "no new requests" in refused.text
        assert refused.headers["retry-after"]
        assert not running.done()
        ended.set()
        assert (await running).status_code == 200
        assert (await client.post("/admin/resume", headers=ADMIN)).json()["state"] == "ready"
        assert (await client.post(CHAT, json=HELLO, headers=USER)).status_code == 200
        admission.drain()
        await client.post("/admin/drain", headers=ADMIN)
        assert (await client.post("/admin/resume", headers=ADMIN)).status_code == 409
        assert "shutting down" in (await client.post(CHAT, json=HELLO, headers=USER)).text

    run(scenario, [Output(text="a", token_ids=[1]), ended.wait, *answer("b")])


def test_draining_holds_over_grpc() -> None:
    async def scenario() -> None:
        async with served(ScriptedEngine(answer("x")), admin_key=["root"]) as opened:
            transport = httpx.ASGITransport(admission_app(opened.admission))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await client.post("/admin/drain", headers=ADMIN)
                _, code, _ = await failed(opened.predict([ask()]))
                assert code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


def test_open_requests_are_listed_without_what_they_say() -> None:
    async def scenario(client: httpx.AsyncClient, admission: Admission, engine: ScriptedEngine) -> None:
        began = time.monotonic()
        running = await asked(client, engine, **{"x-request-id": "mine-1"})
        await until(lambda: bool(admission.contexts()[0].num_tokens))
        text = (await client.get("/admin/requests", headers=ADMIN)).text
        assert HELLO["messages"][0]["content"] not in text
        [shown] = (await client.get("/admin/requests", headers=ADMIN)).json()["requests"]
        assert shown["request_id"] == "mine-1"
        assert shown["answer_id"].startswith("chatcmpl-")
        assert shown["tokens"] == 2
        assert 0 <= shown["age_s"] <= time.monotonic() - began + 0.001
        assert len(shown["tenant"]) == 8 and "user" not in shown["tenant"]
        running.cancel()
        await until(lambda: not admission.contexts())
        assert (await client.get("/admin/requests", headers=ADMIN)).json() == {"requests": []}

    run(scenario)


@pytest.mark.parametrize("by", ["request_id", "answer_id"])
def test_abort_ends_one_request_and_tells_its_client(by: str) -> None:
    async def scenario(client: httpx.AsyncClient, admission: Admission, engine: ScriptedEngine) -> None:
        doomed = await asked(client, engine, **{"x-request-id": "doomed"})
        spared = await asked(client, engine, **{"x-request-id": "spared"})
        [shown, _] = (await client.get("/admin/requests", headers=ADMIN)).json()["requests"]
        aborted = await client.post("/admin/abort", json={"request_id": shown[by]}, headers=ADMIN)
        assert aborted.json() == {"aborted": 1}
        response = await doomed
        assert response.status_code == 503
        assert "operator ended" in error_of(response)["message"]
        assert len(engine.open) == 1 and not spared.done()
        spared.cancel()

    run(scenario)


def test_abort_reaches_a_prediction_by_its_trace_id() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(ENDLESS)
        async with served(engine, admin_key=["root"]) as opened:
            call = Client(opened.channel).predict([ask(trace_id="trace-1")])
            await call.read()
            transport = httpx.ASGITransport(admission_app(opened.admission))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                told = await client.post("/admin/abort", json={"request_id": "trace-1"}, headers=ADMIN)
                assert told.json() == {"aborted": 1}
            _, code, details = await failed(call)
            assert code is grpc.StatusCode.UNAVAILABLE and "operator ended" in details
            assert not engine.open

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"request_id": "nobody"}, 404),
        ({}, 400),
        ({"request_id": 1}, 400),
        ({"id": "x"}, 400),
        ({"request_id": ""}, 400),
    ],
)
def test_abort_of_what_is_not_there(body: dict[str, Any], status: int) -> None:
    response = request(ScriptedEngine(), "POST", "/admin/abort", CONFIG, json=body, headers=ADMIN)
    assert response.status_code == status
    error_of(response)


def test_the_cache_is_reset_by_the_engine() -> None:
    engine = ScriptedEngine()
    response = request(engine, "POST", "/admin/cache/reset", CONFIG, headers=ADMIN)
    assert response.json() == {"forgotten_blocks": 7}
    assert engine.cache_resets == 1


def test_a_model_that_is_not_there_is_not_taken_for_the_one_that_is() -> None:
    engine = ScriptedEngine(images=PAINTER)
    for name, status in (("scripted", 200), (PAINTER.name, 200), ("other", 404)):
        response = request(engine, "POST", f"/admin/cache/reset?model={name}", CONFIG, headers=ADMIN)
        assert response.status_code == status
    assert engine.cache_resets == 2


def test_profiles(tmp_path: Path) -> None:
    config = load({"admin_key": ["root"], "profile_dir": str(tmp_path)}, env={})

    async def scenario(client: httpx.AsyncClient, admission: Admission, engine: ScriptedEngine) -> None:
        async def post(path: str) -> httpx.Response:
            return await client.post(f"/admin/profile/{path}", headers=ADMIN)

        assert (await post("stop")).status_code == 409
        assert (await post("start")).json() == {"file": f"{tmp_path}/trace.json"}
        again = await post("start")
        assert again.status_code == 409 and "already" in error_of(again)["message"]
        assert (await post("stop")).json() == {"file": f"{tmp_path}/trace.json"}

    run(scenario, config=config)
    refused = request(ScriptedEngine(), "POST", "/admin/profile/start", CONFIG, headers=ADMIN)
    assert refused.status_code == 409 and "--profile-dir" in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("load_path", "unload_path"),
    [("/admin/lora/load", "/admin/lora/unload"), ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")],
)
def test_adapters_come_and_go(load_path: str, unload_path: str) -> None:
    async def scenario(client: httpx.AsyncClient, admission: Admission, engine: ScriptedEngine) -> None:
        async def tell(path: str, key: dict[str, str] = ADMIN, **body: str) -> httpx.Response:
            return await client.post(path, json=body, headers=key)

        assert (await tell(load_path, USER, lora_name="red", lora_path="/red")).status_code == 403
        assert (await tell(load_path, {}, lora_name="red", lora_path="/red")).status_code == 401
        assert (await tell(load_path, lora_name="red")).status_code == 400
        refused = await tell(load_path, lora_name="red", lora_path="nowhere")
        assert refused.status_code == 400 and error_of(refused)["param"] == "lora_path"
        assert not engine.adapters
        loaded = await tell(load_path, lora_name="red", lora_path="/red")
        assert loaded.json() == {"adapters": ["red"]} and engine.adapters[0].path == "/red"
        assert (await client.post(CHAT, json=HELLO | {"model": "red"}, headers=USER)).status_code == 200
        assert (await tell(unload_path, USER, lora_name="red")).status_code == 403
        assert (await tell(unload_path, lora_name="blue")).status_code == 404
        assert (await tell(unload_path, lora_name="red")).json() == {"adapters": []}
        assert (await client.post(CHAT, json=HELLO | {"model": "red"}, headers=USER)).status_code == 404

    run(scenario, answer("a"))


def test_without_admin_keys_nobody_loads_adapters() -> None:
    engine = ScriptedEngine()
    body = {"lora_name": "red", "lora_path": "/red"}
    for path in ("/admin/lora/load", "/v1/load_lora_adapter"):
        assert request(engine, "POST", path, json=body).status_code == 404
    assert not engine.adapters


def test_keys_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one")
    config = load({"api_key_file": str(file), "admin_key": ["root"]}, env={})

    async def scenario(client: httpx.AsyncClient, admission: Admission, engine: ScriptedEngine) -> None:
        file.write_text("two\nthree")
        reloaded = await client.post("/admin/keys/reload", headers=ADMIN)
        assert reloaded.json() == {"keys": 2, "admin_keys": 1}
        file.write_text("a b c")
        broken = await client.post("/admin/keys/reload", headers=ADMIN)
        assert broken.status_code == 409 and "line 1" in error_of(broken)["message"]
        assert (await client.get("/v1/models", headers={"x-api-key": "two"})).status_code == 200

    run(scenario, config=config)


def test_the_only_model_is_unloaded_and_loaded_again() -> None:
    async def scenario(client: httpx.AsyncClient, admission: Admission, engine: ScriptedEngine) -> None:
        async def tell(what: str, **body: str) -> httpx.Response:
            return await client.post(f"/admin/models/{what}", json=body, headers=ADMIN)

        assert (await tell("unload")).status_code == 409, "nothing could load it again"
        engines: list[ScriptedEngine] = []

        async def start() -> ScriptedEngine:
            engines.append(ScriptedEngine())
            return engines[-1]

        admission.open(engine, start)
        assert (await tell("unload", model="other")).status_code == 404
        assert (await tell("unload")).json()["state"] == "unloaded" and engine.closed
        [card] = (await client.get("/v1/models", headers=USER)).json()["data"]
        assert (card["id"], card["state"]) == ("scripted", "unloaded")
        assert (await client.get("/health", headers=USER)).json() == {"status": "ready"}
        loaded = (await tell("load", model="scripted")).json()
        assert loaded["state"] == "loaded" and loaded["idle_s"] < PATIENCE
        assert (await tell("reload")).json()["state"] == "loaded" and len(engines) == 2
        await admission.close()

    run(scenario, answer("Hello"))
