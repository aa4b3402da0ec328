"""The client against an engine that the test plays itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import uvloop

from tests.engine.stand_in import StandIn, StandIns
from tests.waiting import PATIENCE, until
from weft.checkpoint.model_files import ModelFiles
from weft.config import load
from weft.engine.client import EngineClient
from weft.engine.wire import Started, StepOutput, Submit, frame
from weft.engine_stats import EngineStats
from weft.types import Event, FinishReason, Request, SamplingParams

FILES = ModelFiles(name="none", kind="gguf", path=Path("none.gguf"), weight_files=[])


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=10, seed=0))


@asynccontextmanager
async def client_of(launch: StandIns) -> AsyncIterator[EngineClient]:
    client = EngineClient(load(env={}), FILES, launch)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def submitted(engine: StandIn) -> list[Request]:
    message = await asyncio.to_thread(engine.inbox.get, timeout=PATIENCE)
    assert isinstance(message, Submit)
    return message.requests


def test_tokens_and_events_reach_their_requests_in_order() -> None:
    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            a, b = client.submit(request("a")), client.submit(request("b"))
            first = Event(request_id="a", token_ids=[10], cached_tokens=2)
            last = Event(request_id="a", token_ids=[13], finish=FinishReason.LENGTH)
            launch.launched[0].send(
                Started(["a", "b"]),
                StepOutput({"b": 20}, [first], EngineStats(generation_tokens=2)),
                StepOutput({"a": 11, "b": 21, "gone": 9}, [], EngineStats(generation_tokens=4)),
                StepOutput({"a": 12}, [], EngineStats(generation_tokens=5)),
                StepOutput({"b": 22}, [last], EngineStats(generation_tokens=7)),
            )
            await until(lambda: client.num_open == 1)
            assert a.take() == [first, 11, 12, last] and a.take() == []
            assert b.take() == [20, 21, 22]
            assert a.delivered == [10, 11, 12, 13] and b.delivered == [20, 21, 22]
            assert client.stats().generation_tokens == 7

    asyncio.run(scenario())


def test_a_listener_hears_of_every_arrival() -> None:
    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            entry = client.submit(request("a"))
            heard: list[object] = []
            entry.listener = lambda: heard.extend(entry.take())
            launch.launched[0].send(StepOutput({"a": 1}, [], EngineStats()), StepOutput({"a": 2}, [], EngineStats()))
            await until(lambda: heard == [1, 2])

    asyncio.run(scenario())


def test_a_client_that_is_closed_while_a_dead_engine_is_reaped_leaves_nothing_of_it() -> None:
    async def scenario() -> None:
        may_be_reaped = threading.Event()
        launch = StandIns(partial(StandIn, may_be_reaped))
        client = EngineClient(load(env={}), FILES, launch)
        await client.start()
        launch.launched[0].kill()
        await until(lambda: client.state == "restarting")
        closing = asyncio.create_task(client.close())
        await until(lambda: client.state == "closed")
        assert not closing.done()
        may_be_reaped.set()
        await closing
        assert launch.launched[0]._theirs.fileno() == -1

    asyncio.run(scenario())


def test_requests_that_come_while_a_dead_engine_is_reaped_are_served_by_the_next() -> None:
    async def scenario() -> None:
        may_be_reaped = threading.Event()
        launch = StandIns(partial(StandIn, may_be_reaped))
        async with client_of(launch) as client:
            old = client.submit(request("old"))
            await submitted(launch.launched[0])
            launch.launched[0].send(StepOutput({"old": 5}, [], EngineStats(generation_tokens=1)))
            await until(lambda: old.delivered)
            launch.launched[0].kill()
            await until(lambda: client.state == "restarting")
            client.submit(request("new"))
            client.submit(request("left"))
            client.abort("left")
            assert client.stats().generation_tokens == 1, "counters never fall"
            assert len(launch.launched) == 1
            may_be_reaped.set()
            await until(lambda: len(launch.launched) == 2 and client.state == "ready")
            # The old one was in the dead engine's steps: it comes back alone, and with what its user has.
            assert [(r.request_id, r.output_token_ids) for r in await submitted(launch.launched[1])] == [("old", [5])]
            launch.launched[1].send(StepOutput({"old": 6}, [], EngineStats(generation_tokens=1)))
            assert [r.request_id for r in await submitted(launch.launched[1])] == ["new"]
            assert client.stats().generation_tokens == 2

    # uvloop refuses to write to a connection that is closed, where asyncio only warns.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_an_engine_is_told_what_it_needs_and_no_keys() -> None:
    secrets = {
        **{name: ["a secret"] for name in ("api_key", "admin_key", "allowed_host", "adapter_root")},
        **dict.fromkeys(("api_key_file", "admin_key_file", "engine_api_key", "engine_url"), "a secret"),
        **dict.fromkeys(("grpc_tls_key", "otlp_endpoint", "models_file", "profile_dir"), "a secret"),
    }
    config = load({**secrets, "max_model_len": 512, "log_level": "error", "allow_prompt_embeds": True}, env={})

    async def scenario() -> None:
        launch = StandIns()
        client = EngineClient(config, FILES, launch)
        await client.start()
        started_with = launch.launched[0].started_with
        await client.close()
        assert b"a secret" not in frame(started_with)
        told = started_with.config
        assert (told.model, told.cache, told.limits) == (config.model, config.cache, config.limits)
        assert told.server.log_level == "error"

    asyncio.run(scenario())
