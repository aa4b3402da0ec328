"""The contract for callers that wait, over an engine that plays a script: words, defaults, pieces, figures, loads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from msgspec.structs import replace

from tests.api.scripted_engine import ScriptedEngine, Step, answer
from tests.waiting import PATIENCE, until, wait_until
from weft.backends import BaseEngine, InferMetrics, create_engine
from weft.backends.contract import Abilities
from weft.checkpoint.adapter_files import adapter_paths
from weft.compat import hosted
from weft.compat.hosted import HostedEngine
from weft.compat.keywords import SAMPLING_DEFAULTS
from weft.engine_stats import MemoryLedger
from weft.errors import ConfigError, ContextTooLong, InvalidRequest, ModelError, OutOfMemory, Unavailable
from weft.models_file import MEANINGLESS
from weft.options import Config
from weft.types import Adapter, FinishReason, Output, SamplingParams, Usage

pytestmark = pytest.mark.usefixtures("no_weft_environment")

HANGING: list[Step] = [Output(text="a", token_ids=[1]), lambda: asyncio.Event().wait()]


class Stage:
    """What the engine named scripted is made of, and what it was started with."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.configs: list[Config] = []
        self.failures: list[Exception] = []
        self.may_start = threading.Event()
        self.may_start.set()

    async def start(self, config: Config) -> ScriptedEngine:
        self.configs.append(config)
        await until(self.may_start.is_set, "the engine may start")
        if self.failures:
            raise self.failures.pop()
        return self.engine


@pytest.fixture
def stage(add_engine: Callable[..., None]) -> Stage:
    stage = Stage()

    async def start(config: Config) -> ScriptedEngine:
        return await stage.start(config)

    add_engine("scripted", start)
    return stage


@pytest.fixture
def engine(stage: Stage) -> Iterator[BaseEngine]:
    engine = create_engine("scripted")
    engine.load_model("some/model")
    yield engine
    engine.unload_model()


def test_the_signatures_are_those_that_callers_know() -> None:
    """And every one of them tells what it returns."""
    known = {
        "load_model": ("self model_path adapter_path kwargs", None),
        "infer": ("self prompt kwargs", Generator[str, None, None]),
        "unload_model": ("self", None),
        "get_memory_usage": ("self", dict[str, float]),
        "get_model_info": ("self", dict[str, Any]),
        "health_check": ("self", bool),
        "async_infer": ("self prompt kwargs", AsyncGenerator[str, None]),
        "infer_batch": ("self prompts kwargs", list[str]),
        "abort": ("self request_id", bool),
    }
    for kind in (BaseEngine, HostedEngine):
        for name, (parameters, returns) in known.items():
            method = getattr(kind, name)
            assert " ".join(inspect.signature(method).parameters) == parameters
            assert get_type_hints(method)["return"] == (type(None) if returns is None else returns)
    assert get_type_hints(BaseEngine.is_async.fget)["return"] is bool  # type: ignore[attr-defined]
    assert BaseEngine.__abstractmethods__ == {"load_model", "infer", "unload_model", "get_memory_usage"}


def test_infer_is_a_generator_and_async_infer_an_asynchronous_one(engine: BaseEngine) -> None:
    chunks = engine.infer("hi")
    assert inspect.isgenerator(chunks)
    assert list(chunks) == ["Hello", ", ", "world"], "as they come"

    async def scenario() -> list[str]:
        chunks = engine.async_infer("hi")
        assert inspect.isasyncgen(chunks)
        return [chunk async for chunk in chunks]

    assert asyncio.run(scenario()) == ["Hello", ", ", "world"]
    assert engine.is_async


def test_what_is_not_said_is_the_same_for_every_engine(stage: Stage, engine: BaseEngine) -> None:
    list(engine.infer("hi"))
    assert stage.engine.submitted[0].params == SamplingParams(
        temperature=0.7, top_p=0.9, max_tokens=512, repetition_penalty=1.1
    )
    assert stage.engine.submitted[0].prompt == list(b"hi")
    stage.engine.model = replace(stage.engine.model, max_model_len=10)
    stage.engine.abilities = Abilities(repetition_penalty=False)
    list(engine.infer("hi"))
    assert stage.engine.submitted[1].params == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8)
    assert SAMPLING_DEFAULTS == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "repetition_penalty": 1.1}


def test_every_word_arrives(stage: Stage, engine: BaseEngine) -> None:
    words = {"temperature": 0, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1, "seed": 4, "min_p": 0.25}
    list(engine.infer("hi", max_new_tokens=5, stop="END", request_id="mine", priority=2, cache_salt="s", **words))
    submitted = stage.engine.submitted[0]
    assert submitted.params == SamplingParams(max_tokens=5, stop=("END",), **words)  # type: ignore[arg-type]
    assert (submitted.request_id, submitted.priority, submitted.cache_salt) == ("mine", 2, "s")
    list(engine.infer("hi", stop=["a", "b"]))
    list(engine.infer("hi", stop=None))
    assert [one.params.stop for one in stage.engine.submitted[1:]] == [("a", "b"), ()]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ({"temprature": 1}, "'temprature'.*Did you mean 'temperature'"),
        ({"max_new_token": 1}, "Did you mean 'max_new_tokens'"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": 5}, "stop"),
        ({"priority": "first"}, "priority"),
        ({"lora_name": "mine"}, "lora_name is not supported by the engine scripted"),
    ],
)
def test_a_word_that_cannot_be_is_refused_and_named(
    stage: Stage, engine: BaseEngine, words: dict[str, Any], names: str
) -> None:
    stage.engine.abilities = Abilities(lora=False)
    for call in (
        lambda: list(engine.infer("hi", **words)),
        lambda: engine.infer_batch(["hi"], **words),
    ):
        with pytest.raises(InvalidRequest, match=names):
            call()
    assert not stage.engine.submitted


@pytest.mark.parametrize(("prompt", "words"), [("", {}), ("Hi", {"temperature": -1}), ("Hi", {"colour": "red"})])
def test_a_refusal_is_the_value_error_that_callers_from_elsewhere_catch(
    engine: BaseEngine, prompt: str, words: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as caught:
        engine.infer(prompt, **words)
    assert isinstance(caught.value, InvalidRequest) and caught.value.status == 400
    assert issubclass(ContextTooLong, ValueError) and not issubclass(Unavailable, ValueError)


def test_a_prompt_that_cannot_be_never_reaches_the_engine(stage: Stage, engine: BaseEngine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        engine.infer("")
    with pytest.raises(ContextTooLong, match="1000"):
        engine.infer("x" * 1000)
    with pytest.raises(ContextTooLong, match="max_tokens"):
        engine.infer("x" * 900, max_tokens=200)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.infer_batch(["fine", ""])
    assert not stage.engine.submitted


def test_the_size_of_pieces_is_the_callers_own(stage: Stage, engine: BaseEngine) -> None:
    """The engine is told with every request, and sees it change."""
    assert engine.stream_chunk_size == 0
    list(engine.infer("hi"))
    told = stage.engine.submitted[-1].chunk_size
    assert told is not None and told.tokens == 0
    for size in (99, 1, 0, -3):
        engine.stream_chunk_size = size
        assert engine.stream_chunk_size == told.tokens == max(1, size)


class Clock:
    """Stands still until it is told to move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(hosted, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

    async def quarter(self) -> None:
        self.seconds += 0.25

    async def half(self) -> None:
        self.seconds += 0.5


def test_figures_of_every_request(stage: Stage, engine: BaseEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stage.engine.script = [
        clock.quarter,
        Output(text="a", token_ids=[1], queue_seconds=0.01),
        clock.half,
        Output(
            text="bc", token_ids=[2, 3], finish=FinishReason.LENGTH, usage=Usage(prompt_tokens=2, completion_tokens=3)
        ),
    ]
    seen: list[InferMetrics] = []
    list(engine.infer("hi", request_id="mine", on_metrics=seen.append))
    assert engine.last_metrics == seen[0]
    metrics = seen[0]
    assert (metrics.request_id, metrics.finish) == ("mine", FinishReason.LENGTH)
    assert (metrics.prompt_tokens, metrics.completion_tokens, metrics.queue_seconds) == (2, 3, 0.01)
    assert (metrics.ttft_seconds, metrics.generation_seconds, metrics.tokens_per_second) == (0.25, 0.75, 4)
    engine.infer_batch(["a", "b"], request_id="two", on_metrics=seen.append)
    assert [one.request_id for one in seen[1:]] == ["two-0", "two-1"]
    assert all(one.completion_tokens == 3 and one.ttft_seconds >= 0.25 for one in seen[1:])
    stage.engine.script = HANGING
    chunks = engine.infer("hi", on_metrics=seen.append)
    next(chunks)
    chunks.close()
    assert (seen[-1].finish, seen[-1].completion_tokens) == (FinishReason.ABORT, 1)
    stage.engine.script = [Output(text="a", token_ids=[1]), Output(finish=FinishReason.ERROR, error="broken")]
    with pytest.raises(Exception, match="broken"):
        list(engine.infer("hi", on_metrics=seen.append))
    assert seen[-1].finish is FinishReason.ERROR
    assert len(seen) == 5, "once for every request"


def test_a_slow_reader_does_not_make_the_engine_slow(
    stage: Stage, engine: BaseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gives the last token while the first is read, and only its own time counts."""
    clock, all_given = Clock(monkeypatch), threading.Event()

    async def tell() -> None:
        all_given.set()

    stage.engine.script = [Output(text="Hello, ", token_ids=[1]), clock.half, *answer("world"), tell]
    chunks = engine.infer("hi")
    first = next(chunks)
    assert all_given.wait(PATIENCE)
    clock.seconds += 3600
    assert "".join([first, *chunks]) == "Hello, world"
    assert engine.last_metrics is not None and engine.last_metrics.generation_seconds == 0.5


def test_a_batch_is_asked_for_at_once(stage: Stage, engine: BaseEngine) -> None:
    async def until_all_are_asked_for() -> None:
        await until(lambda: len(stage.engine.submitted) == 20, "all are asked for")

    stage.engine.script = [until_all_are_asked_for, *answer("done")]
    assert engine.infer_batch([f"prompt {number}" for number in range(20)]) == ["done"] * 20


def test_abort_by_id(stage: Stage, engine: BaseEngine) -> None:
    stage.engine.script = HANGING
    chunks = engine.infer("hi", request_id="mine")
    assert next(chunks) == "a"
    assert not engine.abort("yours")
    aborting = threading.Thread(target=engine.abort, args=["mine"])
    aborting.start()
    assert list(chunks) == []
    aborting.join(PATIENCE)
    assert engine.last_metrics is not None and engine.last_metrics.finish is FinishReason.ABORT
    assert not stage.engine.open


def test_abort_of_a_batch_and_of_one_in_it(stage: Stage, engine: BaseEngine) -> None:
    stage.engine.script = HANGING
    seen: list[InferMetrics] = []
    done: list[list[str]] = []

    def ask() -> None:
        done.append(engine.infer_batch(["x", "y", "z"], request_id="two", on_metrics=seen.append))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: len(stage.engine.open) == 3)
    with pytest.raises(InvalidRequest, match="'two-1' already"):
        next(engine.infer("hi", request_id="two-1"))
    with pytest.raises(InvalidRequest, match="'two-0' already"):
        engine.infer_batch(["x"], request_id="two")
    assert engine.abort("two-1") and not engine.abort("two-1") and not engine.abort("two-3")
    wait_until(lambda: len(stage.engine.open) == 2)
    assert asking.is_alive(), "the others go on"
    assert engine.abort("two")
    asking.join(PATIENCE)
    assert done == [["a", "a", "a"]] and not stage.engine.open
    assert [one.finish for one in seen] == [FinishReason.ABORT] * 3
    assert not engine.abort("two") and not engine.abort("two-0")
    stage.engine.script = answer("done")
    assert engine.infer_batch(["x"], request_id="two") == ["done"] and engine.infer_batch([]) == []


def test_a_model_can_be_unloaded_twice_and_loaded_again(stage: Stage) -> None:
    engine = create_engine("scripted")
    assert engine.get_model_info() == {"is_loaded": False, "engine": "HostedEngine"}
    assert not engine.health_check()
    with pytest.raises(Unavailable, match="load_model"):
        engine.infer("hi")
    for _ in range(2):
        engine.load_model("some/model")
        assert engine.health_check() and engine.get_model_info()["is_loaded"]
        assert list(engine.infer("hi"))
        engine.unload_model()
        engine.unload_model()
        assert stage.engine.closed and not engine.health_check() and not engine.abort("x")
        with pytest.raises(Unavailable, match="load_model"):
            engine.infer("hi")
    engine.load_model("one")
    first, stage.engine = stage.engine, ScriptedEngine()
    first.closed = False
    engine.load_model("two")
    assert first.closed and stage.configs[-1].model.model == "two"
    engine.unload_model()


def test_memory_is_told_in_shares_and_gibibytes(stage: Stage, engine: BaseEngine) -> None:
    stage.engine.model = replace(stage.engine.model, memory=MemoryLedger(total=8 << 30))
    stage.engine.memory = (3 << 30, 4 << 30)
    assert engine.get_memory_usage() == {
        "allocated_gb": 3.0,
        "reserved_gb": 4.0,
        "total_gb": 8.0,
        "utilization": 0.375,
    }
    engine.unload_model()
    assert set(engine.get_memory_usage().values()) == {0.0}


def test_settings_by_weft_s_names_and_those_of_callers_from_elsewhere(stage: Stage) -> None:
    engine = create_engine("scripted", gpu_memory_utilization=0.5, stream_chunk_size=0, max_model_len=None)
    assert engine.stream_chunk_size == 1
    engine.load_model(
        "m",
        max_model_len=64,
        tensor_parallel_size=2,
        quantization=None,
        enable_prefix_caching=False,
        kv_cache_dtype="fp8",
        skip_vram_check=True,
        trust_remote_code=False,
        stream_chunk_size=8,
        allow_auto_tuning=False,
    )
    config = stage.configs[0]
    assert (config.model.model, config.model.max_model_len, config.backend.engine) == ("m", 64, "scripted")
    assert (config.cache.gpu_memory_utilization, config.cache.enable_prefix_caching) == (0.5, False)
    assert config.cache.kv_cache_dtype == "fp8"
    assert (config.backend.tensor_parallel_size, config.backend.allow_auto_tuning) == (2, False)
    assert engine.stream_chunk_size == 8
    engine.unload_model()
    for words, names in (
        ({"gpu_memory_utilisation": 1}, "Did you mean 'gpu_memory_utilization'"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype|kv-cache-dtype"),
        ({"load_mode": "later"}, "load_mode"),
        ({"max_model_len": -1}, "max_model_len|max-model-len"),
        ({"adapters": {"a": "b"}}, "scripted cannot be used: it takes no LoRA adapters"),
    ):
        with pytest.raises(ConfigError, match=names):
            engine.load_model("m", **words)
    with pytest.raises(ConfigError, match="no LoRA adapters"):
        engine.load_model("m", "some/adapter")
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        create_engine("scripted", gpu_memory_utilisation=0.5)
    assert len(stage.configs) == 1


def test_keys_of_a_registry_file_mean_the_same_to_load_model(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("scripted")
    old = dict.fromkeys(MEANINGLESS, True)
    engine.load_model("m", use_4bit=True, **old)
    engine.unload_model()
    assert stage.configs[0].backend.quantization == "bitsandbytes"
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(word in warning for word in MEANINGLESS)
    with pytest.raises(ConfigError, match="use_4bit means bitsandbytes, and quantization is 'awq'"):
        engine.load_model("m", use_4bit=True, quantization="awq")


def test_adapters_reach_the_start_and_the_requests(add_engine: Callable[..., None]) -> None:
    started: list[Any] = []
    scripted = ScriptedEngine()

    async def start(config: Config) -> ScriptedEngine:
        started.append((adapter_paths(config), config.model.enable_lora))
        return scripted

    add_engine("adapting", start, takes_adapters=True)
    engine = create_engine("adapting")
    engine.load_model("m")
    engine.load_model("m", enable_lora=True)
    engine.load_model("m", "path/of/one", adapters={"two": "path/of/two"})
    engine.load_model("m", adapter=["three=path/of/three"])
    assert started == [
        ({}, False),
        ({}, True),
        ({"default": "path/of/one", "two": "path/of/two"}, False),
        ({"three": "path/of/three"}, False),
    ]
    with pytest.raises(InvalidRequest, match="no adapter 'two'"):
        engine.infer("hi", lora_name="two")
    scripted.adapters = [Adapter(name="two", number=1, path="path/of/two")]
    for words in ({}, {"lora_name": "two"}, {"lora_name": ""}):
        list(engine.infer("hi", **words))
    assert [asked.adapter for asked in scripted.submitted] == [None, "two", ""]
    scripted.abilities = Abilities(lora=False)
    with pytest.raises(InvalidRequest, match="lora_name is not supported"):
        engine.infer("hi", lora_name="two")
    engine.unload_model()


def test_a_load_that_fails_raises_what_it_was_and_may_be_tried_again(stage: Stage) -> None:
    engine = create_engine("scripted", allow_auto_tuning=False)
    for failure in (ModelError("damaged"), OutOfMemory("12 GiB are missing")):
        stage.failures = [failure]
        with pytest.raises(type(failure), match=failure.message):
            engine.load_model("m")
        assert not engine.health_check()
    engine.load_model("m")
    assert list(engine.infer("hi"))
    engine.unload_model()


def test_a_load_in_the_background(stage: Stage) -> None:
    engine = create_engine("scripted")
    stage.may_start.clear()
    engine.load_model("m", load_mode="async_load")
    assert not engine.health_check() and engine.get_model_info()["stage"] in ("resolve", "load")
    with pytest.raises(Unavailable, match="still being started"):
        engine.infer("hi")
    stage.may_start.set()
    wait_until(engine.health_check)
    assert list(engine.infer("hi")) and engine.get_model_info()["stage"] == "ready"
    stage.failures = [ModelError("damaged")]
    engine.load_model("m", load_mode="async_load")
    wait_until(lambda: engine.get_model_info()["stage"] == "failed")
    assert engine.get_model_info()["error"] == "damaged"
    with pytest.raises(ModelError, match="damaged"):
        engine.infer("hi")
    stage.may_start.clear()
    engine.load_model("m", load_mode="async_load")
    engine.unload_model()
    assert engine.get_model_info()["is_loaded"] is False


def test_a_model_is_loaded_and_unloaded_inside_a_running_loop(stage: Stage) -> None:
    async def scenario() -> None:
        engine = create_engine("scripted")
        for mode in ("check_and_load", "async_load"):
            engine.load_model("m", load_mode=mode)
            await until(engine.health_check, "the engine")
            assert "".join(engine.infer("hi")) == "Hello, world"
            engine.unload_model()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_a_check_leaves_the_model_in_use_alone(stage: Stage, engine: BaseEngine) -> None:
    engine.load_model("other/model", load_mode="check_only")
    assert engine.health_check() and "".join(engine.infer("hi")) == "Hello, world"
    assert len(stage.configs) == 1


def test_the_environment_chooses_where_the_caller_does_not(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CY_LLM_ENGINE", "scripted")
    engine = create_engine()
    engine.load_model("m")
    assert engine.get_model_info()["engine"] == "scripted"
    engine.unload_model()
    monkeypatch.setenv("WEFT_ENGINE", "cuda-trt")
    with pytest.raises(ConfigError, match="cuda-trt cannot be used: it needs --engine-url"):
        create_engine().load_model("m")
