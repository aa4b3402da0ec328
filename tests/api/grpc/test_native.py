"""The gRPC server over the real engine and a model that is quick."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.api.grpc.calls import Client, answer_to, ask, check_whole, refused, served, text_of
from tests.waiting import until
from weft.api.grpc.prediction import ChunkBuffer
from weft.backends.failover import start_engine
from weft.backends.native import NativeEngine, start_native
from weft.config import load
from weft.hub.resolve import resolve
from weft.types import GenerationRequest, Sample, SamplingParams

COUNTING = "One, two, three, four,"
PROMPTS = (COUNTING, "The capital of France is", "中文：你好，世界！中文：你好，")
GREEDY = {"temperature": 0, "max_new_tokens": 12}

Scenario = Callable[[NativeEngine], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def run(long_model: Path) -> Iterator[Run]:
    """Runs scenarios over one engine."""
    config = load({"kv_cache_memory_mb": 128, "max_model_len": 1024}, env={})
    with asyncio.Runner() as runner:
        engine = runner.run(start_native(config, resolve(str(long_model))))
        yield lambda scenario: runner.run(scenario(engine))
        assert engine.stats().open_requests == 0
        runner.run(engine.close())


Answers = dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def own(run: Run) -> Answers:
    """What the engine itself says to each prompt, and in how many tokens."""
    params = SamplingParams(temperature=0, max_tokens=GREEDY["max_new_tokens"])
    answers: Answers = {}

    async def scenario(engine: NativeEngine) -> None:
        for prompt in PROMPTS:
            request = GenerationRequest(prompt=engine.text.tokenizer.encode(prompt), task=Sample(params=params))
            outputs = [output async for output in await engine.submit(request)]
            answers[prompt] = "".join(output.text for output in outputs), outputs[-1].usage.completion_tokens

    run(scenario)
    return answers


def test_tc_004_the_text_is_the_engines_own_and_comes_in_fewer_messages(
    run: Run, own: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[str] = []
    put = ChunkBuffer.put

    def counted(buffer: ChunkBuffer, chunk: str) -> asyncio.Future[None] | None:
        chunks.append(chunk)
        return put(buffer, chunk)

    monkeypatch.setattr(ChunkBuffer, "put", counted)

    async def scenario(engine: NativeEngine) -> None:
        for size in (1, 8):
            # Long enough for eight chunks on any machine: what is counted must not depend on its speed.
            async with served(engine, grpc_buffer_size=size, grpc_flush_interval_ms=3_600_000) as opened:
                for prompt, (text, tokens) in own.items():
                    chunks.clear()
                    began = time.perf_counter()
                    responses = await answer_to(opened, ask(prompt, generation=GREEDY))
                    elapsed = time.perf_counter() - began
                    check_whole(responses)
                    assert text_of(responses) == text
                    last = responses[-1]
                    assert 0 < last.ttft_ms < 1000 * elapsed
                    assert tokens / elapsed <= last.tokens_per_sec < tokens / (last.ttft_ms / 1000)
                    # The first leaves at once, alone or with those that are there already; the others by eight.
                    num_messages = len(responses) - 1
                    assert num_messages <= 1 + math.ceil((len(chunks) - 1) / size)
                    assert num_messages == len(chunks) or size > 1

    run(scenario)


def test_predictions_side_by_side_say_what_each_says_alone(run: Run, own: Answers) -> None:
    async def scenario(engine: NativeEngine) -> None:
        async with served(engine) as opened:
            requests = [ask(prompt, f"{i}", generation=GREEDY) for i, prompt in enumerate(PROMPTS * 4)]
            responses = [response async for response in opened.predict(requests)]
        for i, prompt in enumerate(PROMPTS * 4):
            answer = [response for response in responses if response.trace_id == f"{i}"]
            check_whole(answer)
            assert text_of(answer) == own[prompt][0]

    run(scenario)


def test_a_cancelled_prediction_leaves_nothing_in_the_engine(run: Run) -> None:
    async def scenario(engine: NativeEngine) -> None:
        async with served(engine) as opened:
            # Greedy: what is drawn at random may end before the others have begun.
            endless = {"temperature": 0, "max_new_tokens": 900}
            call = opened.predict([ask(COUNTING, str(i), generation=endless) for i in range(4)])
            assert (await call.read()).chunk
            await until(lambda: engine.stats().open_requests == 4)
            call.cancel()
            await until(lambda: engine.stats().open_requests == 0)
            check_whole(await answer_to(opened, ask(generation=GREEDY)))
            await until(lambda: engine.stats().running == 0 and engine.stats().blocks_used == 0)

    run(scenario)


def test_a_prompt_beyond_the_context_is_refused(run: Run) -> None:
    async def scenario(engine: NativeEngine) -> None:
        async with served(engine) as opened:
            code, details = await refused(opened.predict([ask("word " * 400)]))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "1024" in details

    run(scenario)


def test_a_stream_survives_the_death_of_the_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    long = GREEDY | {"max_new_tokens": 400}

    async def scenario(engine: NativeEngine) -> None:
        async with served(engine) as opened:
            undisturbed = text_of(await answer_to(opened, ask(COUNTING, generation=long)))
            call = opened.predict([ask(COUNTING, generation=long)])
            responses = [await call.read()]
            pid, connect, was_asked = engine.client.engine_pid, engine.client._connect, asyncio.Event()
            assert pid is not None

            async def connect_later() -> None:
                await was_asked.wait()
                await connect()

            monkeypatch.setattr(engine.client, "_connect", connect_later)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not engine.health().ready)
            assert not (await opened.health()).healthy
            was_asked.set()
            while not responses[-1].end_of_stream:
                responses.append(await call.read())
            check_whole(responses)
            assert text_of(responses) == undisturbed
            health = await opened.health()
            assert health.healthy and health.metrics["engine_restarts"] == "1"

    run(scenario)


def test_unloading_the_only_model_ends_its_process(tiny_model: Path) -> None:
    async def scenario() -> None:
        settings: dict[str, Any] = {"model": str(tiny_model), "engine": "native", "kv_cache_memory_mb": 16}
        config = load(settings | {"image_model": "none"}, env={})

        async def start() -> Any:
            return await start_engine(config)

        async with served(opened=False, admin_key=["root"]) as opened:
            engine = await start()
            opened.admission.open(engine, start)
            pid = engine.client.engine_pid
            before = await answer_to(opened, ask(generation={"temperature": 0, "max_new_tokens": 4}))
            await Client(opened.channel, "root").control("unload_model")
            assert not Path(f"/proc/{pid}").exists()
            after = await answer_to(opened, ask(generation={"temperature": 0, "max_new_tokens": 4}))
            assert text_of(after) == text_of(before)
            await opened.admission.close()

    asyncio.run(scenario())
