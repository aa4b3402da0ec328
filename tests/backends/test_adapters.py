"""The adapters of an engine: counted numbers, names, and what is refused before an engine reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.api.scripted_engine import ScriptedEngine
from tests.backends.vllm.real import save_adapter
from weft.backends.adapters import Adapters
from weft.backends.failover import start_engine
from weft.checkpoint.adapter_files import adapter_paths, adapter_settings
from weft.config import load
from weft.errors import ConfigError, InvalidRequest, ModelError
from weft.hub.resolve import resolve
from weft.llm import LLM
from weft.options import Config


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", tiny_model, 1)


@pytest.fixture
def adapters(tiny_model: Path) -> Adapters:
    return Adapters("tiny", resolve(str(tiny_model)))


def test_numbers_are_counted_from_one_and_never_used_again(adapters: Adapters, folder: Path) -> None:
    assert [adapters.add(name, folder).number for name in ("a", "b")] == [1, 2]
    adapters.remove("a")
    assert adapters.add("a", folder).number == 3
    assert [adapter.name for adapter in adapters] == ["b", "a"]


def test_one_that_is_discarded_takes_no_other_of_its_name_along(adapters: Adapters, folder: Path) -> None:
    first = adapters.add("a", folder)
    adapters.remove("a")
    adapters.discard(first)
    second = adapters.add("a", folder)
    adapters.discard(first)
    assert [*adapters] == [second]
    adapters.discard(second)
    assert not [*adapters]


def test_a_request_has_the_adapter_that_it_names_or_the_default_or_none(adapters: Adapters, folder: Path) -> None:
    named = adapters.add("a", folder)
    assert (adapters.chosen("a"), adapters.chosen(""), adapters.chosen(None)) == (named, None, None)
    default = adapters.add("default", folder)
    assert (adapters.chosen("a"), adapters.chosen(""), adapters.chosen(None)) == (named, None, default)
    for refused in (adapters.chosen, adapters.remove):
        with pytest.raises(InvalidRequest, match="no adapter 'b'"):
            refused("b")


@pytest.mark.parametrize("name", ["a", "tiny", "", "a b", "a,b", "a=b", "x" * 129])
def test_a_name_is_another_than_all_that_are_there(adapters: Adapters, folder: Path, name: str) -> None:
    adapters.add("a", folder)
    with pytest.raises(ModelError, match=r"already|cannot be"):
        adapters.add(name, folder)


@pytest.mark.parametrize("written", [None, "{", "{}", '{"r": 65}', '{"r": 0}', '{"r": "many"}', "[]"])
def test_a_directory_that_peft_did_not_write_is_refused(adapters: Adapters, folder: Path, written: str | None) -> None:
    (folder / "adapter_config.json").unlink()
    if written is not None:
        (folder / "adapter_config.json").write_text(written)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        adapters.checked(str(folder))


def test_another_kind_of_adapter_is_refused(adapters: Adapters, folder: Path) -> None:
    facts = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**facts, "peft_type": "IA3"}))
    with pytest.raises(ModelError, match="IA3"):
        adapters.checked(str(folder))


def test_weights_that_may_hold_code_are_no_weights(adapters: Adapters, folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        adapters.checked(str(folder))


def test_an_adapter_of_another_model_is_refused(adapters: Adapters, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    first = next(name for name in whole if name.endswith("q_proj.lora_A.weight"))
    for changed, told in (
        ({**whole, first: torch.zeros(4, 999)}, "width 999"),
        ({**whole, first.replace("layers.0", "layers.99"): torch.zeros(4, 4)}, "layer that the model"),
        ({"something": torch.zeros(1)}, "no tensor of a LoRA adapter"),
    ):
        save_file(changed, file)
        with pytest.raises(ModelError, match=told):
            adapters.checked(str(folder))
    file.write_bytes(b"nothing")
    with pytest.raises(ModelError, match="not a readable"):
        adapters.checked(str(folder))


def test_the_operator_names_them() -> None:
    config = load({"adapter": ["legal=/loras/legal", "/loras/own", "npc=a=b"]}, env={})
    assert adapter_paths(config) == {"legal": "/loras/legal", "default": "/loras/own", "npc": "a=b"}
    assert adapter_paths(load({}, env={"WEFT_ADAPTER": "a=/a,b=/b"})) == {"a": "/a", "b": "/b"}
    assert adapter_paths(load({}, env={"CY_LLM_DEFAULT_ADAPTER": "/a"})) == {"default": "/a"}
    assert adapter_paths(load({"adapter": adapter_settings({"a": "/a"})}, env={})) == {"a": "/a"}
    for wrong in (["a="], ["=/a"], ["a=/a", "a=/b"], ["/a", "default=/b"]):
        with pytest.raises(ConfigError, match="--adapter"):
            adapter_paths(load({"adapter": wrong}, env={}))


def test_an_engine_without_adapters_is_passed_over_with_the_reason(
    add_engine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def start(config: Config) -> Any:
        return ScriptedEngine()

    add_engine("without", start)
    add_engine("with", start, takes_adapters=True)
    for flags in ({"adapter": ["a=/a"]}, {"enable_lora": True}):
        with pytest.raises(ConfigError, match="without cannot be used: it takes no LoRA adapters"):
            asyncio.run(start_engine(load({"engine": "without", **flags}, env={})))

    async def scenario() -> None:
        await (await start_engine(load({"engine": "without,with", "adapter": ["a=/a"]}, env={}))).close()

    asyncio.run(scenario())
    assert "without: it takes no LoRA adapters" in caplog.text


def test_the_python_api_names_them(add_engine: Callable[..., None]) -> None:
    engine = ScriptedEngine()

    async def start(config: Config) -> Any:
        assert adapter_paths(config) == {"a": "/a", "b": "/b"}
        return engine

    add_engine("with", start, takes_adapters=True)
    with LLM("m", engine="with", adapters={"a": "/a"}, adapter=["b=/b"]) as llm:
        llm.generate("hi", adapter="a")
        llm.chat([{"role": "user", "content": "hi"}], adapter="")
        list(llm.stream("hi", adapter="a"))
        llm.generate("hi")
    assert [asked.adapter for asked in engine.submitted] == ["a", "", "a", None]
