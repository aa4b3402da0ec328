"""The models of a registry file, as a server is given them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_engine import ScriptedEngine
from tests.backends.openai_server.peer import ScriptedPeer
from tests.tiny_adapters import save_adapter
from weft.backends import registry
from weft.backends.configured_models import ModelsFromFile
from weft.config import load
from weft.errors import ConfigError, ModelError, OutOfMemory
from weft.machine.hardware import inspect_machine
from weft.options import Config

GIB = 1 << 30


def roster(folder: Path, models: dict[str, Any], env: dict[str, str] | None = None, **flags: Any) -> ModelsFromFile:
    file = folder / "models.json"
    file.write_text(json.dumps({"models": models}, indent=1))
    given = {"WEFT_MODELS_FILE": str(file)} if env is None else {name: str(file) for name in env}
    return ModelsFromFile(load(flags, env=given))


def test_the_first_is_the_default_unless_another_is_named(tmp_path: Path) -> None:
    models = {"a": {"path": "org/a", "preload": True}, "b": {"path": "org/b"}, "c": {"path": "org/c"}}
    read = roster(tmp_path, models)
    assert read.default == "a"
    assert [entry.preload for entry in read.entries.values()] == [True, False, False]
    read = roster(tmp_path, models, model="b", preload=["c"])
    assert read.default == "b"
    assert [entry.preload for entry in read.entries.values()] == [True, True, True]
    assert roster(tmp_path, {"a": {"path": "org/a"}, "smollm2": {"path": "smollm2"}}).default == "smollm2"


def test_what_does_not_go_with_a_file_is_refused(tmp_path: Path) -> None:
    models = {"a": {"path": "org/a"}}
    for flags in ({"model": "other"}, {"preload": ["other"]}, {"served_model_name": "x"}):
        with pytest.raises(ConfigError, match=r"other|--served-model-name"):
            roster(tmp_path, models, **flags)


def test_the_old_variable_names_the_file_as_well(tmp_path: Path) -> None:
    assert roster(tmp_path, {"a": {"path": "org/a"}}, {"CY_LLM_MODEL_REGISTRY_PATH": ""}).default == "a"


def test_the_default_goes_when_its_entry_does(tmp_path: Path) -> None:
    read = roster(tmp_path, {"a": {"path": "org/a"}, "b": {"path": "org/b"}}, model="b")
    (tmp_path / "models.json").write_text(json.dumps({"c": {"path": "org/c"}, "a": {"path": "org/a"}}))
    read.reload()
    assert read.default == "c" and [*read.entries] == ["c", "a"]


@pytest.mark.parametrize(("asked", "bytes_"), [("", 0), ("24", 24 * GIB), ("1.5", int(1.5 * GIB))])
def test_memory_is_given_in_gib(tmp_path: Path, asked: str, bytes_: int) -> None:
    assert roster(tmp_path, {"a": {"path": "org/a"}}, max_models_memory=asked).memory_limit == bytes_


def test_or_as_a_share(tmp_path: Path) -> None:
    machine = inspect_machine()
    total = sum(device.total for device in machine.devices) or machine.memory.total
    assert roster(tmp_path, {"a": {"path": "org/a"}}, max_models_memory="50%").memory_limit == total // 2
    with pytest.raises(ConfigError, match="max-models-memory"):
        roster(tmp_path, {"a": {"path": "org/a"}}, max_models_memory="half")


def test_what_a_model_needs_is_planned_and_what_is_elsewhere_needs_nothing(tmp_path: Path, tiny_model: Path) -> None:
    models = {
        "here": {"path": str(tiny_model), "kv_cache_memory_mb": 64},
        "far": {"engine": "remote", "engine_url": "http://localhost:1/v1"},
        "none": {"path": "no-such-model"},
    }
    read = roster(tmp_path, models, image_model="none")
    stages: list[str] = []
    need = asyncio.run(read.need(read.entries["here"], stages.append))
    assert need.num_bytes > need.libraries + (64 << 20) and not need.problem
    assert "resolve" in stages and "plan" in stages
    assert asyncio.run(read.need(read.entries["far"], stages.append)).num_bytes == 0
    with pytest.raises(ModelError, match="no-such-model"):
        asyncio.run(read.need(read.entries["none"], stages.append))


def test_a_check_finds_what_would_keep_a_model_from_being_loaded(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: package)
    (tmp_path / "empty").mkdir()
    save_adapter("smollm2", tmp_path / "lora")
    here = {"path": str(tiny_model), "engine": "native"}
    models = {
        "good": here | {"adapters": {"x": "./lora"}},
        "quantised": here | {"quantization": "awq"},
        "parallel": here | {"tensor_parallel_size": 4},
        "tuned": here | {"adapters": {"x": "./empty"}},
        "threads": here | {"engine": "cpu-vllm", "threads": 3},
        "far": {"engine": "remote", "engine_url": "http://127.0.0.1:9/v1"},
    }
    checked = asyncio.run(roster(tmp_path, models, image_model="none").check())
    for model, fault in zip(
        checked,
        ("", "--quantization cannot be awq", "--tensor-parallel-size 4: the", "empty", "--threads", "No server"),
        strict=True,
    ):
        assert fault in model.fault and bool(fault) == bool(model.fault), model


def test_a_check_asks_a_server_whether_it_has_the_model(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with ScriptedPeer() as peer:
            far = {"engine": "remote", "engine_url": peer.url}
            read = roster(tmp_path, {"any": far, "other": far | {"engine_model": "elsewhere"}})
            return [model.fault for model in await read.check()]

    any_model, other = asyncio.run(scenario())
    assert not any_model and "has no model 'elsewhere'" in other


def test_what_the_server_sets_for_models_that_are_here_is_not_said_to_one_that_is_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with ScriptedPeer() as peer:
            far = {"engine": "remote", "engine_url": peer.url}
            models = {"far": far, "wrong": far | {"max_num_seqs": 3}, "listed": far | {"engine": "remote,native"}}
            read = roster(tmp_path, models, num_blocks=64, dtype="bfloat16", max_num_seqs=5, max_model_len=100)
            assert [entry.config.cache.num_blocks for entry in read.entries.values()] == [0, 0, 64]
            assert read.entries["far"].config.model.max_model_len == 100
            return [model.fault for model in await read.check()]

    far, wrong, listed = asyncio.run(scenario())
    assert not far and not listed and "remote does not support --max-num-seqs (3)" in wrong


@pytest.mark.parametrize("idle_models", [0, 1, 2])
def test_room_is_made_before_the_next_engine_of_a_list_is_tried(
    tmp_path: Path, add_engine: Callable[..., None], idle_models: int
) -> None:
    idle = ["a model"] * idle_models
    tried: list[str] = []

    async def roomy(config: Config) -> ScriptedEngine:
        tried.append("roomy")
        if len(tried) <= 2:
            raise OutOfMemory(f"{3 - len(tried)} GiB are missing.")
        return ScriptedEngine()

    async def frugal(config: Config) -> ScriptedEngine:
        tried.append("frugal")
        raise OutOfMemory("0.5 GiB are missing.")

    async def make_room(why: str) -> bool:
        assert "missing" in why
        return bool(idle and idle.pop())

    add_engine("roomy", roomy)
    add_engine("frugal", frugal)
    read = roster(tmp_path, {"a": {"path": "org/a"}}, engine="roomy,frugal", allow_auto_tuning=False)

    async def scenario() -> None:
        engine = await read.start(read.entries["a"], lambda stage: None, make_room)
        await engine.close()

    if idle_models == 2:
        asyncio.run(scenario())
    else:
        with pytest.raises(OutOfMemory, match=r"roomy.*missing.*frugal"):
            asyncio.run(scenario())
    assert tried == ["roomy"] * (idle_models + 1) + ["frugal"] * (idle_models < 2)


def test_a_fault_of_files_that_are_here_is_found_without_loading(tmp_path: Path, tiny_model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    read = roster(tmp_path, {"whole": {"path": str(tiny_model)}, "b": {"path": "./broken"}, "far": {"path": "org/x"}})
    assert [bool(read.fault(entry)) for entry in read.entries.values()] == [False, True, False]
    assert read.entries["b"].place.endswith("models.json:6")
