"""The live view: what a snapshot tells, to whom, and that nothing is made while nobody watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, error_of, real_server, request
from tests.api.scripted_engine import PAINTER, ScriptedEngine, answer, forever
from tests.waiting import PATIENCE, until
from weft.api.app import admission_app, build_app
from weft.config import load
from weft.engine_stats import EngineStats
from weft.errors import InvalidRequest, Overloaded
from weft.observe.metrics import Histogram, Metrics
from weft.options import Config
from weft.scheduler.block_pool import BlockPool
from weft.serving import live
from weft.serving.admission import Admission
from weft.serving.live import LatencyWindow, Snapshot
from weft.serving.timing import FREE, RequestTimer
from weft.types import ControlMessage, FinishReason, GenerationRequest, ModelInfo, Output, Sample, SamplingParams

TWO_KEYS = load({"api_key": ["first", "second"], "admin_key": ["root"]}, env={})
ENDLESS = [Output(text="Hel", token_ids=[1, 2], queue_seconds=0.0), forever]


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count snapshots and reads, and not how far apart they are."""
    monkeypatch.setattr(live, "TICK_S", 0.01)
    monkeypatch.setattr(live, "READ_S", 0.02)


def run(scenario: Callable[[Admission, httpx.AsyncClient], Awaitable[None]], engine: ScriptedEngine) -> None:
    async def go() -> None:
        admission = Admission(load(env={}))
        admission.open(engine)
        transport = httpx.ASGITransport(admission_app(admission))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE) as client:
            await scenario(admission, client)

    asyncio.run(go())


@asynccontextmanager
async def watching(admission: Admission, tenant: str | None = "") -> AsyncIterator[Callable[[], Awaitable[Snapshot]]]:
    async with aclosing(admission.live.watch(tenant)) as events:  # type: ignore[type-var]

        async def following() -> Snapshot:
            event = await anext(events)
            return msgspec.json.decode(event.removeprefix(b"data: "), type=Snapshot)

        yield following


def is_ticking() -> bool:
    return any(task.get_name() == "weft-live-view" for task in asyncio.all_tasks())


def test_a_snapshot_tells_of_a_model_and_of_the_requests_that_run_and_have_ended() -> None:
    engine = ScriptedEngine(answer("secret", "answer"))
    engine.memory = (5, 7)

    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        assert (await client.post(CHAT, json=HELLO, headers={"x-request-id": "before"})).status_code == 200
        engine.script = ENDLESS
        running = asyncio.create_task(client.post(CHAT, json=HELLO, headers={"x-request-id": "now"}))
        await until(lambda: engine.held)
        async with watching(admission) as following:
            first = await following()
            [model] = first.models
            assert (model.name, model.state, model.engine, model.memory_bytes) == ("scripted", "loaded", "scripted", 7)
            assert (model.running, model.waiting, model.restarts, model.preemptions) == (1, 2, 1, 3)
            assert model.spent is None and model.throughput is None, "there was no snapshot before it"
            [now] = first.open
            assert (now.id, now.state, now.kind, now.tokens) == ("now", "open", "text", 2)
            assert [name for name, _ in now.phases] == ["queue", "prefill", "decode"]
            [before] = first.ended
            assert (before.id, before.state, before.tokens, before.prompt_tokens) == ("before", "stop", 12, 8)
            second = await following()
            assert second.ended == [] and second.models[0].throughput is not None
            assert b"secret" not in msgspec.json.encode(first)
            admission.abort()
            await running
            while not (ended := (await following()).ended):
                pass
            assert [(one.id, one.state) for one in ended] == [("now", "abort")]

    run(scenario, engine)


def test_nothing_is_made_while_nobody_watches() -> None:
    engine = ScriptedEngine()

    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        assert not is_ticking()
        async with watching(admission) as one, watching(admission) as other:
            await one()
            await other()
            snapshots = await asyncio.gather(one(), other())
            assert snapshots[0] == snapshots[1], "one snapshot for all"
            assert is_ticking() and admission.live.num_watchers == 2
        assert admission.live.num_watchers == 0
        await until(lambda: not is_ticking())
        reads = len(engine.block_reads)
        await client.post(CHAT, json=HELLO)
        assert len(engine.block_reads) == reads

    run(scenario, engine)


def test_a_server_that_ends_ends_the_streams() -> None:
    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        async with watching(admission) as following:
            await following()
            rest = asyncio.create_task(following())
            await asyncio.sleep(0)
            await admission.close()
            with pytest.raises(StopAsyncIteration):
                while True:
                    await rest
                    rest = asyncio.create_task(following())

    run(scenario, ScriptedEngine())


def test_a_snapshot_that_cannot_be_made_ends_the_streams_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()

    def broken() -> EngineStats:
        raise RuntimeError("no figures")

    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        async with watching(admission) as following:
            await following()
            engine.stats = broken  # type: ignore[method-assign]
            with pytest.raises(StopAsyncIteration):
                await following()
        assert "the live view failed" in caplog.text and "no figures" in caplog.text

    run(scenario, engine)


class LargeCache(ScriptedEngine):
    """It has 20,000 blocks, of which the first 100 are in use and the next 50 cached."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(20_001)
        taken = self.pool.allocate(150)
        for number, block in enumerate(taken):
            self.pool.remember(block, number.to_bytes(4))
        self.pool.release(taken[100:])


def test_the_map_of_a_large_cache_is_bounded_and_read_in_parts() -> None:
    engine = LargeCache()

    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        async with watching(admission) as following:
            while (blocks := (await following()).models[0].blocks) is None or blocks.cached is None:
                assert blocks is not None and blocks.total == 20_000
            assert blocks.blocks_per_cell == 20 and blocks.used_cells is not None and blocks.cached_cells is not None
            assert blocks.used_cells == "f" * 5 + "0" * 995 and blocks.cached == 50
            assert blocks.cached_cells == "00000" + "ff8" + "0" * 992
        parts = [(read.first, read.num_cells * read.blocks_per_cell) for read in engine.block_reads[:5]]
        assert parts == [(0, 4080), (4080, 4080), (8160, 4080), (12240, 4080), (16320, 3680)]
        assert all(size <= live.MAX_BLOCKS_READ for _, size in parts)

    run(scenario, engine)


class Reticent(ScriptedEngine):
    """It passes requests on, as an engine elsewhere."""

    name = "remote"

    def __init__(self) -> None:
        super().__init__()
        self.model: ModelInfo = msgspec.structs.replace(self.model, num_blocks=0)


class KeepsItsMap(ScriptedEngine):
    async def control(self, message: ControlMessage) -> str:
        raise InvalidRequest("vLLM does not tell which blocks are in use.")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Reticent(), "The engine remote tells no steps and no blocks."),
        (KeepsItsMap(), "vLLM does not tell which blocks are in use."),
    ],
)
def test_what_an_engine_does_not_tell_is_absent_and_said(engine: ScriptedEngine, said: str) -> None:
    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        async with watching(admission) as following:
            await following()
            while not (model := (await following()).models[0]).not_told:
                pass
            assert model.not_told == said
            assert model.throughput is not None
            if engine.model.num_blocks:
                assert model.blocks is not None and model.blocks.used == 5 and model.blocks.used_cells is None
            else:
                assert model.blocks is None and model.spent is None

    run(scenario, engine)


def test_an_image_and_a_vector_have_timelines_of_their_own() -> None:
    engine = ScriptedEngine(images=PAINTER)

    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        await client.post("/v1/images/generations", json={"prompt": "a circle", "n": 2})
        await client.post("/v1/embeddings", json={"input": "a"})
        async with watching(admission) as following:
            image, vector = (await following()).ended
        assert (image.kind, image.steps, image.choices) == ("image", (12, 12), 2)
        assert [name for name, _ in image.phases] == ["queue", "encode", "denoise"]
        assert (vector.kind, vector.steps) == ("embedding", None)

    run(scenario, engine)


def timer(**task: Any) -> RequestTimer:
    request = GenerationRequest(prompt=[1], task=Sample(params=SamplingParams(), **task))
    metrics = Metrics("m", ScriptedEngine())
    return RequestTimer(metrics, None, FREE, time.perf_counter(), request, "m", is_sibling=False)


def test_a_tool_call_has_a_phase_from_its_marker_on() -> None:
    one = timer(call_marker="<tool_call>")
    assert [name for name, _ in one.phases(time.perf_counter())] == ["wait"]
    one.saw(Output(text="I look. <tool", token_ids=[1], queue_seconds=0.0))
    assert [name for name, _ in one.phases(time.perf_counter())] == ["queue", "prefill", "decode"]
    one.saw(Output(text="_call>{", token_ids=[2]))
    one.saw(Output(text="}", token_ids=[3], finish=FinishReason.STOP))
    phases = one.phases(time.perf_counter())
    assert [name for name, _ in phases] == ["queue", "prefill", "decode", "tool"]
    assert all(seconds >= 0 for _, seconds in phases)


def test_latencies_are_those_of_the_last_ticks() -> None:
    histogram = Histogram((0.1, 0.2, 0.4))
    histogram.observe(9.0, 50)
    window = LatencyWindow(histogram)
    assert window.read() is None
    histogram.observe(0.15, 10)
    histogram.observe(0.3, 10)
    figures = window.read()
    assert figures is not None and figures.count == 20
    assert figures.mean_s == pytest.approx(0.225) and figures.p50_s == pytest.approx(0.2)
    assert figures.p95_s == pytest.approx(0.38)
    for _ in range(live.LATENCY_TICKS):
        window.read()
    assert window.read() is None, "they are forgotten"


def test_no_more_than_a_bounded_number_watches() -> None:
    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        streams = []
        for number in range(live.MAX_WATCHERS):
            tenant = f"tenant {number // live.MAX_WATCHERS_PER_KEY}"
            streams.append(admission.live.watch(tenant))
            await anext(streams[-1])
            if number == live.MAX_WATCHERS_PER_KEY - 1:
                with pytest.raises(Overloaded, match="8 with one key"):
                    admission.live.watch(tenant)
        with pytest.raises(Overloaded, match="at most 32"):
            admission.live.watch(None)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        async with watching(admission) as following:
            await following()

    run(scenario, ScriptedEngine())


def test_watchers_who_are_let_in_at_the_same_moment_are_bounded_too() -> None:
    async def scenario(admission: Admission, client: httpx.AsyncClient) -> None:
        streams = [admission.live.watch("one") for _ in range(live.MAX_WATCHERS_PER_KEY + 3)]
        begun = [await anext(stream, None) is not None for stream in streams]
        assert begun == [True] * live.MAX_WATCHERS_PER_KEY + [False] * 3
        assert admission.live.num_watchers == live.MAX_WATCHERS_PER_KEY
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        assert admission.live.num_watchers == 0

    run(scenario, ScriptedEngine())


def seen_over_http(url: str, path: str, key: str) -> Snapshot:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("GET", url + path, headers=headers, timeout=PATIENCE) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in response.iter_lines() if line)
    return msgspec.json.decode(line.removeprefix("data: "), type=Snapshot)


def test_a_key_sees_its_own_requests_and_an_admin_key_all() -> None:
    engine = ScriptedEngine(images=PAINTER)
    with real_server(build_app(engine, TWO_KEYS), TWO_KEYS) as url:
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"of-{key}"}
            assert httpx.post(url + COMPLETIONS, json=PROMPT, headers=headers, timeout=PATIENCE).status_code == 200
        for key in ("first", "second"):
            assert [one.id for one in seen_over_http(url, "/live", key).ended] == [f"of-{key}"]
        assert [one.id for one in seen_over_http(url, "/admin/live", "root").ended] == ["of-first", "of-second"]


@pytest.mark.parametrize(
    ("path", "config", "key", "status"),
    [
        ("/live", TWO_KEYS, "", 401),
        ("/live", TWO_KEYS, "third", 401),
        ("/live", TWO_KEYS, "root", 401),
        ("/admin/live", TWO_KEYS, "first", 403),
        ("/admin/live", load(env={}), "", 404),
        ("/live", load({"live": False}, env={}), "", 404),
        ("/admin/live", load({"live": False, "admin_key": ["root"]}, env={}), "root", 404),
    ],
)
def test_it_is_closed_to_others_and_can_be_off(path: str, config: Config, key: str, status: int) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    refused = request(ScriptedEngine(), "GET", path, config, headers=headers)
    assert refused.status_code == status and error_of(refused)
