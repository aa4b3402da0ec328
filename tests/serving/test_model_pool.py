"""Several models by name: loaded when they are asked for, once, and unloaded when they must make room."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests import virtual_time
from tests.api.http import error_of
from tests.api.scripted_engine import PAINTER, ScriptedEngine, answer, forever
from tests.serving.model_pools import ScriptedRoster, ServedPool, entry, run, served_pool
from tests.waiting import until
from weft.api.app import admission_app
from weft.backends.contract import Health, Need
from weft.errors import ModelError, OutOfMemory
from weft.serving import model_slot as slots
from weft.serving.rate_limits import Accounts
from weft.types import Output

GIB = 1 << 30
ENDLESS = [Output(text="Hel", token_ids=[1, 2]), forever]


def test_every_model_answers_by_its_name_and_is_loaded_when_it_is_asked_for() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            assert opened.states() == {"a": "unloaded", "b": "unloaded"}
            assert await opened.said("b") == "I am b"
            assert opened.states() == {"a": "unloaded", "b": "loaded"}
            assert await opened.said("a") == "I am a"
            assert await opened.said("a") == "I am a"
            assert opened.roster.started == ["b", "a"]
            missing = await opened.ask("c")
            assert missing.status_code == 404 and "a, b" in error_of(missing)["message"]
        assert all(engine.closed for engine in opened.roster.engines.values())

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [104, 105]}),
    ],
)
def test_every_endpoint_finds_the_model(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            assert (await opened.client.post(path, json={"model": "b", **body})).status_code == 200
            assert opened.roster.started == ["b"]
            assert (await opened.client.post(path, json={"model": "c", **body})).status_code == 404
            # What is wrong by itself loads nothing.
            assert (await opened.client.post(path, json={"model": "a", "nonsense": 1, **body})).status_code == 400
            assert opened.roster.started == ["b"]

    run(scenario)


def test_an_adapter_s_name_leads_to_its_model() -> None:
    def prepare(roster: ScriptedRoster) -> None:
        roster.entries["b"] = entry("b", roster.config, adapters={"legal": "/loras/legal"})

    async def scenario() -> None:
        async with served_pool("a", "b", prepare=prepare) as opened:
            pool = opened.admission.pool
            assert pool.find("legal").name == pool.find("b:legal").name == "b"
            assert pool.find(None).name == "a"
            assert (await opened.ask("b:none")).status_code == 404
            assert not opened.roster.started

    run(scenario)


def test_what_draws_is_found_beside_its_model() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            start = opened.roster.start

            async def with_painter(*arguments: Any) -> ScriptedEngine:
                engine: Any = await start(*arguments)
                engine.model = replace(engine.model, images=PAINTER)
                return engine  # type: ignore[no-any-return]

            opened.roster.start = with_painter  # type: ignore[method-assign]
            await opened.admission.pool.load(opened.slot("b"))
            for body in ({"prompt": "x"}, {"prompt": "x", "model": "painter"}):
                assert (await opened.client.post("/v1/images/generations", json=body)).status_code == 200
            assert opened.states() == {"a": "unloaded", "b": "loaded"}

    run(scenario)


def test_ten_requests_start_a_model_once() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            opened.roster.pauses["a"] = asyncio.Event()
            herd = [asyncio.create_task(opened.said("a")) for _ in range(10)]
            await until(lambda: opened.slot("a").num_claims == 10 and opened.states()["a"] == "loading")
            assert await opened.said("b") == "I am b"
            opened.roster.pauses["a"].set()
            assert await asyncio.gather(*herd) == ["I am a"] * 10
            assert opened.roster.started == ["a", "b"]

    run(scenario)


def test_who_waits_too_long_or_behind_too_many_is_told_when_to_come_again() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", model_wait_s=0.1, max_waiting_per_model=2) as opened:
            opened.roster.pauses["a"] = asyncio.Event()
            answers = await asyncio.gather(*(opened.ask("a") for _ in range(3)))
            assert [response.status_code for response in answers] == [503] * 3
            assert all(int(response.headers["retry-after"]) >= 1 for response in answers)
            said = [error_of(response)["message"] for response in answers]
            assert "2 requests wait for it already" in said[2]
            assert "not loaded after 0.1 s (load)" in said[0]
            # The load went on.
            opened.roster.pauses["a"].set()
            await until(lambda: opened.states()["a"] == "loaded")
            assert await opened.said("a") == "I am a"
            assert opened.roster.started == ["a"]

    run(scenario)


def test_a_load_that_is_known_to_take_long_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with served_pool("a", model_wait_s=0.2) as opened:
            opened.roster.pauses["a"] = asyncio.Event()
            asyncio.get_running_loop().call_later(0.4, opened.roster.pauses["a"].set)
            await opened.ask("a")
            await until(lambda: opened.states()["a"] == "loaded")
            await opened.slot("a").unload()
            began = asyncio.get_running_loop().time()
            refused = await opened.ask("a")
            assert refused.status_code == 503 and "longer than a request may wait" in error_of(refused)["message"]
            assert asyncio.get_running_loop().time() == began

    run(scenario)


def test_who_hangs_up_waits_no_more() -> None:
    async def scenario() -> None:
        async with served_pool("a", max_loaded_models=1) as opened:
            opened.roster.pauses["a"] = asyncio.Event()
            waiting = asyncio.create_task(opened.ask("a"))
            await until(lambda: opened.slot("a").num_claims == 1)
            opened.admission.abort()
            assert (await waiting).status_code == 503
            assert opened.slot("a").num_claims == 0

    run(scenario)


def test_a_failed_load_says_why_is_not_tried_at_once_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "BACKOFF_S", 0.3)

    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            opened.roster.faults["b"] = ModelError("The tokenizer is missing.")
            assert await opened.said("a") == "I am a"
            for _ in range(3):
                failed = await opened.ask("b")
                assert failed.status_code == 503 and failed.headers["retry-after"] == "1"
                assert "'b' could not be loaded: The tokenizer is missing." in error_of(failed)["message"]
            assert opened.roster.started == ["a", "b"]
            assert opened.states() == {"a": "loaded", "b": "failed"}
            health = await opened.client.get("/health")
            assert health.status_code == 200
            assert health.json()["troubles"] == {"b": "failed: The tokenizer is missing."}
            assert await opened.said("a") == "I am a"
            opened.roster.faults.clear()
            await virtual_time.sleep(0.3)
            assert await opened.said("b") == "I am b"

    run(scenario)


def test_paths_in_a_reason_are_the_operator_s_alone() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", admin_key=["root"]) as opened:
            opened.roster.faults["b"] = ModelError("/secret/models/b: a shard is missing.")
            told = error_of(await opened.ask("b"))["message"]
            assert "'b' could not be loaded" in told and "secret" not in told
            listed = await opened.client.get("/v1/models")
            assert "secret" not in listed.text
            seen = await opened.client.get("/admin/models", headers={"x-api-key": "root"})
            assert "/secret/models/b: a shard is missing." in seen.text

    run(scenario)


def test_the_model_not_used_for_longest_makes_room() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", "c", max_loaded_models=2) as opened:
            for name in ("a", "b", "a", "c"):
                await opened.said(name)
                await virtual_time.sleep(1)
            assert opened.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
            assert opened.roster.engines["b"].closed and not opened.roster.engines["a"].closed

    run(scenario)


def test_a_busy_model_is_never_unloaded_and_the_new_one_waits() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", max_loaded_models=1, model_wait_s=0.3) as opened:
            ended = asyncio.Event()
            opened.roster.scripts["a"] = [Output(text="x", token_ids=[1]), ended.wait, *answer("y")]
            busy = asyncio.create_task(opened.said("a"))
            await until(lambda: opened.slot("a").num_inside == 1)
            refused = await opened.ask("b")
            assert refused.status_code == 503 and "waiting for room" in error_of(refused)["message"]
            assert "retry-after" in refused.headers
            # Nobody waits for it now, so that it does not take a's place when that is idle.
            await until(lambda: opened.states()["b"] == "unloaded")
            waiting = asyncio.create_task(opened.said("b"))
            await until(lambda: opened.slot("b").waits_for_memory)
            ended.set()
            assert await busy == "xy"
            assert await waiting == "I am b"
            assert opened.states() == {"a": "unloaded", "b": "loaded"}

    run(scenario)


def test_models_that_take_turns_all_get_their_turn() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", max_loaded_models=1) as opened:
            said = await asyncio.gather(*(opened.said(name) for name in "abababab"))
            assert said == [f"I am {name}" for name in "abababab"]

    run(scenario)


def test_memory_is_kept_by_the_plan_and_by_what_was_measured() -> None:
    def prepare(roster: ScriptedRoster) -> None:
        roster.memory_limit = 10 * GIB
        roster.needs = {"a": Need(num_bytes=4 * GIB), "b": Need(num_bytes=5 * GIB), "c": Need(num_bytes=11 * GIB)}

    async def scenario() -> None:
        async with served_pool("a", "b", "c", "d", prepare=prepare) as opened:
            await opened.said("a")
            await opened.said("b")
            opened.roster.needs["d"] = Need(num_bytes=5 * GIB)
            await opened.said("d")
            assert opened.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded", "d": "loaded"}
            too_large = await opened.ask("c")
            assert too_large.status_code == 503 and "--max-models-memory" in error_of(too_large)["message"]
            assert opened.states()["b"] == "loaded"

    run(scenario)


def test_without_a_limit_it_is_the_machine_that_is_full() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", "c") as opened:
            opened.roster.needs = {name: Need(num_bytes=GIB) for name in "abc"}
            await opened.said("a")
            await opened.said("b")
            opened.roster.needs["c"] = Need(num_bytes=GIB, problem="1 GiB is wanted and 0.5 GiB is free.")
            waiting = asyncio.create_task(opened.said("c"))
            await until(lambda: opened.states() == {"a": "unloaded", "b": "unloaded", "c": "loaded"})
            assert await waiting == "I am c"

    run(scenario)


def test_a_load_that_runs_out_of_memory_unloads_idle_models_and_goes_on() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            await opened.said("a")
            opened.roster.faults["b"] = OutOfMemory("There is no more.")
            failed = await opened.ask("b")
            assert failed.status_code == 503
            assert opened.states() == {"a": "unloaded", "b": "failed"}
            assert opened.roster.started == ["a", "b", "b"]

    run(scenario)


def test_a_model_whose_next_engine_takes_over_does_not_make_room_by_going_itself() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            await opened.said("a")
            assert not await opened.roster.make_room["a"]("1 GiB is missing")
            await opened.said("b")
            assert await opened.roster.make_room["a"]("1 GiB is missing")
            assert opened.states() == {"a": "loaded", "b": "unloaded"}

    run(scenario)


def test_the_house_is_ready_when_what_it_preloads_is() -> None:
    def prepare(roster: ScriptedRoster) -> None:
        roster.entries["a"] = replace(roster.entries["a"], preload=True)
        roster.pauses["a"] = asyncio.Event()

    async def scenario() -> None:
        async with served_pool("a", "b", prepare=prepare) as opened:
            assert (await opened.client.get("/health")).status_code == 503
            # It serves others meanwhile.
            assert await opened.said("b") == "I am b"
            opened.roster.pauses["a"].set()
            await until(lambda: opened.admission.health().ready)
            opened.roster.engines["a"].state = Health(False, "restarting")
            told = await opened.client.get("/health")
            assert told.status_code == 200 and told.json()["troubles"] == {"a": "restarting"}
            opened.roster.engines["b"].state = Health(False, "failed")
            told = await opened.client.get("/health")
            assert told.status_code == 503 and "a: restarting; b: failed" in error_of(told)["message"]

    run(scenario)


def test_a_preloaded_model_that_fails_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "BACKOFF_S", 0.1)

    def prepare(roster: ScriptedRoster) -> None:
        roster.entries["a"] = replace(roster.entries["a"], preload=True)
        roster.faults["a"] = ModelError("It is damaged.")

    async def scenario() -> None:
        async with served_pool("a", "b", prepare=prepare) as opened:
            assert opened.admission.health().ready
            assert await opened.said("b") == "I am b"
            opened.roster.faults.clear()
            # Nobody asks for it, and still it is tried again.
            await until(lambda: opened.states()["a"] == "loaded")

    run(scenario)


def test_a_model_that_is_only_checked_is_never_loaded() -> None:
    def prepare(roster: ScriptedRoster) -> None:
        roster.entries["a"] = replace(roster.entries["a"], load_mode="check_only")

    async def scenario() -> None:
        async with served_pool("a", "b", prepare=prepare) as opened:
            refused = await opened.ask("a")
            assert refused.status_code == 503 and "check_only" in error_of(refused)["message"]
            assert not opened.roster.started

    run(scenario)


def test_the_list_and_the_metrics_tell_of_all() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", "c") as opened:
            opened.roster.faults["c"] = ModelError("It is damaged.")
            await opened.said("a")
            await opened.said("b")
            await opened.ask("c")
            await opened.slot("b").unload()
            cards = {card["id"]: card for card in (await opened.client.get("/v1/models")).json()["data"]}
            assert {name: card["state"] for name, card in cards.items()} == {
                "a": "loaded", "b": "unloaded", "c": "failed",
            }  # fmt: skip
            assert cards["c"]["why"] == "It is damaged." and "why" not in cards["b"]
            assert cards["a"]["max_model_len"] == 1000
            assert (await opened.client.get("/v1/models/b")).json() == cards["b"]
            await opened.said("b")
            lines = (await opened.client.get("/metrics")).text.splitlines()
            types = [line for line in lines if line.startswith("# TYPE")]
            assert len(types) == len(set(types))
            for line in (
                'weft_generation_tokens_total{model_name="a"} 8.0',
                'weft_generation_tokens_total{model_name="b"} 8.0',
                'weft_model_loaded{model_name="c"} 0.0',
                'weft_model_loads_total{model_name="b"} 2.0',
                'weft_model_load_failures_total{model_name="c"} 1.0',
                'weft_model_unloads_total{model_name="b"} 1.0',
            ):
                assert line in lines

    run(scenario)


def keyed(opened: ServedPool, key: str) -> ServedPool:
    """The same served_pool, asked with another key."""
    transport = httpx.ASGITransport(admission_app(opened.admission))
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers={"x-api-key": key})
    return ServedPool(opened.admission, opened.roster, client)


def test_one_key_cannot_keep_the_models_of_others_out() -> None:
    """It takes turns with three models where two fit: its own are unloaded for it, and another tenant's stays."""

    async def scenario() -> None:
        async with served_pool("a", "b", "c", "d", max_loaded_models=3, api_key=["quiet", "loud"]) as opened:
            quiet, loud = keyed(opened, "quiet"), keyed(opened, "loud")
            assert await quiet.said("a") == "I am a"
            for name in "bcdbcd":
                assert await loud.said(name) == f"I am {name}"
                assert await loud.said("a") == "I am a", "its use of it makes no difference"
            assert opened.roster.started.count("a") == 1 and len(opened.roster.started) > 4

    run(scenario)


def test_one_key_cannot_have_models_loaded_all_the_time() -> None:
    async def scenario() -> None:
        limits = {"max_loaded_models": 1, "max_model_loads_per_minute_per_key": 3, "api_key": ["quiet", "loud"]}
        async with served_pool("a", "b", **limits) as opened:
            quiet, loud = keyed(opened, "quiet"), keyed(opened, "loud")
            opened.admission._accounts = Accounts(opened.admission.config.limits, virtual_time.now)
            for name in "aba":
                assert await loud.said(name) == f"I am {name}"
            refused = await loud.ask("b")
            assert refused.status_code == 429 and refused.headers["retry-after"] == "20"
            assert "--max-model-loads-per-minute-per-key" in error_of(refused)["message"]
            assert await loud.said("a") == "I am a", "it is loaded"
            assert await quiet.said("b") == "I am b"
            await virtual_time.sleep(20)
            assert await loud.said("a") == "I am a"
            assert opened.slot("b").num_claims == opened.slot("a").num_claims == 0

    run(scenario)


def give_up(opened: ServedPool, *names: str) -> None:
    for name in names:
        opened.roster.engines[name].state = Health(False, "failed")


def test_a_model_whose_engine_has_given_up_is_loaded_again_and_ends_no_other() -> None:
    async def scenario() -> None:
        async with served_pool("a", "b") as opened:
            for name in "ab":
                assert await opened.said(name) == f"I am {name}"
            give_up(opened, "b")
            await until(lambda: opened.states() == {"a": "loaded", "b": "failed"}, "the end of b")
            failed = await opened.ask("b")
            assert failed.status_code == 503 and "was given up" in error_of(failed)["message"]
            assert await opened.said("a") == "I am a" and not opened.admission.pool.lost.is_set()
            await virtual_time.sleep(slots.BACKOFF_S)
            assert await opened.said("b") == "I am b"
            give_up(opened, "b")
            await until(lambda: opened.states()["b"] == "failed", "the end of b")
            await virtual_time.sleep(slots.BACKOFF_S)
            assert (await opened.ask("b")).status_code == 503, "it waits for longer than before"
            await virtual_time.sleep(slots.BACKOFF_S)
            assert await opened.said("b") == "I am b"

    run(scenario)


@pytest.mark.parametrize("keep", [False, True])
def test_the_server_ends_when_no_model_is_left_unless_it_is_to_go_on(keep: bool) -> None:
    async def scenario() -> None:
        async with served_pool("a", "b", keep_serving_without_engine=keep) as opened:
            assert await opened.said("a") == "I am a"
            opened.roster.faults["b"] = ModelError("It is damaged.")
            assert (await opened.ask("b")).status_code == 503
            assert not opened.admission.pool.lost.is_set()
            give_up(opened, "a")
            await opened.looks_twice()
            await opened.looks_twice()
            assert opened.admission.pool.lost.is_set() != keep

    run(scenario)


def test_an_engine_that_is_unwell_for_a_moment_ends_nothing() -> None:
    async def scenario() -> None:
        async with served_pool("a") as opened:
            assert await opened.said("a") == "I am a"
            before = opened.roster.num_looks
            give_up(opened, "a")
            await until(lambda: opened.roster.num_looks > before, "a look")
            opened.roster.engines["a"].state = Health(True)
            await opened.looks_twice()
            assert opened.states() == {"a": "loaded"} and not opened.admission.pool.lost.is_set()

    run(scenario)
