"""Several answers to one prompt, where a peer makes them: all are asked for at once."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.backends.openai_server.peer import DONE, Asked, Reply, ScriptedPeer, connected, text_chunk, usage_chunk
from tests.waiting import PATIENCE
from weft.api.app import build_app
from weft.config import load

BODY = {"model": "model", "prompt": "hi", "max_tokens": 4, "n": 3}


async def post(peer: ScriptedPeer) -> httpx.Response:
    async with connected(peer) as engine:
        transport = httpx.ASGITransport(build_app(engine, load(env={})))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            response = await client.post("/v1/completions", json=BODY)
        assert engine.open_requests() == 0
        return response


def test_no_choice_waits_for_another() -> None:
    async def go() -> None:
        async with ScriptedPeer() as peer:
            all_are_here = asyncio.Barrier(BODY["n"])

            async def answer(reply: Reply, asked: Asked) -> None:
                async with asyncio.timeout(PATIENCE):
                    await all_are_here.wait()
                await reply.events(text_chunk("a"), text_chunk("", "stop"), usage_chunk(1, 1))
                await reply.write(DONE)

            peer.answers["/v1/completions"] = answer
            body = (await post(peer)).json()
        assert [choice["text"] for choice in body["choices"]] == ["a", "a", "a"]
        assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4} | {
            "prompt_tokens_details": body["usage"]["prompt_tokens_details"]
        }

    asyncio.run(go())


@pytest.mark.parametrize("refused", [0, 2])
def test_one_that_is_refused_ends_the_others_and_has_its_status(refused: int) -> None:
    async def go() -> None:
        async with ScriptedPeer() as peer:
            all_are_here = asyncio.Barrier(BODY["n"])
            ended = asyncio.Event()

            async def answer(reply: Reply, asked: Asked) -> None:
                number = len(peer.generations()) - 1
                async with asyncio.timeout(PATIENCE):
                    await all_are_here.wait()
                if number == refused:
                    await reply.json({"error": {"message": "too many", "code": 429}}, 429, retry_after="7")
                else:
                    await reply.events(text_chunk("a"))
                    await reply.gone()
                    ended.set()

            peer.answers["/v1/completions"] = answer
            response = await post(peer)
            assert response.status_code == 429 and response.headers["retry-after"] == "7"
            async with asyncio.timeout(PATIENCE):
                await ended.wait()

    asyncio.run(go())
