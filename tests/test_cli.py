"""Tests the command line: its flags, its errors and its exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests import forked
from tests.api.scripted_engine import ScriptedEngine, answer, forever
from weft import __version__, cli, terminal
from weft.api import server
from weft.backends.blocking import BlockingEngine
from weft.errors import InvalidRequest, ModelError
from weft.options import Config, settings
from weft.terminal import LocalEngine
from weft.types import Output, SamplingParams

WIDE = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}


def weft(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    return forked.weft(*arguments, environment=clean | WIDE | (env or {}))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Return the configurations that `weft serve` would have served."""
    for name in [name for name in os.environ if name.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    seen: list[Config] = []
    monkeypatch.setattr(server, "serve", lambda engine_factory, config: seen.append(config))
    return seen


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env=WIDE)


def test_every_setting_is_a_flag_of_serve() -> None:
    text = invoke("serve", "--help").output
    for setting in settings():
        assert setting.flag in text
        assert setting.type is not bool or f"--no-{setting.flag.removeprefix('--')}" in text
        assert setting.doc.split(";")[0].rstrip(".") in text
    assert "Scheduler: how requests share the engine's steps" in text


def test_generate_has_the_engine_s_flags_and_not_the_server_s() -> None:
    text = invoke("generate", "--help").output
    assert "--max-num-seqs" in text and "--temperature" in text
    assert "--port" not in text


def test_only_flags_that_were_given_count(
    served: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "weft.toml"
    file.write_text("[server]\nport = 1\nhost = 'from-file'\n")
    monkeypatch.setenv("WEFT_PORT", "2")
    invoke("serve", "some/model", "--config", str(file), "--max-num-seqs", "4", "--no-enable-prefix-caching")
    [config] = served
    assert (config.server.host, config.server.port) == ("from-file", 2)
    assert config.scheduler.max_num_seqs == 4
    assert config.cache.enable_prefix_caching is False
    assert config.model.model == "some/model"
    assert config.engine == Config().engine


def test_the_model_may_be_a_flag_too(served: list[Config]) -> None:
    invoke("serve", "--model", "m")
    invoke("serve", "m", "--model", "m")
    assert [config.model.model for config in served] == ["m", "m"]
    assert "Give one" in str(invoke("serve", "m", "--model", "n").exception)


def test_a_wrong_value_is_two_lines_and_exit_code_2() -> None:
    result = weft("serve", "--device", "cpuu")
    assert result.returncode == 2
    assert result.stderr == "flag --device: 'cpuu' is refused: Invalid enum value 'cpuu'.\nDid you mean 'cpu'?\n"
    result = weft("serve", env={"WEFT_PROT": "1"})
    assert result.returncode == 2
    assert "'WEFT_PORT'" in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_flag_suggests_the_nearest() -> None:
    result = invoke("serve", "--prt", "1")
    assert result.exit_code == 2
    assert "--port" in result.output


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = weft("serve", "./none.gguf", "--port", "0", env={"WEFT_HOME": str(tmp_path)})
    assert result.returncode == 1
    assert "none.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_version() -> None:
    assert invoke("version").output == f"weft {__version__}\n"


def test_doctor_and_models_on_an_empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert "weft pull" in invoke("models").output
    text = invoke("doctor").output
    for name in ("python", "cores", "memory", "torch", "cuda", str(tmp_path)):
        assert name in text


@pytest.fixture
def local() -> Iterator[LocalEngine]:
    engine = ScriptedEngine()

    async def start() -> ScriptedEngine:
        return engine

    with BlockingEngine(start) as local:
        yield local
    assert engine.closed and not engine.open


def test_generate_writes_the_answer_alone(local: LocalEngine, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.generate(local, "hi", {}, raw=False)
    assert capsys.readouterr().out == "Hello, world\n"


def test_a_conversation_remembers_until_it_is_cleared(local: LocalEngine, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["one", "", "/help", "two", "/clear", "three", "/exit", "never"])
    console = Console(file=io.StringIO())
    asked = []

    def read(prompt: str) -> str:
        asked.append([message["content"] for message in local.engine.messages])  # type: ignore[attr-defined]
        return next(lines)

    terminal.converse(local, {}, console, system="be brief", read_line=read)
    hello = "Hello, world"
    assert asked[4] == ["be brief", "one", hello, "two", hello][:4]
    assert asked[-1] == ["be brief", "three"]
    assert capsys.readouterr().out == hello * 3


def test_a_question_that_is_refused_is_taken_back(local: LocalEngine) -> None:
    local.engine.refuse = InvalidRequest("too long")  # type: ignore[attr-defined]
    console = Console(file=io.StringIO())
    lines = iter(["one", "two"])
    terminal.converse(local, {}, console, system="", read_line=lambda _: next(lines, "/exit"))
    assert [message["content"] for message in local.engine.messages] == ["two"]  # type: ignore[attr-defined]


def test_an_answer_that_is_left_is_ended_and_the_engine_lives_on(local: LocalEngine) -> None:
    local.engine.script = [Output(text="Hel", token_ids=[1]), forever]  # type: ignore[attr-defined]
    deltas = local.stream([1], SamplingParams())
    assert next(iter(deltas)).text == "Hel"
    deltas.close()  # type: ignore[attr-defined]
    assert local.engine.stats().open_requests == 0
    local.engine.script = answer("again")  # type: ignore[attr-defined]
    assert "".join(delta.text for delta in local.stream([1], SamplingParams())) == "again"


def test_an_engine_that_does_not_start_leaves_no_thread() -> None:
    async def start() -> ScriptedEngine:
        raise ModelError("damaged")

    before = threading.active_count()
    with pytest.raises(ModelError), BlockingEngine(start):
        pass
    assert threading.active_count() == before
