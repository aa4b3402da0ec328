"""A peer that is killed in mid-stream, with Weft's own engine behind it: the client reads on."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.openai_server.peer import Asked, Reply, ScriptedPeer
from tests.e2e.tiny_server import NAME, TinyServer
from tests.generation import sample
from weft.api.app import build_app
from weft.backends import start_engine
from weft.config import load
from weft.errors import Unavailable
from weft.types import SamplingParams

ALONE = ("--image-model", "none")
BODY: dict[str, Any] = {"model": NAME, "prompt": "The weft", "max_tokens": 400, "temperature": 0.9, "seed": 5}


def settings(url: str, model: Path, **more: Any) -> dict[str, Any]:
    small = {"image_model": "none", "num_blocks": 64, "threads": 1, "served_model_name": NAME}
    return {"engine": "remote,native", "engine_url": url, "model": str(model), **small, **more}


@pytest.mark.parametrize("has_tokens", [True, False])
def test_killed_in_mid_stream_the_native_engine_goes_on_at_once(
    has_tokens: bool, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the model's tokenizer the answer goes on as if nothing had happened. Text alone cannot be continued: that
    stream ends with an error, the request that finds nobody there is told to come again, and the next is answered."""

    async def go(peer: TinyServer) -> tuple[list[str], float]:
        flags = settings(peer.url, tiny_model, tokenizer=str(tiny_model) if has_tokens else "")
        engine = await start_engine(load(flags, env={}))
        transport = httpx.ASGITransport(build_app(engine, load(env={})))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                body = {**BODY, "ignore_eos": True}
                whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
                reading = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": True}))
                while engine.stats().open_requests == 0 or engine.stats().running == 0:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                peer.process.kill()
                killed = time.time()
                response = await reading
                if not has_tokens:
                    assert (await client.post("/v1/completions", json=body)).status_code == 503
                again = await client.post("/v1/completions", json=body)
                assert again.json()["choices"][0]["text"] == whole
                assert engine.name == "native" and engine.health().ready and engine.stats().open_requests == 0
            return [whole, response.text], killed
        finally:
            await engine.close()

    with TinyServer(tiny_model, *ALONE) as peer:
        (whole, stream), killed = asyncio.run(go(peer))
    text = text_of(stream)
    if has_tokens:
        assert text == whole and '"error"' not in stream
    else:
        assert whole.startswith(text) and text != whole and "lost in the middle" in stream
    said = {record.getMessage(): record for record in caplog.records if record.levelno >= logging.WARNING}
    assert "The engine native has taken over from remote." in said
    [lost] = [record for message, record in said.items() if message.startswith("The engine remote is lost")]
    assert lost.created - killed < 3, "long before --heartbeat-timeout-s"


def text_of(stream: str) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


def test_a_peer_that_is_only_unwell_is_not_lost_at_once(tiny_model: Path) -> None:
    """It may come back: it has the time that any engine has."""

    async def hangs_up(reply: Reply, asked: Asked) -> None:
        reply.cut()

    async def go() -> None:
        async with ScriptedPeer() as peer:
            peer.answers["/v1/completions"] = hangs_up
            engine = await start_engine(load(settings(peer.url, tiny_model), env={}))
            try:
                peer.is_well = False
                with pytest.raises(Unavailable):
                    await engine.submit(sample("hi", SamplingParams(max_tokens=4)))
                await asyncio.sleep(1.2)
                assert engine.name == "remote"
            finally:
                await engine.close()

    asyncio.run(go())
