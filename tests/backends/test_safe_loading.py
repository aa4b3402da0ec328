"""Loading safely: planned first, tried with less where it does not fit, watched for stalls. And a real engine in too
little memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.generation import sample
from tests.waiting import PATIENCE, until, wait_until
from weft import logs
from weft.backends import safe_loading
from weft.backends.contract import Engine, Health
from weft.backends.native import start_native
from weft.backends.safe_loading import Loading, LoadStage, check_load, load_safely
from weft.checkpoint.model_files import ModelFiles, dummy_files
from weft.engine.process import LaunchedEngine, launch_engine
from weft.errors import EngineFault, ModelError, OutOfMemory, Unavailable, WeftError
from weft.hub.progress import Report
from weft.machine.devices import Device
from weft.machine.hardware import Cpu, Machine, Memory
from weft.machine.memory import GIB
from weft.options import BackendOptions, CacheOptions, Config, EngineOptions, ModelOptions
from weft.types import SamplingParams

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip


class StandIn:
    """As much of an engine as loading sees."""

    def __init__(self, config: Config | None = None, reasons: list[str] | None = None) -> None:
        self.config = config
        self.reasons = reasons or []
        self.closed = False

    def health(self) -> Health:
        return Health(False, self.reasons.pop(0)) if self.reasons else Health(True)

    async def close(self) -> None:
        self.closed = True


class Starter:
    """Starts an engine where `fits`, and is short of memory elsewhere."""

    def __init__(self, fits: Callable[[Config], bool], error: Callable[[], Exception] | None = None) -> None:
        self.fits = fits
        self.error = error or (lambda: OutOfMemory("Too much."))
        self.tried: list[Config] = []

    async def __call__(self, config: Config) -> Engine:
        self.tried.append(config)
        if self.fits(config):
            return StandIn(config)  # type: ignore[return-value]
        raise self.error()


def gpu(total_gib: float = 80, free_gib: float | None = None) -> Callable[[], Machine]:
    free = int((total_gib if free_gib is None else free_gib) * GIB)
    device = Device(kind="cuda", index=0, name="NVIDIA Something", total=int(total_gib * GIB), free=free)
    cpu = Cpu(cores=8, usable_cores=8, features=())
    return lambda: Machine(cpu=cpu, memory=Memory(total=64 * GIB, free=60 * GIB), devices=(device,))


@pytest.fixture
def llama_8b(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    model = ModelOptions(model=str(tmp_path), load_format="dummy", image_model="none")
    return Config(model=model, backend=BackendOptions(engine="native"))


ELSEWHERE = Config(backend=BackendOptions(engine="remote"))
"""An engine that holds no model here: nothing is planned."""


def untuned(config: Config) -> Config:
    return replace(config, backend=replace(config.backend, allow_auto_tuning=False))


def load(start: Any, config: Config, **options: Any) -> StandIn:
    engine: Any = asyncio.run(load_safely(start, config, **options))
    return engine


# What fits is started as it was asked for.


def test_what_fits_is_started_once_as_it_was_asked_for(llama_8b: Config, caplog: pytest.LogCaptureFixture) -> None:
    starter = Starter(lambda config: True)
    with caplog.at_level(logging.INFO, "weft"):
        engine = load(starter, llama_8b, machine=gpu())
    assert starter.tried == [llama_8b] and engine.config == llama_8b
    [plan] = [record for record in caplog.records if record.getMessage() == "plan"]
    told = vars(plan)[logs.FIELDS]
    assert told["weights_gib"] == pytest.approx(14.96, abs=0.01) and told["largest_context"] == 131072
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_engine_elsewhere_is_not_planned() -> None:
    def no_machine() -> Machine:
        raise AssertionError("nobody needs to know")

    starter = Starter(lambda config: True)
    load(starter, ELSEWHERE, machine=no_machine)
    assert starter.tried == [ELSEWHERE]


# The ladder.


def test_it_is_tried_with_less_until_it_fits(llama_8b: Config, caplog: pytest.LogCaptureFixture) -> None:
    starter = Starter(lambda config: 0 < config.model.max_model_len <= 20000 and config.scheduler.max_num_seqs == 128)
    with caplog.at_level(logging.INFO, "weft"):
        engine = load(starter, llama_8b, machine=gpu())
    tried = [
        (config.cache.gpu_memory_utilization, config.model.max_model_len, config.scheduler.max_num_seqs)
        for config in starter.tried
    ]
    assert tried == [
        (0.75, 0, 0),
        (0.65, 0, 0),
        (0.65, 65536, 0),
        (0.65, 32768, 0),
        (0.65, 16384, 0),
        (0.65, 16384, 128),
    ]
    assert engine.config is starter.tried[-1]
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("It is tried")]
    assert told[-1] == (
        "It is tried with less: --max-model-len 16384 --gpu-memory-utilization 0.65 --max-num-seqs 128 "
        "--max-num-batched-tokens 4096"
    )
    assert caplog.text.count("It does not fit (") == 5 and "(as asked): Too much." in caplog.text


def test_what_the_plan_knows_not_to_fit_is_never_started(llama_8b: Config) -> None:
    """16 GiB of cache for the whole context, 15 of weights: no share of 28 GiB holds them."""
    starter = Starter(lambda config: True)
    asked = replace(llama_8b, model=replace(llama_8b.model, max_model_len=131072))
    engine = load(starter, asked, machine=gpu(28))
    assert len(starter.tried) == 1 and engine.config is starter.tried[0]
    assert 2048 <= engine.config.model.max_model_len < 131072
    assert engine.config.cache.gpu_memory_utilization == 0.9


def test_an_end_comes_with_every_try_and_its_reason(llama_8b: Config) -> None:
    starter = Starter(lambda config: False)
    with pytest.raises(OutOfMemory, match="also not with smaller settings") as caught:
        load(starter, llama_8b, machine=gpu())
    assert caught.value.message.count("Too much.") == len(starter.tried) == 8


def test_any_engine_is_tried_with_less(caplog: pytest.LogCaptureFixture) -> None:
    starter = Starter(lambda config: config.model.max_model_len == 4096)
    load(starter, ELSEWHERE)
    assert [config.model.max_model_len for config in starter.tried] == [0, 8192, 4096]


def test_weights_that_are_too_much_are_refused_before_anything_is_started(llama_8b: Config) -> None:
    starter = Starter(lambda config: True)
    with pytest.raises(OutOfMemory, match=r"weights of .* take 15.0 GiB as bfloat16; 10.0 GiB are free"):
        load(starter, llama_8b, machine=gpu(80, 10))
    assert starter.tried == []


def test_a_context_that_the_model_does_not_have_is_not_made_shorter(llama_8b: Config) -> None:
    asked = replace(llama_8b, model=replace(llama_8b.model, max_model_len=200_000))
    with pytest.raises(OutOfMemory, match="beyond the model's 131072"):
        load(Starter(lambda config: True), asked, machine=gpu())


# Without auto tuning.


def test_without_auto_tuning_it_fails_at_once_with_flags_that_fit(llama_8b: Config) -> None:
    starter = Starter(lambda config: True)
    asked = replace(llama_8b, model=replace(llama_8b.model, max_model_len=131072))
    with pytest.raises(OutOfMemory, match="needs 8193 cache blocks") as caught:
        load(starter, untuned(asked), machine=gpu(28))
    assert starter.tried == []
    advice = caught.value.hint.partition("By the plan these fit: ")[2]
    match = re.fullmatch(r"--max-model-len (\d+) --gpu-memory-utilization (\d\.\d+)\.", advice)
    assert match, caught.value.hint
    advised = replace(
        asked,
        model=replace(asked.model, max_model_len=int(match[1])),
        cache=replace(asked.cache, gpu_memory_utilization=float(match[2])),
    )
    load(starter, untuned(advised), machine=gpu(28))
    assert starter.tried == [untuned(advised)]


def test_without_auto_tuning_an_engine_that_is_short_is_not_asked_again(llama_8b: Config) -> None:
    starter = Starter(lambda config: False)
    with pytest.raises(OutOfMemory, match="Too much") as caught:
        load(starter, untuned(llama_8b), machine=gpu())
    assert len(starter.tried) == 1 and caught.value.hint == "By the plan these fit: --gpu-memory-utilization 0.65."


# By type, not by words.


@pytest.mark.parametrize(
    "error",
    [
        MemoryError,
        lambda: MemoryError("Unable to allocate 4.00 GiB"),
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["MemoryError", "MemoryError with words", "torch"],
)
def test_a_shortage_is_known_by_its_type(error: Callable[[], Exception]) -> None:
    starter = Starter(lambda config: config.model.max_model_len == 8192, error)
    load(starter, ELSEWHERE)
    assert len(starter.tried) == 2
    with pytest.raises(OutOfMemory):
        load(starter, untuned(ELSEWHERE))


@pytest.mark.parametrize(
    "error",
    [
        lambda: RuntimeError("CUDA out of memory"),
        lambda: ModelError("out of memory"),
        lambda: EngineFault("The engine process ended while it started (killed by SIGKILL)."),
    ],
    ids=["RuntimeError", "ModelError", "EngineFault"],
)
def test_words_make_no_shortage(error: Callable[[], Exception]) -> None:
    starter = Starter(lambda config: False, error)
    with pytest.raises(type(error())):
        load(starter, ELSEWHERE)
    assert len(starter.tried) == 1


def test_an_engine_that_the_kernel_ended_for_want_of_memory_was_short_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = Starter(lambda config: len(starter.tried) == 3, lambda: EngineFault("killed by SIGKILL"))
    monkeypatch.setattr(safe_loading, "oom_kills", lambda: len(starter.tried))
    load(starter, ELSEWHERE)
    assert len(starter.tried) == 3


# Stages and stalls.


class Clock:
    """Stands still until it is told to move on, and counts how often it is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.num_looks = 0
        monkeypatch.setattr(safe_loading, "time", SimpleNamespace(monotonic=self._look))
        for name in ("POLL_SECONDS", "TICK_SECONDS"):
            monkeypatch.setattr(safe_loading, name, 0.01)

    def _look(self) -> float:
        self.num_looks += 1
        return self.seconds


def test_every_stage_is_told(llama_8b: Config) -> None:
    heard: list[LoadStage] = []

    async def start(config: Config) -> Engine:
        return StandIn(config, ["starting", "starting"])  # type: ignore[return-value]

    load(start, llama_8b, machine=gpu(), report=heard.append)
    assert [stage.stage for stage in heard] == ["resolve", "plan", "load", "warm up", "warm up", "ready"]
    assert heard[2].note == "as asked"


def test_the_hub_may_take_its_time(llama_8b: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its own limit for downloads, and knows whether they move."""

    clock = Clock(monkeypatch)

    def find_slowly(config: Config, report: Report) -> ModelFiles:
        clock.seconds += 3600
        looks = clock.num_looks
        wait_until(lambda: clock.num_looks > looks + 10, "the load is looked at")
        return dummy_files(Path(config.model.model))

    monkeypatch.setattr(safe_loading, "find_model", find_slowly)
    load(Starter(lambda config: True), llama_8b, machine=gpu(), stall_s=1)


def test_a_start_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def hang(config: Config) -> Engine:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")
        raise AssertionError

    monkeypatch.setattr(safe_loading, "LATER_SECONDS", 0.1)
    monkeypatch.setattr(safe_loading, "TICK_SECONDS", 0.05)
    with pytest.raises(Unavailable, match="stage 'load'"):
        load(hang, replace(ELSEWHERE, engine=EngineOptions(start_timeout_s=0.1)))
    assert ended == ["ended"]


def test_an_engine_that_never_gets_ready_is_closed(llama_8b: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class NeverReady(StandIn):
        def health(self) -> Health:
            clock.seconds += 0.25
            return Health(False, "starting")

    engine = NeverReady()

    async def start(config: Config) -> Engine:
        return engine  # type: ignore[return-value]

    with pytest.raises(Unavailable, match="stage 'warm up'"):
        load(start, llama_8b, machine=gpu(), stall_s=1)
    assert engine.closed


def test_a_load_that_is_called_off_leaves_nothing_behind() -> None:
    made: list[StandIn] = []
    begun = asyncio.Event()

    async def slow(config: Config) -> Engine:
        begun.set()
        # As an engine may, it is ready all the same.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        made.append(StandIn())
        return made[0]  # type: ignore[return-value]

    async def call_off() -> None:
        task = asyncio.create_task(load_safely(slow, ELSEWHERE))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made[0].closed

    asyncio.run(call_off())


def test_a_load_may_go_on_by_itself() -> None:
    async def watch() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def start(config: Config) -> Engine:
            begun.set()
            await go_on.wait()
            return StandIn(config)  # type: ignore[return-value]

        under_way = Loading(start, ELSEWHERE)
        await begun.wait()
        assert under_way.stage.stage == "load" and not under_way.is_done
        go_on.set()
        assert isinstance(await under_way.engine(), StandIn)
        assert under_way.stage.stage == "ready" and under_way.is_done
        for event in (begun, go_on):
            event.clear()
        called_off = Loading(start, ELSEWHERE)
        await begun.wait()
        await called_off.cancel()
        assert called_off.is_done

    asyncio.run(watch())


def test_a_check_starts_nothing(llama_8b: Config) -> None:
    plan = asyncio.run(check_load(llama_8b, machine=gpu()))
    assert plan is not None and plan.problem is None and plan.needed_bytes > 15 * GIB
    with pytest.raises(OutOfMemory):
        asyncio.run(check_load(llama_8b, machine=gpu(10)))
    assert asyncio.run(check_load(ELSEWHERE)) is None


def test_a_machine_that_takes_long_to_look_at_holds_up_nobody(llama_8b: Config) -> None:
    async def check() -> None:
        looked, goes_on = threading.Event(), threading.Event()

        def machine() -> Machine:
            looked.set()
            assert goes_on.wait(PATIENCE), "the loop stood still"
            return gpu()()

        checking = asyncio.create_task(check_load(llama_8b, machine=machine))
        await until(looked.is_set, "the machine is looked at")
        goes_on.set()
        assert await checking is not None

    asyncio.run(check())


# A real engine.


def test_a_real_engine_in_too_little_memory_gets_a_smaller_cache(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This process may take what it likes, the engine's no more than 3 GiB: its own plan refuses the cache of 8 GiB.
    The process of the first try is gone when the second begins."""
    launched: list[LaunchedEngine] = []

    def launch() -> LaunchedEngine:
        assert all(engine.wait(0) is not None for engine in launched)
        launched.append(launch_engine("tests.backends.limited_engine", str(3 * GIB)))
        return launched[-1]

    asked = Config(
        model=ModelOptions(model=str(tiny_model), image_model="none", device="cpu", dtype="bfloat16"),
        cache=CacheOptions(kv_cache_memory_mb=8192),
        backend=BackendOptions(engine="native"),
    )
    cpu = Cpu(cores=2, usable_cores=2, features=())

    async def serve() -> None:
        start = partial(start_native, launch=launch)
        machine = Machine(cpu=cpu, memory=Memory(total=64 * GIB, free=64 * GIB))
        engine = await load_safely(start, asked, machine=lambda: machine)
        try:
            assert engine.model.memory.kv <= 512 * 2**20
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            outputs = await engine.submit(sample([5, 6, 7], params))
            assert sum([len(output.token_ids) async for output in outputs]) == 3
        finally:
            await engine.close()

    with caplog.at_level(logging.WARNING, "weft"):
        asyncio.run(serve())
    assert len(launched) == 2 and launched[1].wait(PATIENCE) is not None
    assert "the cache 8192 MiB" in caplog.text and "--kv-cache-memory-mb 0" in caplog.text


def test_a_real_engine_without_auto_tuning_says_what_fits(tiny_model: Path) -> None:
    asked = untuned(
        Config(
            model=ModelOptions(model=str(tiny_model), image_model="none", device="cpu", dtype="bfloat16"),
            cache=CacheOptions(kv_cache_memory_mb=2**30),
            backend=BackendOptions(engine="native"),
        )
    )
    with pytest.raises(WeftError) as caught:
        load(start_native, asked)
    assert isinstance(caught.value, OutOfMemory)
    assert re.search(r"--kv-cache-memory-mb \d+ or less", caught.value.hint)
    assert "By the plan these fit: --kv-cache-memory-mb 0" in caught.value.hint
