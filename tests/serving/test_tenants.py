"""What tenants learn of each other, and take from each other: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.api.grpc.calls import Client, answer_to, ask, failed, served
from tests.api.grpc.test_images import call as image_call
from tests.api.http import COMPLETIONS, PROMPT, error_of, request
from tests.api.scripted_engine import PAINTER, ScriptedEngine, answer
from tests.backends.openai_server.peer import DONE, Asked, Reply, ScriptedPeer, connected, text_chunk, usage_chunk
from weft.api.app import build_app
from weft.backends.native import NativeEngine, start_native
from weft.config import load
from weft.types import GenerationRequest, Sample, SamplingParams

SECRET = "The password of the vault is swordfish, and nobody else may know that it is."


@asynccontextmanager
async def tenants(model: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, NativeEngine]]:
    """A real engine over the tiny model, and a client of its server, which has the keys a and b."""
    flags = {"model": str(model), "image_model": "none", "api_key": ["a", "b"], **settings}
    config = load(flags, env={})
    engine = await start_native(config)
    try:
        transport = httpx.ASGITransport(build_app(engine, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            yield client, engine
    finally:
        await engine.close()


async def cached(client: httpx.AsyncClient, key: str, **fields: Any) -> int:
    body = {"model": "smollm2", "prompt": SECRET, "max_tokens": 1, **fields}
    response = await client.post("/v1/completions", json=body, headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_right_guess_tells_a_tenant_nothing(tiny_model: Path) -> None:
    async def go() -> None:
        async with tenants(tiny_model) as (client, engine):
            assert await cached(client, "a") == 0
            assert await cached(client, "b") == 0, "b learns that a asked this"
            own = await cached(client, "a")
            assert own >= 16 and await cached(client, "b") == own, "each finds its own"
            assert await cached(client, "a", cache_salt="s") == 0, "a salt parts a tenant's own requests"
            assert await cached(client, "a", cache_salt="s") == own
            assert await cached(client, "b", cache_salt="s") == 0

            before = engine.stats().computed_tokens
            await cached(client, "a", cache_salt="several", n=4)
            computed = engine.stats().computed_tokens - before
            num_prompt = len(engine.text.tokenizer.encode(SECRET))
            assert computed < 2 * num_prompt, "choices share the prompt, whatever the tenant"

    asyncio.run(go())


def test_the_operator_may_let_tenants_share(tiny_model: Path) -> None:
    async def go() -> None:
        async with tenants(tiny_model, share_prefix_cache=True) as (client, _):
            assert await cached(client, "a") == 0
            assert await cached(client, "b") >= 16
            assert await cached(client, "b", cache_salt="s") == 0

    asyncio.run(go())


def salt(tenant: str, cache_salt: str = "", **fields: Any) -> str:
    task = Sample(params=SamplingParams())
    return GenerationRequest(prompt=[1], task=task, tenant=tenant, cache_salt=cache_salt, **fields).tenant_salt


def test_no_salt_of_one_tenant_is_anothers() -> None:
    salts = {salt(tenant, own) for tenant in ("a", "b", "a', 'b") for own in ("", "a", "b", salt("b"))}
    assert len(salts) == 12 and all(0 < len(one) <= 64 for one in salts)
    assert (salt(""), salt("", "s"), salt("a", "s", shares_cache=True)) == ("", "s", "s"), "as without keys"


@pytest.mark.parametrize(("owner", "is_salted"), [("weft", True), ("vllm", True), ("llamacpp", False)])
def test_a_peer_is_told_of_the_tenant_by_the_salt(owner: str, is_salted: bool) -> None:
    async def go() -> None:
        async with ScriptedPeer(owner=owner) as peer:

            async def say(reply: Reply, asked: Asked) -> None:
                await reply.events(text_chunk("a", "stop"), usage_chunk(1, 1))
                await reply.write(DONE)

            peer.answers["/v1/completions"] = say
            async with connected(peer) as engine:
                transport = httpx.ASGITransport(build_app(engine, load({"api_key": ["a", "b"]}, env={})))
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
                    for key in "ab":
                        body = {"model": "model", "prompt": "hi", "max_tokens": 4}
                        response = await client.post("/v1/completions", json=body, headers={"x-api-key": key})
                        assert response.status_code == 200, response.text
            salts = [asked.body.get("cache_salt") for asked in peer.generations()]
            assert len({*salts, None}) == (3 if is_salted else 1)

    asyncio.run(go())


def test_a_priority_outside_of_the_keys_range_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("batch: a priority=1..9\nfree: b\n")
    engine = ScriptedEngine(answer("x"))
    config = load({"api_key_file": str(keys)}, env={})

    def asked(key: str, **fields: Any) -> httpx.Response:
        return request(engine, "POST", COMPLETIONS, config, json=PROMPT | fields, headers={"x-api-key": key})

    refused = asked("a", priority=-1)
    assert refused.status_code == 400 and "1..9" in error_of(refused)["message"]
    assert asked("a").status_code == asked("a", priority=5).status_code == asked("b", priority=-7).status_code == 200
    assert [one.priority for one in engine.submitted] == [1, 5, -7]

    async def go() -> None:
        async with served(engine, api_key_file=str(keys)) as opened:
            _, code, details = await failed(Client(opened.channel, "a").predict([ask(priority=-1)]))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "1..9" in details

    asyncio.run(go())


def test_grpc_has_a_salt() -> None:
    async def go() -> None:
        engine = ScriptedEngine(answer("x"), images=PAINTER)
        async with served(engine) as opened:
            await answer_to(opened, ask(cache_salt="s"))
            async for _ in image_call(opened, cache_salt="t"):
                pass
            assert (engine.submitted[0].cache_salt, engine.drawn[0].cache_salt) == ("s", "t")
            _, code, details = await failed(opened.predict([ask(cache_salt="x" * 257)]))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "256" in details

    asyncio.run(go())
