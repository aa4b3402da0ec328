"""A model pool whose file changes, and an operator who loads and unloads."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import httpx
import pytest
from msgspec.structs import replace
from starlette.types import Message

from tests.api.grpc.calls import Client, answer_to, ask, text_of
from tests.api.http import error_of
from tests.api.scripted_engine import answer, forever
from tests.serving.model_pools import ScriptedRoster, ServedPool, entry, run, served_pool
from tests.waiting import until
from weft.api.app import admission_app
from weft.api.grpc.grpc_server import serve_rpc
from weft.backends.contract import cannot
from weft.errors import ModelError
from weft.serving import model_pool
from weft.types import ControlMessage, Output

ADMIN = {"x-api-key": "root"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "WATCH_S", 0.02)


def with_length(opened: ServedPool, name: str, length: int) -> Any:
    before = opened.roster.entries[name]
    return replace(before, config=replace(before.config, model=replace(before.config.model, max_model_len=length)))


async def admin(opened: ServedPool, what: str, **body: str) -> httpx.Response:
    return await opened.client.post(f"/admin/models/{what}", json=body, headers=ADMIN)


def test_new_names_appear_and_removed_ones_drain_and_go() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            ended = asyncio.Event()
            opened.roster.scripts["a"] = [Output(text="x", token_ids=[1]), ended.wait, *answer("y")]
            inside = asyncio.create_task(opened.said("a"))
            await until(lambda: bool(opened.roster.engines) and opened.slot("a").num_inside == 1)
            going = opened.slot("a")
            opened.roster.next = {"b": opened.roster.entries["b"], "c": entry("c", opened.roster.config)}
            await until(lambda: opened.states().keys() == {"b", "c"})
            assert (await opened.ask("a")).status_code == 404
            assert await opened.said("c") == "I am c"
            assert going.state == "unloading"
            assert 'model_name="a"' in (await opened.client.get("/metrics")).text
            ended.set()
            assert await inside == "xy"
            await until(lambda: opened.roster.engines["a"].closed)
            assert 'model_name="a"' not in (await opened.client.get("/metrics")).text

    run(scenario)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_server_that_ends_ends_the_models_that_are_going_too(has_begun: bool) -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            opened.roster.scripts["a"] = [Output(text="x", token_ids=[1]), forever]
            inside = asyncio.create_task(opened.ask("a"))
            await until(lambda: "a" in opened.roster.engines and opened.slot("a").num_inside == 1)
            going = opened.slot("a")
            opened.roster.next = {"b": opened.roster.entries["b"]}
            opened.admission.pool.reload()
            if has_begun:
                await until(lambda: going.state == "unloading")
            await opened.admission.close()
            assert opened.roster.engines["a"].closed and going.state == "unloaded"
            inside.cancel()
            await asyncio.wait({inside})

    run(scenario)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_a_model_that_goes_while_the_server_starts_keeps_nobody_out(gone: str) -> None:
    def prepare(roster: ScriptedRoster) -> None:
        for name in ("a", "b"):
            roster.entries[name] = replace(roster.entries[name], preload=True)
        roster.pauses["a"] = asyncio.Event()

    async def scenario() -> None:
        async with served_pool("a", "b", "c", prepare=prepare) as opened:
            assert opened.roster.started == ["a"]
            opened.roster.next = {name: found for name, found in opened.roster.entries.items() if name != gone}
            await until(lambda: gone not in opened.states())
            opened.roster.pauses["a"].set()
            await until(lambda: opened.admission.pool.health().ready)
            assert opened.roster.started == (["a"] if gone == "b" else ["a", "b"])
            assert await opened.said("c") == "I am c"
            await until(lambda: gone == "b" or opened.roster.engines["a"].closed)

    run(scenario)


def test_a_model_that_goes_while_it_is_loaded_anew_is_not_loaded() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            await opened.said("a")
            ended = asyncio.Event()
            engine = opened.roster.engines["a"]
            close = engine.close

            async def slowly() -> None:
                await ended.wait()
                await close()

            engine.close = slowly  # type: ignore[method-assign]
            going = opened.slot("a")
            opened.roster.next = {**opened.roster.entries, "a": with_length(opened, "a", 77)}
            await until(lambda: going.state == "unloading")
            opened.roster.next = {"b": opened.roster.entries["b"]}
            await until(lambda: going.is_gone)
            ended.set()
            await until(lambda: going.state != "unloading")
            await opened.looks_twice()
            assert opened.roster.started == ["a"] and going.state == "unloaded"

    run(scenario)


def test_what_has_changed_is_loaded_anew_when_it_is_idle_and_the_rest_stays() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            await opened.said("b")
            ended = asyncio.Event()
            opened.roster.scripts["a"] = [Output(text="x", token_ids=[1]), ended.wait, *answer("y")]
            inside = asyncio.create_task(opened.said("a"))
            await until(lambda: "a" in opened.roster.engines and opened.slot("a").num_inside == 1)
            # A line that moves changes nothing.
            moved = replace(opened.roster.entries["b"], place="models.toml:9")
            opened.roster.next = {"a": with_length(opened, "a", 77), "b": moved}
            await until(lambda: opened.slot("a").is_outdated)
            await opened.looks_twice()
            assert opened.roster.started == ["b", "a"]
            ended.set()
            assert await inside == "xy"
            await until(lambda: opened.roster.started == ["b", "a", "a"])
            assert opened.slot("a").entry.config.model.max_model_len == 77

    run(scenario)


def test_a_changed_entry_forgives_a_failure() -> None:
    async def scenario() -> None:
        async with served_pool("a") as opened:
            opened.roster.faults["a"] = ModelError("It is damaged.")
            assert (await opened.ask("a")).status_code == 503
            opened.roster.faults.clear()
            opened.roster.next = {"a": with_length(opened, "a", 77)}
            await until(lambda: opened.states()["a"] == "unloaded")
            assert await opened.said("a") == "I am a"

    run(scenario)


def test_the_operator_loads_unloads_and_reloads() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", admin_key=["root"]) as opened:
            loaded = await admin(opened, "load", model="b")
            assert loaded.json()["state"] == "loaded" and loaded.json()["engine"] == "scripted"
            listed = (await opened.client.get("/admin/models", headers=ADMIN)).json()["models"]
            assert [(model["name"], model["state"]) for model in listed] == [("a", "unloaded"), ("b", "loaded")]
            assert (await admin(opened, "unload", model="b")).json()["state"] == "unloaded"
            assert opened.roster.engines["b"].closed
            # An unloaded model is not a lost one.
            assert await opened.said("b") == "I am b"
            assert (await admin(opened, "reload", model="b")).json()["state"] == "loaded"
            assert opened.roster.started == ["b", "b", "b"]
            assert (await admin(opened, "load", model="c")).status_code == 404
            assert (await admin(opened, "load")).status_code == 404
            opened.roster.is_broken = True
            broken = await admin(opened, "reload")
            assert broken.status_code == 409 and "models.toml:3" in error_of(broken)["message"]
            opened.roster.is_broken = False
            opened.roster.next = {"b": opened.roster.entries["b"]}
            assert len((await admin(opened, "reload")).json()["models"]) == 1

    run(scenario)


def test_an_operator_who_hangs_up_before_naming_a_model_reloads_none() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", admin_key=["root"]) as opened:
            opened.roster.is_broken = True  # Were it reloaded, the answer would be a conflict.
            sent: list[Message] = []

            async def hung_up() -> Message:
                return {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                sent.append(message)

            path = "/admin/models/reload"
            scope = {
                "type": "http", "http_version": "1.1", "method": "POST",
                "path": path, "raw_path": path.encode(), "query_string": b"",
                "headers": [
                    (b"host", b"localhost"), (b"x-api-key", b"root"), (b"content-length", b"13"),
                    (b"content-type", b"application/json"),
                ],
            }  # fmt: skip
            await admission_app(opened.admission)(scope, hung_up, send)
            assert sent[0]["status"] == 200

    run(scenario)


def test_the_operator_s_load_does_not_wait_for_the_back_off() -> None:
    async def scenario() -> None:
        async with served_pool("a", admin_key=["root"]) as opened:
            opened.roster.faults["a"] = ModelError("It is damaged.")
            assert (await admin(opened, "load", model="a")).status_code == 503
            opened.roster.faults.clear()
            assert (await opened.ask("a")).status_code == 503
            assert (await admin(opened, "load", model="a")).json()["state"] == "loaded"

    run(scenario)


def test_caches_and_traces_are_of_the_model_that_is_named() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", admin_key=["root"], profile_dir="/traces") as opened:
            await opened.said("a")
            await opened.said("b")
            post = opened.client.post
            assert (await post("/admin/cache/reset", headers=ADMIN)).json() == {"forgotten_blocks": 14}
            assert (await post("/admin/cache/reset?model=b", headers=ADMIN)).json() == {"forgotten_blocks": 7}
            assert (await post("/admin/profile/start?model=b", headers=ADMIN)).status_code == 200
            assert opened.roster.engines["b"].profiling and not opened.roster.engines["a"].profiling
            await opened.slot("b").unload()
            assert (await post("/admin/profile/stop?model=b", headers=ADMIN)).status_code == 503

    run(scenario)


def test_one_model_that_cannot_forget_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", "c", admin_key=["root"]) as opened:
            for name in ("a", "b", "c"):
                await opened.said(name)

            async def control(message: ControlMessage) -> str:
                raise cannot("remote", "reset its peer's cache")

            monkeypatch.setattr(opened.roster.engines["b"], "control", control)
            told = await opened.client.post("/admin/cache/reset", headers=ADMIN)
            reason = "The engine remote cannot reset its peer's cache. `weft engines` lists those that there are."
            assert told.status_code == 200
            assert told.json() == {"forgotten_blocks": 14, "refused": {"b": reason}}
            assert [opened.roster.engines[name].cache_resets for name in ("a", "c")] == [1, 1]
            named = await opened.client.post("/admin/cache/reset?model=b", headers=ADMIN)
            assert named.status_code == 501 and "cannot reset" in error_of(named)["message"]

    run(scenario)


def test_grpc_names_models_and_obeys_the_operator_alone() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", api_key=["user"], admin_key=["root"], grpc_port=0) as opened:
            server = await serve_rpc(opened.admission, opened.admission.config)
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                    user, operator = Client(channel, "user"), Client(channel, "root")
                    assert text_of(await answer_to(user, ask(model_id="b"))) == "I am b"
                    assert text_of(await answer_to(user, ask(model_id="default"))) == "I am a"
                    listed = await user.control("list_models")
                    assert dict(listed.payload) == {"status": "ok", "models": "a,b", "loaded": "a,b"}
                    for command in ("load_model", "unload_model", "reload_registry"):
                        refused = await user.control(command, payload={"model_id": "b"})
                        assert refused.payload["status"] == "error" and "--admin-key" in refused.payload["message"]
                    gone = await operator.control("unload_model", payload={"model_id": "b"})
                    assert dict(gone.payload) == {"status": "ok", "state": "unloaded"}
                    assert opened.roster.engines["b"].closed
                    back = await operator.control("load_model", payload={"model_id": "b"})
                    assert back.payload["state"] == "loaded"
                    opened.roster.next = {"b": opened.roster.entries["b"]}
                    assert (await operator.control("reload_registry")).payload["models"] == "b"
                    figures = (await user.health()).metrics
                    assert figures["state"] == "ready" and figures["generation_tokens"] in ("8", "16")
            finally:
                await server.stop(0)

    asyncio.run(scenario())
