"""Where a benchmark's settings come from: flags, then the environment, then the file, as with `weft serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from weft.bench.commands import app as bench
from weft.errors import ConfigError
from weft.options import Config

RUNNERS = {
    "offline": "weft.bench.commands.run_offline",
    "mixed": "weft.bench.commands.run_mixed",
}
FILE = """
[model]
model = "of-the-file"
device = "cuda"
dtype = "float16"
[backend]
engine = "{engine}"
[cache]
enable_prefix_caching = true
"""


@pytest.fixture(params=RUNNERS)
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in [name for name in os.environ if name.startswith(("WEFT_", "CY_LLM_")) and name != "WEFT_HOME"]:
        monkeypatch.delenv(name)
    return str(request.param)


@pytest.fixture
def seen(command: str, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that would have been measured."""
    configs: list[Config] = []

    async def note(config: Config, *_: Any) -> None:
        configs.append(config)
        raise typer.Exit(0)

    monkeypatch.setattr(RUNNERS[command], note)
    return configs


def measured(seen: list[Config], *arguments: str, env: dict[str, str] | None = None) -> Config:
    done = CliRunner().invoke(bench, arguments, env=env)
    assert done.exit_code == 0, done.exception or done.output
    return seen.pop()


def engine_for(command: str, name: str) -> str:
    """`mixed` measures the native engine alone, which has another name and may be named twice."""
    return (
        {"one": "cpu", "two": "native,native", "three": "native,cpu"}
        if command == "mixed"
        else {"one": "cpu-vllm", "two": "cuda-vllm", "three": "cuda-vllm-async"}
    )[name]


def write(folder: Path, command: str) -> Path:
    file = folder / "weft.toml"
    file.write_text(FILE.format(engine=engine_for(command, "one")))
    return file


def test_without_anything_it_is_the_native_engine(command: str, seen: list[Config]) -> None:
    config = measured(seen, command)
    assert config.backend.engine == "native"
    assert config.cache.enable_prefix_caching == (command == "offline")
    assert (config.model.model, config.model.device, config.model.dtype) == ("smollm2", "auto", "auto")


def test_the_file_is_before_the_benchmarks_own_defaults(command: str, seen: list[Config], tmp_path: Path) -> None:
    config = measured(seen, command, "--config", str(write(tmp_path, command)))
    assert config.backend.engine == engine_for(command, "one") and config.cache.enable_prefix_caching
    assert (config.model.model, config.model.device, config.model.dtype) == ("of-the-file", "cuda", "float16")


def test_the_environment_is_before_the_file(command: str, seen: list[Config], tmp_path: Path) -> None:
    old = {"CY_LLM_ENGINE": engine_for(command, "two")}
    new = {"WEFT_ENGINE": engine_for(command, "three"), "WEFT_DEVICE": "cpu", "WEFT_DTYPE": "bfloat16"}
    files = ("--config", str(write(tmp_path, command)))
    assert measured(seen, command, *files, env=old).backend.engine == old["CY_LLM_ENGINE"]
    config = measured(seen, command, *files, env=old | new | {"WEFT_MODEL": "of-the-environment"})
    assert config.backend.engine == new["WEFT_ENGINE"]
    assert (config.model.model, config.model.device, config.model.dtype) == ("of-the-environment", "cpu", "bfloat16")


def test_flags_are_before_the_environment(command: str, seen: list[Config], tmp_path: Path) -> None:
    env = {"WEFT_ENGINE": engine_for(command, "two"), "WEFT_DEVICE": "cuda", "WEFT_DTYPE": "float16", "WEFT_MODEL": "m"}
    flags = ["of-the-flags", "--device", "cpu", "--dtype", "float32", "--config", str(write(tmp_path, command))]
    if command != "mixed":
        flags += ["--engine", "ascend-vllm"]
    config = measured(seen, command, *flags, env=env)
    assert (config.model.model, config.model.device, config.model.dtype) == ("of-the-flags", "cpu", "float32")
    assert config.backend.engine == (env["WEFT_ENGINE"] if command == "mixed" else "ascend-vllm")


@pytest.mark.parametrize("variable", ["WEFT_ENGINE", "CY_LLM_ENGINE"])
def test_the_engine_of_the_environment_is_what_is_started(command: str, variable: str) -> None:
    """One that cannot be used here: what is raised names it."""
    done = CliRunner().invoke(bench, [command], env={variable: "remote"})
    assert isinstance(done.exception, ConfigError), done.output
    assert ("only native draws" if command == "mixed" else "it needs --engine-url") in str(done.exception)
    assert "remote" in str(done.exception)
