"""What the operator asks of an engine: done between its steps, answered once, and never waited for in vain."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.engine.stand_in import StandIns
from tests.engine.test_client import client_of
from tests.waiting import PATIENCE, until
from weft.backends.native import NativeEngine, start_native
from weft.config import load
from weft.engine.wire import Done, ResetCache, StartProfile
from weft.errors import InvalidRequest, Unavailable
from weft.hub.resolve import resolve
from weft.types import SamplingParams

PROMPT = list(range(5, 55))


def test_answers_reach_those_who_asked_in_any_order() -> None:
    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            asked = [asyncio.create_task(client.send_on(ResetCache)) for _ in range(2)]
            asked.append(asyncio.create_task(client.send_on(lambda number: StartProfile(number, "folder"))))
            await asyncio.sleep(0)
            engine = launch.launched[0]
            sent = [await asyncio.to_thread(engine.inbox.get, timeout=PATIENCE) for _ in asked]
            assert [type(errand) for errand in sent] == [ResetCache, ResetCache, StartProfile]
            first, second, third = (errand.number for errand in sent)
            engine.send(Done(third, error="No room."), Done(second, "two"), Done(99, "nobody's"), Done(first, "one"))
            assert await asked[0] == "one" and await asked[1] == "two"
            with pytest.raises(InvalidRequest, match="No room"):
                await asked[2]

    asyncio.run(scenario())


def test_an_engine_that_dies_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            asked = asyncio.create_task(client.send_on(ResetCache))
            await asyncio.sleep(0)
            launch.launched[0].kill()
            with pytest.raises(Unavailable):
                await asyncio.wait_for(asked, PATIENCE)
            await until(lambda: client.state == "ready")

    asyncio.run(scenario())


def test_the_real_engine_obeys(tiny_model: Path, tmp_path: Path) -> None:
    async def cached(engine: NativeEngine) -> int:
        deltas = await engine.submit(PROMPT, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        return [delta async for delta in deltas][-1].usage.cached_tokens

    async def scenario() -> None:
        engine = await start_native(load({"kv_cache_memory_mb": 16, "threads": 1}, env={}), resolve(str(tiny_model)))
        try:
            with pytest.raises(InvalidRequest, match="No trace"):
                await engine.stop_profile()
            file = await engine.start_profile(str(tmp_path / "traces"))
            with pytest.raises(InvalidRequest, match="already"):
                await engine.start_profile(str(tmp_path))
            assert await cached(engine) == 0
            assert await cached(engine) == 48
            assert await engine.stop_profile() == file
            assert json.loads(Path(file).read_text())["traceEvents"]

            running = await engine.submit(PROMPT, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
            await anext(running)
            assert await engine.reset_cache() >= 3
            text = [delta async for delta in running][-1]
            assert text.usage.completion_tokens == 60, "what is in use stays in use"
            await engine.reset_cache()
            assert await cached(engine) == 0
            with pytest.raises(InvalidRequest, match="folder"):
                await engine.start_profile("/proc/none")
        finally:
            await engine.close()

    asyncio.run(scenario())
