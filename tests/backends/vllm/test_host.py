"""The whole way from the contract to where vLLM would be, and back: all of it is real but vLLM."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.vllm.real import save_adapter
from tests.generation import embed, generate_image, sample
from tests.waiting import PATIENCE, until
from weft.backends.adapters import Adapters
from weft.backends.contract import NotSupported
from weft.backends.model_text import open_model_text
from weft.backends.native import find_model
from weft.backends.vllm import host
from weft.backends.vllm.arguments import CPU, DriverOptions
from weft.backends.vllm.open_requests import OpenRequests
from weft.backends.vllm.vllm_engine import VllmEngine
from weft.config import load
from weft.engine.client import EngineClient
from weft.engine.wire import Start, receive
from weft.errors import InvalidRequest, ModelError
from weft.serving.image_request import image_model
from weft.types import (
    Event,
    FinishReason,
    ImageParams,
    LoadLora,
    ModelInfo,
    Output,
    Request,
    ResetPrefixCache,
    SamplingParams,
    StartProfile,
    UnloadLora,
)

DEADLY = 99
"""A prompt that begins so kills the first driver after two tokens."""
ENDLESS = 98
"""A prompt that begins so gets one token, and runs until it is aborted."""


class CountingDriver:
    """Answers every request with the numbers from its prompt's length on."""

    made: list[CountingDriver]

    def __init__(self, open_requests: OpenRequests) -> None:
        self.open_requests = open_requests
        self.requests: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.made.append(self)

    def failure(self) -> BaseException | None:
        return None

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            if request.adapter is not None and request.adapter.name == "broken":
                self.open_requests.fail(request.request_id, InvalidRequest("What is that?"))
                continue
            self._bring(request, len(request.output_token_ids))

    def _bring(self, request: Request, number: int) -> None:
        if request.request_id in self.aborted:
            return
        if request.prompt_token_ids[0] == DEADLY and number == 2 and len(self.made) == 1:
            self.open_requests.died(RuntimeError("it was deadly"))
            return
        is_last = number + 1 == request.params.max_tokens
        (self.running.discard if is_last else self.running.add)(request.request_id)
        event = Event(
            request_id=request.request_id,
            token_ids=[len(request.prompt_token_ids) + number],
            cached_tokens=0 if number == len(request.output_token_ids) else None,
            finish=FinishReason.LENGTH if is_last else None,
        )
        self.open_requests.bring([event])
        if not is_last and request.prompt_token_ids[0] != ENDLESS:
            asyncio.get_running_loop().call_later(0.001, self._bring, request, number + 1)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    def close(self) -> None:
        self.aborted += self.requests


class HostThread:
    """What is a process elsewhere."""

    pid: int | None = None

    def __init__(self) -> None:
        self.socket, self._theirs = socket.socketpair()
        self._folder = tempfile.TemporaryDirectory()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start = receive(self._theirs)
        assert isinstance(start, Start)
        orders = DriverOptions(kind=CPU, folder=self._folder.name)
        asyncio.run(host.serve(self._theirs, orders, start))

    def kill(self) -> None:
        self._theirs.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: float) -> str | None:
        self._thread.join(timeout_s)
        self._folder.cleanup()
        return None if self._thread.is_alive() else "the thread ended"


@pytest.fixture
def run_with_engine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[VllmEngine], Awaitable[None]]], None]:
    """Runs a scenario with an engine."""
    CountingDriver.made = []
    info = ModelInfo(
        name="tiny", max_model_len=64, logits_width=320, num_blocks=8, block_size=8, device="cpu", dtype="float32"
    )
    monkeypatch.setattr(host, "_import_vllm", lambda *_: None)
    monkeypatch.setattr(host, "_configured", lambda *_: None)
    monkeypatch.setattr(host, "model_info", lambda *_: info)
    monkeypatch.setattr(host, "_load", lambda config, stats, open_requests, *_: CountingDriver(open_requests))
    red = save_adapter(tmp_path / "red", tiny_model, 1)
    config = load({"model": str(tiny_model)}, env={})

    def run(scenario: Callable[[VllmEngine], Awaitable[None]]) -> None:
        async def whole() -> None:
            files = find_model(config)
            client = EngineClient(config, files, HostThread)
            await client.start()
            room = open_model_text(files, config.model)
            adapters = Adapters("tiny", files)
            engine = VllmEngine(CPU, client, room, adapters, takes_adapters=True, has_grammars=True)
            try:
                await engine.control(LoadLora("red", str(red)))
                await asyncio.wait_for(scenario(engine), PATIENCE)
            finally:
                await engine.close()

        asyncio.run(whole())

    return run


async def told(engine: VllmEngine, prompt: list[int], max_tokens: int = 5, **terms: Any) -> list[Output]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [delta async for delta in await engine.submit(sample(prompt, params, **terms))]


def tokens(deltas: list[Output]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_tokens_come_back_in_order_to_whom_they_are_for(run_with_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        answers = await asyncio.gather(*(told(engine, [5] * length) for length in (3, 10, 20)))
        assert [tokens(answer) for answer in answers] == [[n, n + 1, n + 2, n + 3, n + 4] for n in (3, 10, 20)]
        assert all(answer[-1].finish is FinishReason.LENGTH for answer in answers)
        assert engine.stats().open_requests == 0 and engine.health().ready

    run_with_engine(scenario)


def test_what_vllm_does_not_do_is_refused_by_its_name(run_with_engine: Any) -> None:
    image = ImageParams(width=4, height=4, steps=1, guidance_scale=1.0, seed=0)

    async def scenario(engine: VllmEngine) -> None:
        for work in (engine.submit(embed([5])), engine.submit(generate_image([5], image))):
            with pytest.raises(NotSupported, match="cpu-vllm cannot"):
                await work
        with pytest.raises(InvalidRequest, match="no image model") as refused:
            image_model(engine)
        assert "--engine" in refused.value.hint

    run_with_engine(scenario)


def test_a_request_takes_its_adapter_and_only_its_own_seed_with_it(run_with_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        await told(engine, [5], request_id="plain")
        await told(engine, [5], request_id="red", adapter="red", priority=3, cache_salt="s")
        async for _ in await engine.submit(sample([5], SamplingParams(max_tokens=2, seed=7), request_id="seeded")):
            pass
        (driver,) = CountingDriver.made
        plain, red, seeded = (driver.requests[name] for name in ("plain", "red", "seeded"))
        assert plain.adapter is None and plain.params.seed is None and plain.stop_token_ids == []
        assert red.adapter is not None and (red.adapter.name, red.adapter.number) == ("red", 1)
        assert (red.priority, red.cache_salt) == (3, "s")
        assert seeded.params.seed == 7
        with pytest.raises(InvalidRequest, match="no adapter 'blue'"):
            await told(engine, [5], adapter="blue")

    run_with_engine(scenario)


def test_an_adapter_that_vllm_cannot_read_is_refused_when_it_is_loaded(run_with_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        (red,) = engine.adapters
        with pytest.raises(ModelError, match=r"cannot use the adapter broken: What is that\?"):
            await engine.control(LoadLora("broken", red.path))
        assert list(engine.adapters) == [red]
        await engine.control(LoadLora("default", red.path))
        await told(engine, [5], request_id="by default")
        await told(engine, [5], request_id="as it is", adapter="")
        await engine.control(UnloadLora("default"))
        await told(engine, [5], request_id="no more")
        (driver,) = CountingDriver.made
        used = [driver.requests[name].adapter for name in ("by default", "as it is", "no more")]
        assert [adapter and adapter.number for adapter in used] == [3, None, None]

    run_with_engine(scenario)


def test_leaving_aborts(run_with_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        deltas = await engine.submit(
            sample([ENDLESS], SamplingParams(max_tokens=60, ignore_eos=True), request_id="left")
        )
        await anext(deltas)
        await deltas.aclose()
        (driver,) = CountingDriver.made
        await until(lambda: driver.aborted == ["left"], "the driver is told")
        assert engine.stats().open_requests == 0

    run_with_engine(scenario)


def test_what_was_delivered_goes_with_a_request_to_the_next_vllm(run_with_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        deltas = await told(engine, [DEADLY, 5, 5], request_id="r", adapter="red")
        assert tokens(deltas) == [3, 4, 5, 6, 7] and engine.stats().restarts == 1
        resumed = CountingDriver.made[1].requests["r"]
        assert resumed.output_token_ids == [3, 4] and resumed.adapter is not None
        assert engine.health().ready

    run_with_engine(scenario)


def test_what_an_operator_may_ask(run_with_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        assert await engine.control(ResetPrefixCache()) == "0"
        deltas = await engine.submit(sample([ENDLESS], SamplingParams(max_tokens=60, ignore_eos=True)))
        await anext(deltas)
        with pytest.raises(InvalidRequest, match="only while no request"):
            await engine.control(ResetPrefixCache())
        await deltas.aclose()
        with pytest.raises(InvalidRequest, match="profiler"):
            await engine.control(StartProfile("/nowhere"))

    run_with_engine(scenario)
