"""A real server under real faults: killed engines, signals, clients that leave, many at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.tiny_server import NAME, TinyServer
from tests.processes import descendants, runs
from tests.waiting import PATIENCE, wait_until
from weft.checkpoint.model_files import ModelFiles

TOPICS = [
    "the sea", "a red fox", "bread", "the moon", "an old clock", "rivers", "a violin", "winter",
]  # fmt: skip


def chat(topic: str, max_tokens: int, **more: object) -> dict:
    messages = [{"role": "user", "content": f"Tell me about {topic}."}]
    asked = {"model": "smollm2", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return asked | more


async def stream(client: httpx.AsyncClient, body: dict, begun: asyncio.Event | None = None) -> str:
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if text and begun is not None:
                    begun.set()
    raise AssertionError("the stream ended without [DONE]")


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Ask the server in a thread, while this loop's streams go on."""
    await asyncio.to_thread(wait_until, condition, what)


def connect(server: Server) -> httpx.AsyncClient:
    key = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=server.url, headers=key, timeout=PATIENCE, limits=limits)


def test_streams_survive_the_death_of_the_engine(locked: Server) -> None:
    bodies = [chat("the sea", 16), chat("bread", 16, temperature=0.8, seed=5), chat("owls", 16, temperature=1, seed=6)]

    async def scenario() -> None:
        async with connect(locked) as client:
            undisturbed = [await stream(client, body) for body in bodies]
            restarts = locked.metric("weft_engine_restarts_total")
            before = locked.metric("weft_generation_tokens_total")
            streams = [asyncio.create_task(stream(client, body)) for body in bodies]
            await until(lambda: locked.metric("weft_generation_tokens_total") > before + 9)
            os.kill(locked.engine_pid(), signal.SIGKILL)
            await until(lambda: locked.get("/health").status_code == 503)
            assert locked.get("/health/live").status_code == 200
            assert await asyncio.gather(*streams) == undisturbed
            await asyncio.to_thread(locked.wait_until_ready)
            assert locked.metric("weft_engine_restarts_total") == restarts + 1

    asyncio.run(scenario())


def test_streams_survive_the_death_of_a_rank(long_model: Path) -> None:
    """One of two processes that hold the model together: the engine ends with it, and is replaced whole."""
    asked = {"model": NAME, "ignore_eos": True}
    bodies = [chat("the sea", 60, **asked), chat("owls", 60, **asked, temperature=1, seed=6)]

    async def scenario(server: TinyServer) -> None:
        async with connect(server) as client:
            undisturbed = await asyncio.gather(*(stream(client, body) for body in bodies))
            before = server.metric("weft_generation_tokens_total")
            streams = [asyncio.create_task(stream(client, body)) for body in bodies]
            await until(lambda: server.metric("weft_generation_tokens_total") > before + 10)
            [rank] = descendants(server.engine_pid())
            os.kill(rank, signal.SIGKILL)
            assert await asyncio.gather(*streams) == undisturbed
            await until(lambda: server.metric("weft_engine_restarts_total") == 1, "another engine")
            await asyncio.to_thread(server.wait_until_ready)

    with TinyServer(long_model, "--image-model", "none", "--tensor-parallel-size", "2", "--threads", "1") as server:
        asyncio.run(scenario(server))


def test_forty_chats_at_once_are_each_their_solo_run(locked: Server) -> None:
    """More than that over a tiny model: test_many_streams."""
    lengths = (3, 4, 5, 6, 8)

    async def scenario() -> None:
        async with connect(locked) as client:
            solo = {topic: await stream(client, chat(topic, max(lengths))) for topic in TOPICS}
            work = [(topic, length) for length in lengths for topic in TOPICS]
            with locked.engine_stopped():
                chats = asyncio.gather(*(stream(client, chat(topic, length)) for topic, length in work))
                await until(lambda: locked.metric("weft_num_requests_waiting") == len(work), "all at once")
            texts = await chats
        assert len(texts) == 40
        for (topic, length), text in zip(work, texts, strict=True):
            assert text and solo[topic].startswith(text), f"{topic}, {length} tokens"
            if length == max(lengths):
                assert text == solo[topic]

    asyncio.run(scenario())


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_blocks(locked: Server, streaming: bool) -> None:
    async def scenario() -> None:
        async with connect(locked) as client:
            body = chat("the desert", 2000, ignore_eos=True, stream=streaming)
            leaving = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await until(lambda: locked.metric("weft_kv_cache_usage_perc") > 0)
            leaving.cancel()
            await until(lambda: locked.metric("weft_kv_cache_usage_perc") == 0)
            assert locked.metric("weft_num_requests_running") == 0

    asyncio.run(scenario())


def test_terminated_it_finishes_what_runs_and_takes_nothing_new(long_model: Path) -> None:
    async def scenario() -> None:
        flags = ("--drain-timeout-s", "3600", "--heartbeat-timeout-s", "3600", "--image-model", "none")
        with TinyServer(long_model, *flags) as server:
            children = server.children()
            async with connect(server) as client:
                asked, begun = chat("tea", 300, ignore_eos=True, model=NAME), asyncio.Event()
                running = asyncio.create_task(stream(client, asked, begun))
                await begun.wait()
                with server.engine_stopped():
                    server.process.send_signal(signal.SIGTERM)
                    await until(lambda: server.get("/health").status_code == 503)
                    refused = await client.post("/v1/chat/completions", json=chat("tea", 4, model=NAME))
                    assert refused.status_code == 503
                    assert "shutting down" in refused.json()["error"]["message"]
                    assert not running.done()
                assert len(await running) > 200
            assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in children)

    asyncio.run(scenario())


def test_terminated_twice_it_ends_at_once(long_model: Path) -> None:
    async def scenario() -> None:
        with TinyServer(long_model, "--drain-timeout-s", "3600", "--image-model", "none") as server:
            async with connect(server) as client:
                running = asyncio.create_task(stream(client, chat("tea", 16_000, ignore_eos=True, model=NAME)))
                await until(lambda: server.metric("weft_generation_tokens_total") > 3)
                server.process.send_signal(signal.SIGTERM)
                await until(lambda: server.get("/health").status_code == 503)
                server.process.send_signal(signal.SIGTERM)
                with pytest.raises((AssertionError, httpx.HTTPError)):
                    await running
            assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0

    asyncio.run(scenario())


def test_a_server_that_cannot_start_says_why_and_exits(smollm2_files: ModelFiles) -> None:
    flags = ("--max-model-len", "8192", "--kv-cache-memory-mb", "8", "--no-allow-auto-tuning")
    with pytest.raises(AssertionError, match="--max-model-len"), Server(*flags):
        pass


def test_given_up_it_ends_with_1_and_leaves_nothing_running(tiny_model: Path) -> None:
    with TinyServer(tiny_model, "--max-restarts", "0") as server:
        children = server.children()
        os.kill(server.first_engine, signal.SIGKILL)
        assert server.process.wait(PATIENCE) == 1
        wait_until(lambda: not any(map(runs, children)), "the end of all")
    assert "--keep-serving-without-engine" in "".join(server.log)
