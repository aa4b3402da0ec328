"""Names of the systems that users come from are honoured, or refused with what to write instead."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weft.backends.configured_models import ModelsFromFile
from weft.config import load
from weft.errors import ConfigError
from weft.migration import PYPTO_KEYS, VARIABLES, Refused
from weft.options import Config, settings

KNOWN = {setting.name: setting for setting in settings()}
TEXTS = {int: "3", float: "0.5"}


def written(folder: Path, name: str, content: Any) -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return file


def value_of(config: Config, name: str) -> Any:
    return getattr(getattr(config, KNOWN[name].section), name)


@pytest.mark.parametrize("variable", [name for name, here in VARIABLES.items() if isinstance(here, str)])
def test_a_variable_is_the_setting_and_wefts_own_wins(variable: str) -> None:
    name = VARIABLES[variable]
    assert isinstance(name, str)
    text = TEXTS.get(KNOWN[name].type, "a,b")
    expected: Any = ["a,b"] if KNOWN[name].type == list[str] else KNOWN[name].type(text)
    assert value_of(load(env={variable: text}), name) == expected
    assert value_of(load(env={variable: ""}), name) == KNOWN[name].default
    own = {KNOWN[name].env: TEXTS.get(KNOWN[name].type, "c"), variable: text}
    assert value_of(load(env=own), name) == value_of(load(env={KNOWN[name].env: own[KNOWN[name].env]}), name)


@pytest.mark.parametrize("variable", [name for name, here in VARIABLES.items() if isinstance(here, Refused)])
def test_a_variable_without_an_equal_is_refused_with_what_to_write(variable: str) -> None:
    here = VARIABLES[variable]
    assert isinstance(here, Refused)
    wrong = str(here.unless is not True).lower()
    with pytest.raises(ConfigError, match=re.escape(f"{variable} is refused. {here.instead}")):
        load(env={variable: wrong})
    if here.unless is not None:
        assert load(env={variable: str(here.unless).lower()}) == Config(), "it says what happens anyway"
    for named in re.findall(r"WEFT_[A-Z_]+", here.instead):
        assert named in {"WEFT_HOME", "WEFT_COMPILE_CACHE"} | {setting.env for setting in settings()}


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load(env={"CY_LLM_ENV": "production", "CY_LLM_CONDA_ENV": "a", "CY_LLM_ENGIN": "native"})
    lines = refused.value.message.splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("CY_LLM_ENGIN is no variable of the CY-LLM Engine. Did you mean 'CY_LLM_ENGINE'?")


def test_variables_of_others_are_let_be() -> None:
    assert load(env={"HF_HOME": "/a", "HF_TOKEN": "t", "HF_ENDPOINT": "u", "VLLM_LOGGING_LEVEL": "INFO"}) == Config()


def test_two_variables_that_contradict_each_other_are_refused() -> None:
    both = {"CY_LLM_ENGINE": "native", "CY_LLM_BACKEND": "cuda-vllm"}
    with pytest.raises(ConfigError, match=r"CY_LLM_ENGINE and CY_LLM_BACKEND contradict each other. Set WEFT_ENGINE"):
        load(env=both)
    assert load(env=both | {"WEFT_ENGINE": "remote"}).backend.engine == "remote"
    assert load(env=dict.fromkeys(both, "native")).backend.engine == "native"


def test_several_keys_all_let_in() -> None:
    env = {"CY_LLM_API_KEY": "one", "CY_LLM_INTERNAL_TOKEN": "two", "GATEWAY_API_TOKEN": "one"}
    assert load(env=env).server.api_key == ["one", "two"]


def test_a_registry_in_a_variable_is_read_as_its_file_is(tmp_path: Path) -> None:
    registry = {"far": {"engine": "remote", "engine_url": "http://peer:8001/v1"}}
    config = load(env={"CY_LLM_MODEL_REGISTRY": json.dumps(registry), "CY_LLM_DEFAULT_MODEL": "far"})
    models = ModelsFromFile(config)
    assert models.default == "far"
    assert models.entries["far"].config.backend.engine_url == "http://peer:8001/v1"
    assert not models.refresh()
    with pytest.raises(ConfigError, match="--models-file:1: there is no key 'engin'"):
        ModelsFromFile(load(env={"CY_LLM_MODEL_REGISTRY": '{"far": {"engin": "remote"}}'}))
    with pytest.raises(ConfigError, match="contradict"):
        load(env={"CY_LLM_MODEL_REGISTRY": "{}", "CY_LLM_MODEL_REGISTRY_PATH": "models.json"})


CY_LLM = {
    "preferred_backend": "remote",
    "models": {"a": {"model_path": "org/a", "engine_url": "http://a/v1"}, "b": {"path": "org/b", "engine": "native"}},
}


@pytest.mark.parametrize("name", ["config.json", "config.yaml"])
def test_a_cy_llm_configuration_is_read(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, name, CY_LLM)
    config = load(file=file, env={})
    assert (config.backend.engine, config.model_pool.models_file) == ("remote", str(file))
    engines = {name: entry.config.backend.engine for name, entry in ModelsFromFile(config).entries.items()}
    assert engines == {"a": "remote", "b": "native"}
    as_registry = load(env={"CY_LLM_MODEL_REGISTRY_PATH": str(file)})
    assert ModelsFromFile(as_registry).entries["a"].config.backend.engine == "remote"
    told = ModelsFromFile(load({"engine": "native"}, file=file, env={}))
    assert told.entries["a"].config.backend.engine == "native", "a flag wins"


def test_what_a_cy_llm_configuration_has_besides_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "config.json", CY_LLM | {"backends": {}, "defaults": {"top_p": 0.9}, "workers": []})
    with pytest.raises(ConfigError) as refused:
        load(file=file, env={})
    backends, defaults, workers = refused.value.message.splitlines()
    assert "config.json:13: backends ({}) is refused. Engines are started by the server." in backends
    assert "defaults" in defaults and "Requests say it themselves" in defaults
    assert "workers: a configuration of CY-LLM has no such key" in workers
    mixed = written(tmp_path, "weft.json", CY_LLM | {"server": {}})
    with pytest.raises(ConfigError, match="Models are listed in a file of their own"):
        load(file=mixed, env={})
    wrong = written(tmp_path, "wrong.json", CY_LLM | {"preferred_backend": "cuda-vlm"})
    with pytest.raises(ConfigError, match=r"wrong.json:2: there is no engine 'cuda-vlm'. Did you mean 'cuda-vllm'"):
        ModelsFromFile(load({"engine": "auto"}, file=wrong, env={}))


PYPTO: dict[str, dict[str, Any]] = {
    "model": {"model_id": "qwen3-14b", "model_dir": "/models/qwen", "model_format": "huggingface"},
    "runtime": {
        "backend": "npu",
        "page_size": 128,
        "max_batch_size": 16,
        "max_seq_len": 512,
        "device": "cpu",
        "weight_dtype": "bfloat16",
        "total_kv_pages": 64,
    },
}


def test_a_pypto_configuration_is_read(tmp_path: Path) -> None:
    config = load(file=written(tmp_path, "serving_config.json", PYPTO), env={})
    assert (config.model.model, config.model.served_model_name) == ("/models/qwen", "qwen3-14b")
    assert (config.backend.engine, config.model.dtype, config.model.max_model_len) == ("npu", "bfloat16", 512)
    assert (config.cache.block_size, config.cache.num_blocks, config.scheduler.max_num_seqs) == (128, 64, 16)
    on_cpu = {"model": PYPTO["model"], "runtime": {"backend": "cpu"}}
    config = load(file=written(tmp_path, "serving_config.json", on_cpu), env={})
    assert (config.backend.engine, config.model.device) == ("auto", "cpu")


def test_every_pypto_key_without_an_equal_is_refused(tmp_path: Path) -> None:
    refused = {path: here for path, here in PYPTO_KEYS.items() if isinstance(here, Refused)}
    tables: dict[str, dict[str, Any]] = {}
    for section, key in refused:
        tables.setdefault(section, {})[key] = 6
    tables["runtime"]["paged"] = True
    with pytest.raises(ConfigError) as told:
        load(file=written(tmp_path, "serving_config.json", tables), env={})
    for path, here in refused.items():
        assert f": {'.'.join(path)} (6) is refused. {here.instead}" in told.value.message
    assert "runtime.paged: a configuration of PyPTO has no such key" in told.value.message
