"""The registry file overrides the server's settings, reports every mistake with its line in all three formats, and is
read again when it changes."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.models_file import ModelRegistry, read_registry
from weft.options import BackendOptions, Config, ModelOptions

ENGINES = ["native", "cuda-vllm", "cuda-vllm-async", "remote"]
SERVER = Config(
    model=ModelOptions(model="smollm2", revision="v9", dtype="float16", max_model_len=512),
    backend=BackendOptions(trust_remote_code=True, stream_chunk_size=9),
)


def read(file: Path, config: Config = SERVER) -> Any:
    return read_registry(file, config, engines=ENGINES)


def as_toml(models: dict[str, dict[str, Any]]) -> str:
    tables = (
        f'[models."{name}"]\n' + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in models.items()
    )
    return "\n".join(tables)


def as_yaml(models: dict[str, dict[str, Any]]) -> str:
    return "models:\n" + "".join(
        f"  {name}:\n" + "".join(f"    {key}: {json.dumps(value)}\n" for key, value in table.items())
        for name, table in models.items()
    )


def as_json(models: dict[str, dict[str, Any]]) -> str:
    return json.dumps({"models": models}, indent=1)


WRITERS = {"json": as_json, "toml": as_toml, "yaml": as_yaml, "yml": as_yaml}


@pytest.mark.parametrize("suffix", WRITERS)
def test_an_entry_is_the_servers_configuration_with_its_settings_over_it(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"models.{suffix}"
    models = {
        "chat": {"path": "org/name", "engine": "cuda-vllm", "max_model_len": 4096, "gpu_memory_utilization": 0.5},
        "small": {"path": "smollm2", "max_num_seqs": 4},
    }
    file.write_text(WRITERS[suffix](models))
    chat, small = read(file).values()
    assert (chat.name, small.name) == ("chat", "small")
    assert chat.config.model == ModelOptions(
        model="org/name", served_model_name="chat", dtype="float16", max_model_len=4096
    )
    # Trust is given to one model, never to all.
    assert chat.config.backend == BackendOptions(engine="cuda-vllm", stream_chunk_size=9)
    assert chat.config.cache.gpu_memory_utilization == 0.5
    assert (small.config.scheduler.max_num_seqs, small.config.model.max_model_len) == (4, 512)
    assert small.config.server == SERVER.server


def test_adapters_paths_and_the_way_of_loading(tmp_path: Path) -> None:
    loras, home = tmp_path / "loras", tmp_path / "home"
    for folder in (home / "base", loras / "legal"):
        folder.mkdir(parents=True)
    file = home / "models.toml"
    file.write_text(
        '[models.a]\npath = "./base"\nadapter = "../loras"\nload_mode = "async_load"\n'
        f'[models.a.adapters]\nlegal = "{loras}/legal"\n'
        '[models.b]\npath = "org/name"\ntrust_remote_code = true\nengine = "cuda-vllm,native"\n'
        '[models.c]\nengine = "remote"\nengine_url = "http://peer/v1"\n'
    )
    entries = read(file)
    assert entries["a"].config.model.model == str(home / "base")
    assert entries["a"].adapters == {"default": str(loras), "legal": f"{loras}/legal"}
    assert [entry.load_mode for entry in entries.values()] == ["async_load", "check_and_load", "check_and_load"]
    assert [entry.config.backend.trust_remote_code for entry in entries.values()] == [False, True, False]


# The CY-LLM Engine's own file.


def test_the_source_systems_keys_are_understood(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "models.json"
    old = {
        "model_path": "deepseek-ai/deepseek-llm-7b-chat",
        "adapter_path": str(tmp_path),
        "engine": "cuda-vllm",
        "quantization": None,
        "use_4bit": True,
        "max_model_len": 4096,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.8,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "allow_auto_tuning": False,
        "enable_prompt_cache": True,
        "prompt_cache_ttl": 3600,
        "load_mode": "check_only",
        "interactive_quantization": False,
        "model_source": "modelscope",
        "skip_validation": False,
        "use_safetensors": True,
    }
    file.write_text(json.dumps({"deepseek": old}, indent=1))
    with caplog.at_level(logging.WARNING):
        entry = read(file)["deepseek"]
    config = entry.config
    assert config.model.model == "modelscope:deepseek-ai/deepseek-llm-7b-chat"
    assert (config.model.max_model_len, config.backend.tensor_parallel_size) == (4096, 2)
    assert (config.backend.quantization, config.backend.allow_auto_tuning) == ("bitsandbytes", False)
    assert (config.cache.gpu_memory_utilization, config.cache.enable_prefix_caching) == (0.8, False)
    assert config.cache.kv_cache_dtype == "fp8"
    assert (entry.adapters, entry.load_mode) == ({"default": str(tmp_path)}, "check_only")
    passed_over, outdated = (record.getMessage() for record in caplog.records)
    for key in ("enable_prompt_cache", "prompt_cache_ttl", "interactive_quantization", "skip_validation"):
        assert f"{file}:{list(old).index(key) + 3} {key}" in passed_over
    assert f"{file}:7: use_4bit is outdated" in outdated


# Mistakes.


MISTAKEN: dict[str, dict[str, Any]] = {
    "chat": {"path": "org/name", "max_modl_len": 4096},
    "other": {"dtype": "float17", "engine": "cuda-vlm", "port": 80, "kv_cache_dtype": "fp4"},
    "local": {"path": "/no/such/model", "gpu_memory_utilization": 1.5, "load_mode": "async", "adapters": "x"},
    "tuned": {"path": "a/b", "adapter": "/no/such/lora"},
    "code": {"path": "a/b", "trust_remote_code": True, "engine": "native", "model_source": "modelscop"},
}
TOLD = [
    ("max_modl_len", "there is no key 'max_modl_len'. Did you mean 'max_model_len'?"),
    ("dtype", "dtype: 'float17' is refused: Invalid enum value 'float17'. Did you mean 'float16'?"),
    ("port", "port is the server's, and cannot be set for one model."),
    ("kv_cache_dtype", "kv_cache_dtype: 'fp4' is refused: Invalid enum value 'fp4'. Did you mean 'fp8'?"),
    ("engine", "there is no engine 'cuda-vlm'. Did you mean 'cuda-vllm'?"),
    ("other", "other has no path. A file, a directory or a hub id."),
    ("gpu_memory_utilization", "gpu_memory_utilization: 1.5 is refused: Expected `float` <= 1.0."),
    ("load_mode", "load_mode: 'async' is refused: Invalid enum value 'async'. Did you mean 'async_load'?"),
    ("adapters", "adapters: 'x' is refused: Expected `object`, got `str`."),
    ("/no/such/model", "/no/such/model: there is no such file or directory."),
    ("/no/such/lora", "/no/such/lora: there is no such directory."),
    ("modelscop", "model_source: 'modelscop' is refused: Invalid enum value 'modelscop'. Did you mean 'modelscope'?"),
    ("trust_remote_code", "only vLLM ever runs code that comes with a model."),
]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_mistake_is_told_with_its_line(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"models.{suffix}"
    file.write_text(WRITERS[suffix](MISTAKEN))
    lines = file.read_text().splitlines()

    def line_of(word: str) -> int:
        return next(number for number, line in enumerate(lines, 1) if f'"{word}"' in line or f"{word} =" in line
                    or f" {word}:" in line or f"[models.{word}]" in line)  # fmt: skip

    with pytest.raises(ConfigError) as raised:
        read(file)
    head, *told = raised.value.message.splitlines()
    assert head == f"{file}: {len(TOLD)} mistakes:"
    for word, text in TOLD:
        assert any(line.startswith(f"{file}:{line_of(word)}: {text}") for line in told), (word, told)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{\n"models": {\n"a": {"path": "x",}}}', "a.json:3: not valid JSON"),
        ("a.json", '{"models": {\n"a": {"path": "x"},\n"a": {"path": "y"}}}', "a.json:3: duplicate key 'a', first on"),
        ("a.json", "[" * 100_000, "a.json: not valid JSON: nested too deep"),
        ("a.toml", '[models.a]\npath = "x"\n[models.a]\n', "a.toml:3: not valid TOML"),
        ("a.yaml", "models:\n  a:\n    path: x\n   b: 1\n", "a.yaml:4: not valid YAML"),
        ("a.yaml", "models:\n  a: {path: x}\n  a: {path: y}\n", "a.yaml:3: duplicate key 'a', first on line 2"),
        ("a.yaml", "models: !!python/object/apply:os.getcwd []\n", "a.yaml:1: not valid YAML: could not determine"),
        ("a.yaml", "models: &a\n  x: *a\n", "not valid YAML|must be a table|has no path"),
        ("a.json", "[]", "a.json:1: models must be a table"),
        ("a.toml", "", "a.toml:1: models must be a table"),
        ("a.toml", 'models = 3\nmodel = 1\n', "a.toml:1: models must be a table"),
        ("a.toml", '[models.a]\npath = "x"\n[modles.b]\n', "a.toml:3: there is no key 'modles' beside models"),
        ("a.yaml", "models:\n  a: 3\n", "a.yaml:2: a must be a table of settings"),
        ("a.yaml", "models:\n  1: {path: x}\n", "a.yaml:2: 1 cannot be the name of a model"),
        ("a.json", '{"../a b": {}}', "cannot be the name of a model"),
        ("a.json", '{"a": {"path": "x", "model_path": "y"}}', "model_path means the same as path"),
        ("a.json", '{"a": {"path": "x", "use_4bit": true, "quantization": "awq"}}', "and quantization is 'awq'"),
        ("a.json", '{"a": {"path": "/x", "model_source": "huggingface"}}', "'/x' is no model of huggingface"),
        ("a.json", '{"a": {"path": "x", "model_source": "local"}}', "x: there is no such file or directory"),
        ("a.ini", "", "a.ini: unknown file format"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(Path(name))


def test_an_adapter_that_is_not_there_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\npath = "a/b"\n[models.a.adapters]\nhere = "./"\nlegal = "./none"\n')
    with pytest.raises(ConfigError, match=rf"^{file}:5: {tmp_path}/none: there is no such directory\."):
        read(file)


def test_lines_are_right_where_values_have_many(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '# a comment with [brackets]\n\n[models.a]\npath = """\\\n  x\\\n"""\n'
        'adapters = { one = "/" }\n\n[models."b.c"]\nwrong = [\n  "{",\n]\npath = "y"\n'
    )
    with pytest.raises(ConfigError, match=rf"^{file}:10: there is no key 'wrong'"):
        read(file)
    file = tmp_path / "models.json"
    file.write_text('{"models":\n{"a": {"path": "{\\"\\n:", "adapters": {"x":\n"/"},\n"wrong": [{"a": 1}, {"a": 1}]}}}')
    with pytest.raises(ConfigError, match=rf"^{file}:4: there is no key 'wrong'"):
        read(file)


def test_code_of_a_model_is_for_vllm_also_where_the_server_names_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\npath = "a/b"\ntrust_remote_code = true\n')
    for engine in ("auto", "hybrid", "cuda-vllm", "native,cuda-vllm"):
        assert read(file, Config(backend=BackendOptions(engine=engine)))["a"].config.backend.trust_remote_code
    with pytest.raises(ConfigError, match=rf"^{file}:3: only vLLM"):
        read(file, Config(backend=BackendOptions(engine="native,remote")))


def test_without_pyyaml_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.yaml").write_text("models: {a: {path: x}}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"needs PyYAML.*") as raised:
        read(tmp_path / "models.yaml")
    assert "pip install 'weft-serve[yaml]'" in raised.value.hint


# Read again.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


def put(file: Path, models: dict[str, dict[str, Any]] | str) -> None:
    """Replace the file by a new one, as editors do."""
    fresh = file.with_suffix(".new")
    fresh.write_text(models if isinstance(models, str) else as_toml(models))
    fresh.replace(file)


def test_a_change_is_taken_in_and_a_broken_one_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "models.toml"
    put(file, {"a": {"path": "x"}})
    registry = ModelRegistry(file, Config(), clock=Clock())
    before = registry.entries
    assert not registry.refresh()
    assert registry.entries is before
    put(file, {"a": {"path": "y"}, "b": {"path": "z"}})
    assert registry.refresh()
    assert [entry.config.model.model for entry in registry.entries.values()] == ["y", "z"]
    put(file, "[models.a]\npaht = 1\n")
    with caplog.at_level(logging.ERROR):
        assert not registry.refresh()
        assert not registry.refresh()
        assert list(registry.entries) == ["a", "b"]
        file.unlink()
        assert not registry.refresh()
    broken, gone = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert f"{file}:2: there is no key 'paht'" in broken
    assert "No such file" in gone
    put(file, {"c": {"path": "x"}})
    assert registry.refresh()
    assert list(registry.entries) == ["c"]


def test_the_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    put(file, {"a": {"path": "x"}})
    now = [0.0]
    registry = ModelRegistry(file, Config(), clock=lambda: now[0])
    registry.refresh()
    put(file, {"b": {"path": "x"}})
    assert not registry.refresh()
    now[0] += 1
    assert registry.refresh()
    assert list(registry.entries) == ["b"]


def test_a_broken_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ModelRegistry(tmp_path / "none.toml", Config())
