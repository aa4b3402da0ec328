"""A peer that is killed in mid-stream, with Weft's own engine behind it: the client reads on."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.openai_server.peer import Asked, Reply, ScriptedPeer
from tests.backends.openai_server.proxy import cutting_proxy
from tests.e2e.tiny_server import NAME, TinyServer
from tests.generation import sample
from tests.waiting import until
from weft.api.app import build_app
from weft.backends import failover, start_engine
from weft.backends.contract import Engine
from weft.backends.failover import FailoverEngine
from weft.backends.openai_server import remote_engine
from weft.config import load
from weft.errors import Unavailable
from weft.types import SamplingParams

ALONE = ("--image-model", "none")
BODY: dict[str, Any] = {
    "model": NAME,
    "prompt": "The weft",
    "max_tokens": 60,
    "temperature": 0.9,
    "seed": 5,
    "ignore_eos": True,
}
HOUR_S = 3600.0


def settings(url: str, model: Path, **more: Any) -> dict[str, Any]:
    """No test lives to see the heartbeat timeout: what happens does not happen by it."""
    small = {"image_model": "none", "num_blocks": 64, "threads": 1, "served_model_name": NAME}
    places = {"engine": "remote,native", "engine_url": url, "model": str(model)}
    return {**places, "heartbeat_timeout_s": HOUR_S, **small, **more}


@pytest.mark.parametrize("has_tokens", [True, False])
def test_killed_in_mid_stream_the_native_engine_goes_on_at_once(
    has_tokens: bool, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model's tokenizer the answer goes on as if nothing had happened. Text alone cannot be continued: that
    stream ends with an error, the request that finds nobody there is told to come again, and the next is answered."""
    for name in ("PROBE_S", "PROBE_WHEN_LOST_S"):
        monkeypatch.setattr(remote_engine, name, HOUR_S)  # A request alone finds out that the peer is gone.

    async def go(peer: TinyServer) -> tuple[str, str]:
        async with (
            httpx.AsyncClient(base_url=peer.url, timeout=None) as directly,
            cutting_proxy(peer.url, kill=peer.process.kill) as url,
        ):
            whole: str = (await directly.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
            flags = settings(url, tiny_model, tokenizer=str(tiny_model) if has_tokens else "")
            engine = await start_engine(load(flags, env={}))
            transport = httpx.ASGITransport(build_app(engine, load(env={})))
            try:
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
                    response = await client.post("/v1/completions", json={**BODY, "stream": True})
                    if not has_tokens:
                        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
                    again = await client.post("/v1/completions", json=BODY)
                    assert again.json()["choices"][0]["text"] == whole
                    await until(lambda: engine.health().ready)
                    assert engine.name == "native" and engine.stats().open_requests == 0
                return whole, response.text
            finally:
                await engine.close()

    with TinyServer(tiny_model, *ALONE) as peer:
        whole, stream = asyncio.run(go(peer))
    text = text_of(stream)
    if has_tokens:
        assert text == whole and '"error"' not in stream
    else:
        assert whole.startswith(text) and text != whole and "lost in the middle" in stream
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "The engine native has taken over from remote." in said
    assert len([message for message in said if message.startswith("The engine remote is lost")]) == 1


def text_of(stream: str) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


def test_a_peer_that_is_only_unwell_is_not_lost_at_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come back: it has the time that any engine has."""
    monkeypatch.setattr(failover, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(remote_engine, "PROBE_WHEN_LOST_S", 0.01)
    judged: list[bool] = []
    judge = FailoverEngine.lost

    def lost(self: FailoverEngine, engine: Engine) -> bool:
        judged.append(judge(self, engine))
        return judged[-1]

    monkeypatch.setattr(FailoverEngine, "lost", lost)

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
                judged.clear()
                num_asked = len(peer.asked)
                await until(lambda: len(peer.asked) >= num_asked + 3, "the peer is asked how it is, again and again")
                await until(lambda: len(judged) >= 10, "the engine is judged, again and again")
                assert not any(judged) and engine.name == "remote" and not engine.health().ready
            finally:
                await engine.close()

    asyncio.run(go())
