"""Of several engines the first that starts is taken, with one warning that says why it was not one before it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_engine import ScriptedEngine
from weft.backends import create_engine, registry, start_engine
from weft.backends.contract import Engine
from weft.backends.failover import FailoverEngine
from weft.backends.registry import BUILT_IN
from weft.backends.starting import chosen_engines
from weft.config import load
from weft.errors import ConfigError, ModelError, OutOfMemory, Unavailable
from weft.options import Config

pytestmark = pytest.mark.usefixtures("no_weft_environment")


async def works(config: Config) -> Engine:
    engine = ScriptedEngine()
    engine.name = config.backend.engine
    return engine


async def raises_model_error(config: Config) -> Engine:
    raise ModelError("Shard 3 of 4 is missing.", hint="Pull it again.")


async def raises_out_of_memory(config: Config) -> Engine:
    raise OutOfMemory("It needs 80 GiB, and 24 GiB are there.")


async def raises_anything(config: Config) -> Engine:
    raise ZeroDivisionError("a bug")


@pytest.fixture
def engines(add_engine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weft_test_broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "weft_test_half.py").write_text("start = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    add_engine("works", works)
    add_engine("works-too", works)
    add_engine("missing", "nowhere:start", requires=("package_that_is_missing",), install="pip install it")
    add_engine("broken", "weft_test_broken:start", install="pip install --upgrade it")
    add_engine("no-engine", "weft_test_half:start")
    add_engine("damaged", raises_model_error)
    add_engine("too-large", raises_out_of_memory)
    add_engine("buggy", raises_anything)
    add_engine("on-cuda", works, platform="cuda")
    add_engine("elsewhere", works, needs_url=True)


def start(names: str, **settings: Any) -> tuple[str, bool]:
    """The name of the engine that was taken, and whether others stand by."""

    async def scenario() -> tuple[str, bool]:
        engine = await start_engine(load({"engine": names, **settings}, env={}))
        try:
            return engine.name, isinstance(engine, FailoverEngine)
        finally:
            await engine.close()

    return asyncio.run(scenario())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("missing", "missing: package_that_is_missing is not installed: pip install it"),
        ("broken", "ModuleNotFoundError: No module named 'a_package_that_is_not_there'. Try: pip install --upgrade it"),
        ("no-engine", "neither a coroutine function"),
        ("damaged", "damaged: ModelError: Shard 3 of 4 is missing. Pull it again"),
        ("too-large", "too-large: OutOfMemory:"),
        ("buggy", "buggy: ZeroDivisionError: a bug"),
        ("on-cuda", "on-cuda: this machine has no CUDA device"),
        ("elsewhere", "elsewhere: it needs --engine-url"),
    ],
)
def test_the_next_is_taken_with_one_warning_that_says_why(
    first: str, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "accelerator", lambda: "cpu")
    # A shortage of memory is tried again with less, which is told too: here it is not.
    assert start(f"{first},works", allow_auto_tuning=False) == ("works", False)
    [said] = warnings(caplog)
    assert said.startswith("The engine works is used") and why in said


@pytest.mark.usefixtures("engines")
def test_the_order_is_kept_and_all_that_failed_are_told_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert start("damaged, missing ,buggy,works,works-too") == ("works", True)
    [said] = warnings(caplog)
    assert said.index("damaged") < said.index("missing") < said.index("buggy")
    caplog.clear()
    assert start("works,damaged") == ("works", True)
    assert warnings(caplog) == []


@pytest.mark.usefixtures("engines")
def test_when_none_starts_the_error_lists_them_all(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unavailable) as raised:
        start("damaged,missing,broken")
    for part in ("damaged: ModelError: Shard 3", "missing: package_that_is_missing", "broken: ConfigError"):
        assert part in str(raised.value)
    assert warnings(caplog) == []


@pytest.mark.usefixtures("engines")
def test_when_all_that_were_tried_are_short_of_memory_so_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can make room knows then that it helps."""
    with pytest.raises(OutOfMemory, match=r"too-large: OutOfMemory: It needs 80 GiB.*missing: .*too-large: "):
        start("too-large,missing,too-large", allow_auto_tuning=False)
    with pytest.raises(Unavailable, match="too-large"):
        start("too-large,damaged", allow_auto_tuning=False)
    with pytest.raises(Unavailable, match="missing"):
        start("missing,missing")


@pytest.mark.usefixtures("engines")
def test_an_engine_that_was_named_alone_is_that_one_or_none(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="Shard 3"):
        start("damaged")
    with pytest.raises(ZeroDivisionError):
        start("buggy")
    with pytest.raises(ConfigError, match=r"missing cannot be used.*pip install it"):
        start("missing")
    with pytest.raises(ConfigError, match="a_package_that_is_not_there"):
        start("broken")
    assert warnings(caplog) == []


def test_the_native_engine_refuses_what_only_others_can(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization cannot be awq"):
        start("native", model=str(tiny_model), quantization="awq", image_model="none")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 4: the model has 6 heads"):
        start("native", model=str(tiny_model), tensor_parallel_size=4, image_model="none")


def test_a_draft_model_with_other_tokens_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    first, second = list(vocab)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    differing = min(vocab[first], vocab[second])
    with pytest.raises(ConfigError, match=f"--speculative-model other has another token {differing}:"):
        start("native", model=str(tiny_model), speculative_model=str(other), image_model="none")


def test_two_ways_to_draft_are_one_too_many(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative ngram and --speculative-model"):
        start("native", model=str(tiny_model), speculative_model=str(tiny_model), speculative="ngram")


def test_only_vllm_runs_code_that_comes_with_a_model(
    add_engine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Of several, those that do not are passed over."""
    for name, url in (("native", ""), ("remote", "http://localhost:1/v1")):
        with pytest.raises(ConfigError, match=f"{name} cannot be used: only vLLM runs code that comes with a model"):
            start(name, trust_remote_code=True, engine_url=url)
    add_engine("bold", works, runs_model_code=True)
    assert start("native,bold", trust_remote_code=True) == ("bold", False)
    [said] = warnings(caplog)
    assert "native: only vLLM runs code" in said
    assert [name for name, spec in BUILT_IN.items() if spec.runs_model_code] == [
        name for name in BUILT_IN if "vllm" in name
    ]


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    "setting",
    [
        {"quantization": "awq"}, {"tensor_parallel_size": 2}, {"max_num_seqs": 4}, {"gpu_memory_utilization": 0.5},
        {"dtype": "bfloat16"}, {"device": "cpu"}, {"threads": 1}, {"enable_prefix_caching": False},
        {"kv_cache_dtype": "fp8"},
        {"image_model": "auto/other"}, {"load_format": "dummy"}, {"num_blocks": 9}, {"revision": "abc"},
    ],
)  # fmt: skip
def test_a_server_elsewhere_cannot_honour_what_is_for_a_model_here(setting: dict[str, Any]) -> None:
    """In a list it is for the engine that can."""
    far = {"engine_url": "http://localhost:1/v1"}
    [name] = setting
    flag = f"--{name.replace('_', '-')}"
    for names in ("elsewhere", "elsewhere,remote"):
        with pytest.raises(ConfigError, match=rf"elsewhere does not support {flag} \(.*on the server at --engine-url"):
            start(names, **far, **setting)
    assert start("elsewhere,works", **far, **setting) == ("elsewhere", True)
    assert start("damaged,elsewhere", **far, **setting) == ("elsewhere", False)
    own = {
        "image_model": "none",
        "max_model_len": 9,
        "tool_style": "none",
        "start_timeout_s": 5,
        "stream_chunk_size": 2,
    }
    assert start("elsewhere", **far, **own) == ("elsewhere", False)


@pytest.mark.usefixtures("engines")
def test_auto_is_the_order_of_the_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    order = ("on-cuda", "damaged", "works")
    monkeypatch.setattr(registry, "PREFERENCE", {"cuda": order, "ascend": order, "cpu": ("works-too",)})
    monkeypatch.setattr(registry, "accelerator", lambda: "cuda")
    assert start("auto") == start("hybrid") == ("on-cuda", True)
    assert start("auto", device="cpu") == ("works-too", False)
    assert warnings(caplog) == []
    monkeypatch.setattr(registry, "accelerator", lambda: "ascend")
    assert start("auto") == ("works", False)
    [said] = warnings(caplog)
    assert "no CUDA device" in said and "Shard 3" in said


@pytest.mark.usefixtures("engines")
def test_a_caller_that_waits_falls_back_alike(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("broken,works")
    engine.load_model("m")
    assert engine.get_model_info()["engine"] == "works"
    assert "".join(engine.infer("hi")) == "Hello, world"
    assert len(warnings(caplog)) == 1
    engine.unload_model()


@pytest.mark.usefixtures("engines")
def test_an_engine_finds_its_own_name_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start("elsewhere,works", engine_url="http://localhost:1/v1")[0] == "elsewhere"
    assert start("missing,works-too,works")[0] == "works-too"


def test_an_address_without_an_engine_elsewhere_is_refused() -> None:
    for engine in ("native", "auto", "cpu-vllm,native"):
        with pytest.raises(ConfigError, match="--engine-url is set"):
            chosen_engines(load({"engine": engine, "engine_url": "http://127.0.0.1:9/v1"}, env={}))
    chosen_engines(load({"engine": "native,remote", "engine_url": "http://127.0.0.1:9/v1"}, env={}))
