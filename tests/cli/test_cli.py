"""Tests the command line: its flags, its errors and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from tests import forked
from tests.api.scripted_engine import ScriptedEngine, answer, forever
from tests.checkpoint.gguf_bytes import small_model
from weft import __version__, terminal
from weft.api import server
from weft.backends.blocking import BlockingEngine
from weft.backends.contract import ChatStyles
from weft.checkpoint.model_files import ModelFiles
from weft.cli import chat_session, model_commands
from weft.cli import main as cli
from weft.cli.chat_client import LocalModel
from weft.cli.chat_session import ChatSession
from weft.errors import ContextTooLong, InvalidRequest, ModelError
from weft.machine.devices import Device
from weft.machine.hardware import Machine, Memory, inspect_machine
from weft.options import Config, settings
from weft.terminal import LocalEngine
from weft.text.parsers.styles import reasoning_style
from weft.types import Output, SamplingParams

ROOT = Path(__file__).parents[2]
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


def shown_flags(text: str) -> set[str]:
    return set(re.findall(r"^│ +(--[a-z-]+)", text, re.MULTILINE))


def test_every_setting_is_a_flag_of_serve() -> None:
    text = invoke("serve", "--help-all").output
    for setting in settings():
        assert setting.flag in text
        assert setting.type is not bool or f"--no-{setting.flag.removeprefix('--')}" in text
        assert setting.doc.split(";")[0].rstrip(".") in text
    assert "Scheduler: how requests share the engine's steps" in text


def test_help_shows_the_flags_that_people_use() -> None:
    text = invoke("serve", "--help").output
    common = shown_flags(text) - {"--config", "--help", "--help-all"}
    assert len(common) == 20 and {"--port", "--api-key", "--ssl-certfile", "--max-model-len"} <= common
    assert "--help-all shows every flag" in text
    # Those that are not shown are taken all the same, also after another command was shown in full.
    invoke("serve", "--help-all")
    assert "--block-size" not in invoke("chat", "--help").output


@pytest.mark.parametrize("command", ["generate", "chat", "run", "image"])
def test_a_command_for_one_answer_does_not_repeat_the_engine_s_flags(command: str) -> None:
    flags = shown_flags(invoke(command, "--help").output)
    assert len(flags) < 25 and not {"--block-size", "--max-num-seqs", "--port"} & flags
    every = shown_flags(invoke(command, "--help-all").output)
    assert {"--max-num-seqs", "--block-size"} <= every and "--port" not in every


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
    assert invoke("version").output == invoke("--version").output == f"weft {__version__}\n"


def test_no_color_is_respected() -> None:
    coloured = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    plain = weft("serve", "--device", "cpuu", env={**coloured, "NO_COLOR": "1"})
    assert "\x1b[31m" not in plain.stderr
    assert "\x1b[31m" in weft("serve", "--device", "cpuu", env={**coloured, "NO_COLOR": ""}).stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_models(shell: str, tmp_path: Path) -> None:
    words = {
        "bash": ("COMP_WORDS", "COMP_CWORD"),
        "zsh": ("_TYPER_COMPLETE_ARGS", ""),
        "fish": ("_TYPER_COMPLETE_ARGS", ""),
    }
    line, number = words[shell]
    asked = {"_WEFT_COMPLETE": f"complete_{shell}", line: "weft run qwen3:", **({number: "2"} if number else {})}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell == "fish" else {}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['weft']; from weft.cli.main import main; main()"],
        env={**os.environ, **asked, "WEFT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "qwen3:0.6b" in done.stdout.replace("\\", ""), done.stderr
    assert "llama3.2" not in done.stdout


@pytest.mark.parametrize("begun", ["", "0"])
def test_bash_completes_what_is_behind_a_colon(begun: str, tmp_path: Path) -> None:
    """Bash itself takes the words apart, asks, and puts the answer in the place of the last part."""
    program = tmp_path / "weft"
    program.write_text(f"#!{sys.executable}\nfrom weft.cli.main import main\nmain()\n")
    program.chmod(0o755)
    script = f"""
        eval "$(_WEFT_COMPLETE=source_bash weft)"
        COMP_WORDS=(weft run qwen3 : {begun}) COMP_CWORD={4 if begun else 3}
        _weft_completion weft
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "WEFT_HOME": str(tmp_path / "home"), "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "0.6b" in done.stdout.split() and "llama3.2" not in done.stdout, done.stderr
    assert "1.7b" not in done.stdout if begun else "1.7b" in done.stdout.split()


def test_json_for_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smollm2_files: ModelFiles) -> None:
    listed = {model["name"]: model for model in json.loads(invoke("models", "--all", "--json").output)}
    assert listed["smollm2"]["installed"] and listed["smollm2"]["size_bytes"] == 98_362_432
    assert listed["qwen3:0.6b"]["source"] == "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"
    assert isinstance(listed["qwen3:0.6b"]["fits"], bool) or listed["qwen3:0.6b"]["installed"]
    plan = json.loads(invoke("plan", "smollm2", "--json", "--memory-gib", "8").output)
    assert plan["problem"] is None and plan["weights_gib"] > 0.09 and plan["total_gib"] == 8
    assert {engine["name"] for engine in json.loads(invoke("engines", "--json").output)["engines"]} >= {"native"}
    doctor = json.loads(invoke("doctor", "--json").output)
    assert doctor["plan"]["model"] == "smollm2" and doctor["findings"][0] == {
        "name": "weft",
        "value": __version__,
        "good": True,
    }
    (tmp_path / "weft.toml").write_text("[server]\nport = 1\n")
    [changed] = json.loads(invoke("config", "check", str(tmp_path / "weft.toml"), "--json").output)
    assert (changed["setting"], changed["value"]) == ("port", "1")


@pytest.mark.parametrize(
    ("capability", "gigabytes"), [((9, 0), 4.92 * 1.55), ((7, 5), 2 * 8.03)], ids=("blocks", "bfloat16")
)
def test_models_on_a_gpu_are_as_large_as_it_holds_them(capability: tuple[int, int], gigabytes: float) -> None:
    gpu = Device(kind="cuda", index=0, name="GPU", total=16 * 10**9, free=15 * 10**9, capability=capability)
    machine = replace(inspect_machine(), devices=(gpu,))
    needed, free = model_commands._memory(machine, 4.92, 8.03, "Q4_K_M")
    assert needed == int(gigabytes * 10**9) + model_commands.BESIDE_WEIGHTS and free == gpu.free


def test_show_tells_geometry_template_and_memory(smollm2_files: ModelFiles) -> None:
    shown = json.loads(invoke("show", "smollm2", "--json").output)
    assert (shown["architecture"], shown["geometry"]["num_layers"], shown["quantisation"]) == ("llama", 30, "Q4_1")
    assert [row["context"] for row in shown["memory"]] == [2048, 8192]
    sizes = [row["total_bytes"] for row in shown["memory"]]
    # 46,080 bytes of keys and values a token: 2 x 30 layers x 3 heads x 64 numbers x 4 bytes.
    assert sizes[1] - sizes[0] == (8192 - 2048) * 46080
    text = invoke("show", "smollm2").output
    assert "135 M parameters" in text and "<|im_start|>" in text and "fits" in text
    assert invoke("show", "smollm2", "--template").output == shown["chat_template"] + "\n"


def test_models_that_do_not_fit_are_marked() -> None:
    small = Machine(cpu=inspect_machine().cpu, memory=Memory(total=3 << 30, free=3 << 30))
    needed, free = model_commands._memory(small, 4.92, 8.03, "Q4_K_M")
    assert needed > free
    needed, free = model_commands._memory(small, 0.64, 0.6, "Q8_0")
    assert needed < free


def test_rm_removes_what_was_pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(small_model())
    assert invoke("rm", "mine").output.startswith("mine is removed: ")
    assert "not installed" in str(invoke("rm", "smollm2").exception)


def test_doctor_and_models_on_an_empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert "weft pull" in invoke("models").output
    text = invoke("doctor").output
    for name in ("python", "cores", "memory", "torch", "cuda", str(tmp_path)):
        assert name in text
    assert re.search(r"^weft +" + re.escape(__version__), text, re.MULTILINE)


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


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The engine that `weft generate` starts."""
    engine = ScriptedEngine()

    async def start(config: Config) -> ScriptedEngine:
        return engine

    monkeypatch.setattr(cli, "_start", start)
    return engine


def test_generate_takes_what_is_piped_in_as_context(generated: ScriptedEngine) -> None:
    done = CliRunner().invoke(cli.app, ["generate", "Summarise."], input="A long report.\n", env=WIDE)
    assert done.stdout == "Hello, world\n"
    assert [message["content"] for message in generated.messages] == ["A long report.\n\nSummarise."]
    CliRunner().invoke(cli.app, ["generate", "-"], input="All of it.", env=WIDE)
    assert [message["content"] for message in generated.messages] == ["All of it."]


def test_standard_input_has_a_bound_and_is_text(generated: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "MAX_STDIN_BYTES", 1 << 20)
    large = CliRunner().invoke(cli.app, ["generate", "x"], input="x" * ((1 << 20) + 1))
    assert "more than 1 MiB" in str(large.exception)
    assert "not UTF-8" in str(CliRunner().invoke(cli.app, ["generate", "x"], input=b"\xff\xfe").exception)
    assert "empty" in str(CliRunner().invoke(cli.app, ["generate", "-"], input="").exception)


class Loaded(LocalModel):
    """A model over an engine that is there."""

    def __init__(self, local: BlockingEngine) -> None:
        super().__init__(Config(), lambda config: local)


def converse(local: LocalEngine, *lines: str, **options: Any) -> str:
    """Return what a chat says beside the answers, when it is given these lines."""
    assert isinstance(local, BlockingEngine)
    said, waiting = io.StringIO(), iter(lines)

    def read() -> str:
        for line in waiting:
            return line
        raise EOFError

    ChatSession(Loaded(local), Console(file=said, width=200), read, **options).run()
    return said.getvalue()


def contents(local: LocalEngine) -> list[str]:
    return [message["content"] for message in local.engine.messages]  # type: ignore[attr-defined]


def test_a_conversation_remembers_until_it_is_cleared(local: LocalEngine, capsys: pytest.CaptureFixture[str]) -> None:
    converse(local, "one", "", "two", system="be brief")
    hello = "Hello, world"
    assert contents(local) == ["be brief", "one", hello, "two"]
    converse(local, "one", "/clear", "three", "/exit", "never", system="be brief")
    assert contents(local) == ["be brief", "three"]
    assert capsys.readouterr().out == f"{hello}\n" * 4


def test_a_question_that_is_refused_is_taken_back(local: LocalEngine) -> None:
    local.engine.refuse = InvalidRequest("too long")  # type: ignore[attr-defined]
    assert converse(local, "one", "two").count("too long") == 2
    assert contents(local) == ["two"]


def test_a_context_that_is_full_names_the_way_out(local: LocalEngine) -> None:
    local.engine.refuse = ContextTooLong("9000 tokens, and 8192 fit.", hint="Send less.")  # type: ignore[attr-defined]
    assert "9000 tokens, and 8192 fit. /clear forgets the conversation." in converse(local, "one")


def test_settings_of_a_chat_reach_the_model(local: LocalEngine) -> None:
    told = converse(local, "/set temperature 0.5", "/set stop \\n\\n", "/set top_k x", "hi", sampling={"seed": 7})
    params = local.engine.submitted[-1].params  # type: ignore[attr-defined]
    assert (params.temperature, params.stop, params.seed) == (0.5, ("\n\n",), 7)
    assert "top_k must be a whole number, not 'x'." in told
    assert "tok/s" not in converse(local, "/set stats off", "hi")


def test_reasoning_is_neither_in_the_answer_nor_in_the_conversation(
    local: LocalEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = local.engine
    engine.styles = ChatStyles(reasoning=reasoning_style("think", None))
    engine.script = answer("<think>France,", " so</think>Paris")
    converse(local, "one", "two")
    assert contents(local) == ["one", "Paris", "two"]
    assert capsys.readouterr().out == "Paris\nParis\n"


def test_a_model_that_is_not_there_changes_nothing(local: LocalEngine) -> None:
    told = converse(local, "one", "/model no-such-model-here", "two")
    assert "There is no model 'no-such-model-here'." in told
    assert contents(local) == ["one", "Hello, world", "two"]


def test_a_path_is_a_message_and_a_word_is_a_command(local: LocalEngine) -> None:
    assert "There is no command /tmp." in converse(local, "/tmp", "/usr/bin/python fails")
    assert contents(local) == ["/usr/bin/python fails"]


def test_what_is_too_long_is_not_sent(local: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_session, "MAX_MESSAGE_CHARS", 10)
    assert "11 characters, and at most 10 are sent" in converse(local, "x" * 11)


def test_a_file_that_is_no_conversation_changes_nothing(local: LocalEngine, tmp_path: Path) -> None:
    for content in ("[]", '{"messages": [{"role": "boss", "content": "x"}]}', "\0"):
        (tmp_path / "chat.json").write_text(content)
        assert "is not a saved conversation" in converse(local, f"/load {tmp_path / 'chat.json'}")
    (tmp_path / "there.json").write_text("")
    assert "exists. Give another name." in converse(local, f"/save {tmp_path / 'there.json'}")


# An answer in a terminal.


def shown(*pieces: str, width: int = 40, **options: Any) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=20, force_terminal=True, color_system=None)
    view = terminal.MarkdownView(console, **options)
    for piece in pieces:
        view.add(piece)
    view.end()
    # What a frame wrote over is not shown any more: it ends with the sequence that clears its lines.
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", screen.getvalue().rpartition("\x1b[1A\x1b[2K")[2])


def test_markdown_is_laid_out_block_by_block() -> None:
    assert terminal.split_blocks("one\n\ntwo") == ("one\n\n", "two")
    assert terminal.split_blocks("one\n\n") == ("", "one\n\n")
    assert terminal.split_blocks("- a\n\n  more of a") == ("", "- a\n\n  more of a")
    code = "```python\na\n\nb\n"
    assert terminal.split_blocks(code) == ("", code)
    assert terminal.split_blocks(f"{code}```\n\nthen") == (f"{code}```\n\n", "then")


def test_lines_of_an_answer_stay_lines_and_words_stay_whole() -> None:
    text = shown("roses are red\nviolets are blue and so is the sea behind them")
    assert [line.rstrip() for line in text.strip().splitlines()] == [
        "roses are red",
        "violets are blue and so is the sea",
        "behind them",
    ]


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert terminal.printable("a\x1b[31mb\x07\x9bc\td\n\x00") == "a[31mbc\td\n"
    assert "\x1b]0;" not in shown("\x1b]0;title\x07text")


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


def test_a_command_by_itself_is_parsed_as_in_the_whole_application() -> None:
    def flags(parser: Any) -> Any:
        if hasattr(parser, "commands"):
            return {name: flags(command) for name, command in parser.commands.items()}
        return [(param.name, param.opts, param.default, param.help) for param in parser.params]

    whole = flags(get_command(cli.app))
    assert {"serve", "config", "cluster"} < whole.keys()
    for name, expected in whole.items():
        assert flags(get_command(cli.app_for([name, "--help"]))) == {name: expected}
    for words in ([], ["--help"], ["nothing"]):
        assert cli.app_for(words) is cli.app
