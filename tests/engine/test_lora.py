"""Adapters in an engine process: loaded, switched and mixed while it serves, and there again in the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tiny_adapters import adapter_config, lora_tensors, save_adapter, write_adapter
from tests.waiting import PATIENCE, until
from tests.worker.driving import request
from weft.config import load
from weft.engine.client import EngineClient
from weft.engine.process import launch_engine
from weft.hub.resolve import resolve
from weft.types import Adapter, Event, FinishReason, Request

PROMPT = [(13 * i + 5) % 300 for i in range(20)]
MAX_TOKENS = 100


@asynccontextmanager
async def serving(model: Path, launch=launch_engine) -> AsyncIterator[EngineClient]:
    settings = {"max_model_len": 512, "num_blocks": 256, "threads": 1, "image_model": "none", "device": "cpu"}
    client = EngineClient(load(settings, env={}), resolve(str(model)), launch)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def answer(client: EngineClient, made: Request) -> tuple[list[int], Event]:
    """All tokens of a request, and its last event."""
    entry = client.submit(made)
    arrived = asyncio.Event()
    entry.listener = arrived.set
    tokens: list[int] = []
    while True:
        for arrival in entry.take():
            if isinstance(arrival, int):
                tokens.append(arrival)
                continue
            tokens += arrival.token_ids
            if arrival.finish is not None:
                return tokens, arrival
        arrived.clear()
        await asyncio.wait_for(arrived.wait(), PATIENCE)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter | None]:
    """The model as it is, and two others."""
    folders = [save_adapter("smollm2", tmp_path_factory.mktemp("adapter"), seed) for seed in (1, 2)]
    named = [Adapter(name=f"style {i}", number=i, path=str(folder)) for i, folder in enumerate(folders, 1)]
    return [None, *named]


def made(adapters: list[Adapter | None], run: str) -> list[Request]:
    params = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})
    return [
        replace(request(f"{run} {i} {j}", PROMPT, MAX_TOKENS, **chosen), adapter=adapter)
        for i, adapter in enumerate(adapters)
        for j, chosen in enumerate(params)
    ]


def test_adapters_are_switched_and_mixed_and_survive_their_engine(
    tiny_model: Path, adapters: list[Adapter | None], tmp_path: Path
) -> None:
    """One after the other, then all in one batch, then the same while the engine is killed. A broken one ends alone."""

    async def scenario() -> None:
        async with serving(tiny_model) as client:
            alone = [(await answer(client, one))[0] for one in made(adapters, "alone")]
            assert len({tuple(tokens) for tokens in alone}) == len(alone), "each has words of its own"
            together = await asyncio.gather(*(answer(client, one) for one in made(adapters, "together")))
            assert [tokens for tokens, _ in together] == alone

            broken = Adapter(name="broken", number=3, path=str(tmp_path))
            bad = replace(request("bad", PROMPT, 5), adapter=broken)
            first_pid, generated = client.engine_pid, client.stats().generation_tokens
            streams = [asyncio.create_task(answer(client, one)) for one in [*made(adapters, "killed"), bad]]
            await until(lambda: client.stats().generation_tokens >= generated + 60, "sixty tokens")
            os.kill(first_pid, signal.SIGKILL)
            *killed, (nothing, refused) = await asyncio.gather(*streams)
            assert [tokens for tokens, _ in killed] == alone
            assert {last.finish for _, last in killed} == {FinishReason.LENGTH}
            assert client.restarts == 1
            assert nothing == [] and refused.finish is FinishReason.REJECTED
            assert str(tmp_path / "adapter_config.json") in refused.error

    asyncio.run(scenario())


def test_an_adapter_whose_pattern_takes_for_ever_as_a_regular_expression_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = adapter_config(target_modules="([a-z0-9_.]+)+!")
    hostile = Adapter(name="hostile", number=1, path=str(write_adapter(tmp_path, config, lora_tensors("smollm2", 1))))

    async def scenario() -> None:
        async with serving(tiny_model) as client:
            _, refused = await answer(client, replace(request("bad", PROMPT, 5), adapter=hostile))
            assert refused.finish is FinishReason.REJECTED and "a group is repeated" in refused.error
            assert client.restarts == 0

    asyncio.run(scenario())


def test_a_request_whose_adapter_kills_two_engines_ends_alone(tiny_model: Path, adapters: list[Adapter | None]) -> None:
    """It was in no step: the engines died while they read its adapter."""

    async def scenario() -> None:
        async with serving(tiny_model, partial(launch_engine, "tests.engine.faulty", "adapter")) as client:
            plain = request("alone", PROMPT, MAX_TOKENS)
            expected, _ = await answer(client, plain)
            innocent = asyncio.create_task(answer(client, replace(plain, request_id="innocent")))
            await until(lambda: client.stats().running, "a step with it")
            bad = replace(request("bad", PROMPT, 5), adapter=adapters[1])
            _, ended = await answer(client, bad)
            assert ended.finish is FinishReason.ERROR and "twice" in ended.error
            assert (await innocent)[0] == expected
            assert client.restarts == 2

    asyncio.run(scenario())
