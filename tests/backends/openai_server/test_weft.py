"""Another real Weft as the peer: what is asked through it is answered as if it had been asked directly."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.openai_server.peer import all_of
from tests.backends.openai_server.proxy import cutting_proxy
from tests.e2e.server import Server
from tests.e2e.tiny_server import NAME, TinyServer
from tests.generation import sample
from tests.ports import reserved_port
from tests.waiting import until, wait_until
from weft.api.app import build_app
from weft.backends.contract import Engine, chat_prompt, text_prompt
from weft.backends.openai_server import remote_engine
from weft.backends.openai_server.start import start
from weft.config import load
from weft.errors import ConfigError, ContextTooLong, InvalidRequest, Overloaded, Unavailable
from weft.types import FinishReason, SamplingParams

ALONE = ("--image-model", "none")
PROMPT = "The weft runs across"
CONTEXT = 1 << 14
"""Of the peer's model."""
ENDLESS = SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)
"""Work for so long that it has not ended when it is given up."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}


@pytest.fixture
def peer(long_server: TinyServer) -> TinyServer:
    return long_server


@asynccontextmanager
async def remote(url: str, tokenizer: Path | None, **settings: Any) -> AsyncIterator[Engine]:
    flags = {"engine": "remote", "engine_url": url, "tokenizer": str(tokenizer or ""), **settings}
    engine = await start(load(flags, env={}))
    try:
        yield engine
    finally:
        await engine.close()


def both(
    peer: TinyServer, tokenizer: Path | None, path: str, bodies: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, httpx.Response, httpx.Response]]:
    """The peer's own answers, and those of a Weft that has it for an engine."""

    async def go() -> list[tuple[str, httpx.Response, httpx.Response]]:
        async with remote(peer.url, tokenizer) as engine:
            transport = httpx.ASGITransport(build_app(engine, load(env={})))
            async with (
                httpx.AsyncClient(base_url=peer.url, timeout=None) as directly,
                httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as through,
            ):
                return [
                    (
                        name,
                        await directly.post(path, json={"model": NAME, **body}),
                        await through.post(path, json={"model": NAME, **body}),
                    )
                    for name, body in bodies.items()
                ]

    yield from asyncio.run(go())


def told(response: httpx.Response) -> Any:
    """What an answer says, without what is new every time."""
    assert response.status_code == 200, response.text
    body = response.json()
    for name in ("id", "created", "system_fingerprint"):
        del body[name]
    del body["usage"]["prompt_tokens_details"]
    for choice in body["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return body


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_its_time_in_the_queue_is_told_with_the_end(peer: TinyServer, tiny_model: Path, with_tokenizer: bool) -> None:
    async def go() -> None:
        async with remote(peer.url, tiny_model if with_tokenizer else None) as engine:
            prompts = [text_prompt(engine, PROMPT), chat_prompt(engine, [{"role": "user", "content": PROMPT}])]
            for prompt in prompts:
                *others, last = await all_of(engine, prompt, SamplingParams(max_tokens=4, temperature=0))
                assert last.queue_seconds is not None and 0 <= last.queue_seconds < 60
                assert all(delta.queue_seconds is None for delta in others)

    asyncio.run(go())


TEXT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7},
    "cut": {"seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"seed": 2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"temperature": 0, "logit_bias": {"70": 100, "71": 99}},
    "stop tokens": {"temperature": 0, "logit_bias": {"70": 100}, "stop_token_ids": [70]},
    "stop": {"temperature": 0, "logit_bias": {"75": 100}, "stop": ["jj"], "include_stop_str_in_output": True},
    "ends": {"seed": 3, "ignore_eos": True, "min_tokens": 5},
    "choices": {"seed": 4, "n": 3},
    "regex": {"temperature": 0, "structured_outputs": {"regex": "[ab]{3}c"}},
    "schema": {"seed": 5, "structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    "salted": {"temperature": 0, "cache_salt": "s", "priority": 1},
}
TOKENS: dict[str, dict[str, Any]] = {
    "logprobs": {"seed": 6, "logprobs": 3},
    "prompt": {"seed": 6, "logprobs": 2, "prompt_logprobs": 1, "echo": True},
    "ids": {"seed": 6, "return_token_ids": True, "skip_special_tokens": False},
    "ids in": {"seed": 6, "prompt": [68, 69, 70]},
    "short": {"seed": 6, "truncate_prompt_tokens": 2},
}


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_completions_are_the_same(has_tokens: bool, peer: TinyServer, tiny_model: Path) -> None:
    cases = TEXT | TOKENS if has_tokens else TEXT
    bodies = {name: {"prompt": PROMPT, "max_tokens": 12, **case} for name, case in cases.items()}
    for name, directly, through in both(peer, tiny_model if has_tokens else None, "/v1/completions", bodies):
        assert told(through) == told(directly), name


CHATS: dict[str, dict[str, Any]] = {
    "seeded": {"seed": 7},
    "format": {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "call": {"seed": 8, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"seed": 9, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "go"}}},
    "streamed": {"seed": 7, "stream": True, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_chats_are_the_same(has_tokens: bool, peer: TinyServer, tiny_model: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which thread?"}]
    bodies = {name: {"messages": messages, "max_tokens": 80, **case} for name, case in CHATS.items()}
    for name, directly, through in both(peer, tiny_model if has_tokens else None, "/v1/chat/completions", bodies):
        if name == "streamed":
            assert streamed(through) == streamed(directly)
        else:
            assert told(through) == told(directly), name


def streamed(response: httpx.Response) -> tuple[str, list[str], int]:
    """The text, the reasons, and how many tokens there were."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, reasons, chunks[-1]["usage"]["completion_tokens"]


def test_the_command_line_serves_it(peer: TinyServer) -> None:
    body = {"messages": [{"role": "user", "content": "Which thread?"}], "max_tokens": 8, **CHATS["streamed"]}
    with Server("--engine", "remote", "--engine-url", peer.url, "--served-model-name", "front") as front:
        front.wait_until_ready()
        [card] = front.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("front", CONTEXT)
        directly, through = (
            httpx.post(f"{server.url}/v1/chat/completions", json={**body, "model": name}, timeout=None)
            for server, name in ((peer, NAME), (front, "front"))
        )
        assert streamed(through) == streamed(directly)
        assert front.metric("weft_generation_tokens_total") == 8
        assert front.metric("weft_num_requests_running") == 0


def test_vectors_come_through(peer: TinyServer, tiny_model: Path) -> None:
    text, ids = {"input": "The cloth", "pooling": "last"}, {"input": [68, 69]}
    for tokenizer, bodies in ((tiny_model, {"text": text, "ids": ids}), (None, {"text": text})):
        for _, directly, through in both(peer, tokenizer, "/v1/embeddings", bodies):
            assert through.json()["usage"] == directly.json()["usage"]
            vectors = [answer.json()["data"][0]["embedding"] for answer in (through, directly)]
            assert vectors[0] == pytest.approx(vectors[1], abs=1e-6)


def test_refusals_come_through(peer: TinyServer) -> None:
    async def go() -> None:
        async with remote(peer.url, None) as engine:
            with pytest.raises(ContextTooLong, match=f"context is {CONTEXT}"):
                await engine.submit(sample("a b " * CONTEXT, SamplingParams(max_tokens=5)))
            with pytest.raises(InvalidRequest, match="logit_bias has the token id 9999"):
                await engine.submit(sample("hi", SamplingParams(max_tokens=5, logit_bias={9999: 1.0})))

    asyncio.run(go())


def test_a_prompt_that_is_too_long_is_refused_before_it_is_sent(peer: TinyServer, tiny_model: Path) -> None:
    async def go() -> None:
        async with remote(peer.url, tiny_model) as engine:
            with pytest.raises(ContextTooLong):
                await engine.submit(sample([68] * CONTEXT, SamplingParams(max_tokens=5)))
            with pytest.raises(InvalidRequest, match="empty"):
                await engine.submit(sample([], SamplingParams(max_tokens=5)))

    asyncio.run(go())


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_whoever_leaves_frees_the_peer(has_tokens: bool, peer: TinyServer, tiny_model: Path) -> None:
    async def go() -> None:
        async with remote(peer.url, tiny_model if has_tokens else None) as engine:
            prompt = engine.text.tokenizer.encode(PROMPT) if has_tokens else PROMPT
            answers = [await engine.submit(sample(prompt, ENDLESS)) for _ in range(3)]
            for answer in answers:
                await anext(answer)
            assert engine.stats().open_requests == 3
            for answer in answers:
                await answer.aclose()
            assert engine.stats().open_requests == 0

    def num_aborted() -> float:
        metrics = peer.get("/metrics").text
        return sum(map(float, re.findall(r'^weft_request_success_total{.*"abort".*} (.+)$', metrics, re.M)))

    def is_idle() -> bool:
        return peer.metric("weft_num_requests_running") == 0

    wait_until(is_idle, "nothing runs that another test left")
    before = num_aborted()
    asyncio.run(go())
    wait_until(lambda: num_aborted() == before + 3, "all three are aborted")
    wait_until(is_idle, "nothing runs")


def test_a_stream_that_is_cut_goes_on_as_if_it_had_not_been(peer: TinyServer, tiny_model: Path) -> None:
    async def go() -> None:
        params = SamplingParams(max_tokens=60, temperature=1, seed=11, top_p=0.95, repetition_penalty=1.1)
        async with remote(peer.url, tiny_model) as directly:
            prompt = directly.text.tokenizer.encode(PROMPT)
            whole = await all_of(directly, prompt, params)
        async with cutting_proxy(peer.url) as url, remote(url, tiny_model) as engine:
            cut = await all_of(engine, prompt, params)
        assert [token for delta in cut for token in delta.token_ids] == [
            token for delta in whole for token in delta.token_ids
        ]
        assert "".join(delta.text for delta in cut) == "".join(delta.text for delta in whole)
        assert (cut[-1].finish, cut[-1].usage) == (whole[-1].finish, whole[-1].usage)
        async with cutting_proxy(peer.url) as url, remote(url, None) as engine:
            cut = await all_of(engine, PROMPT, ENDLESS)
        assert cut[-1].finish is FinishReason.ERROR, "text cannot be continued"

    asyncio.run(go())


async def check_keys(url: str) -> None:
    for key in ("", "wrong"):
        with pytest.raises(ConfigError, match="refuses the key"):
            async with remote(url, None, engine_api_key=key):
                pass
    with pytest.raises(ConfigError, match=f"has no model 'large'; it has {NAME}"):
        async with remote(url, None, engine_api_key="secret", engine_model="large"):
            pass


async def check_death(peer: TinyServer, engine: Engine, prompt: list[int]) -> None:
    answer = await engine.submit(sample(prompt, ENDLESS))
    assert (await anext(answer)).token_ids
    peer.process.kill()
    deltas = [delta async for delta in answer]
    assert deltas[-1].finish is FinishReason.ERROR
    assert "lost in the middle" in deltas[-1].error
    assert engine.stats().open_requests == 0
    assert not engine.health().ready
    with pytest.raises(Unavailable):
        await engine.submit(sample(prompt, ENDLESS))


def test_a_peer_with_a_key_that_dies_comes_back_and_has_enough(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "PROBE_S", 0.2)
    monkeypatch.setattr(remote_engine, "PROBE_WHEN_LOST_S", 0.1)
    flags = [*ALONE, "--api-key", "secret", "--max-requests-per-minute-per-key", "1", "--port"]

    async def go(port: str) -> None:
        with TinyServer(long_model, *flags, port) as first:
            await check_keys(first.url)
            async with remote(first.url, long_model, engine_api_key="secret") as engine:
                prompt = engine.text.tokenizer.encode(PROMPT)
                await check_death(first, engine, prompt)
                with await asyncio.to_thread(TinyServer, long_model, *flags, port):
                    await until(lambda: engine.health().ready, "the peer is there again")
                    assert engine.stats().restarts == 1
                    few = SamplingParams(max_tokens=5)
                    assert (await all_of(engine, prompt, few))[-1].finish is not None
                    with pytest.raises(Overloaded, match="has sent its requests") as refusal:
                        await engine.submit(sample(prompt, few))
                    assert refusal.value.retry_after_s > 30

    with reserved_port() as port:
        asyncio.run(go(str(port)))
