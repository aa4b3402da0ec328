"""The commands and programs of all pages are run, in order, against a real server with the default model.

A fence ```sh is run; ```sh needs=gpu says what a machine must have for it, and is only read: its commands of Weft are
parsed by the real command line, and the targets of make must be there. `weft serve` starts a server for the commands
after it, up to the next one or the end of the page. The programs of examples/ are run by tests/examples. A command that
stands on several pages and needs no server is run once.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from tests import forked
from tests.e2e.server import Server
from tests.waiting import PATIENCE
from weft.bench.commands import app as bench_app
from weft.checkpoint.model_files import ModelFiles
from weft.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("examples/README.md", "training/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCES = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "console")
DATA = ("text", "toml", "yaml", "json", "nginx")
COMMAND = re.compile(
    r"^[ \t]*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/|\./)?"
    r"(?:weft|pip|python3?|curl|grpcurl|docker|kubectl|helm|make|git|npm|vllm|cat|echo|export|sudo|systemctl) ",
    re.MULTILINE,
)
SHORT = ("--max-model-len", "256")
"""Answers are random, and most requests of the pages set no limit: one that rambles would go on for minutes."""
EXAMPLE = re.compile(r"(?:[A-Z_]+=\S+ )?python (examples/\w+\.py)\b.*")
ALONE = re.compile(r"weft (?:doctor|generate|models|plan|show)\b")
"""Commands that do the same wherever they stand."""
PLAIN = re.compile(r"(?:(?P<before>(?:cat|echo) [^|;&<>$]+) \| )?(?P<weft>weft [^|;&<>$]+)")
"""Commands that need no shell: they are forks of a process that has imported everything."""
RUN_WITH_A_TINY_MODEL = {(ROOT / "docs/API.md", "python")}
"""Programs that tests/api/test_api_docs.py runs."""


def fences(page: Path) -> Iterator[tuple[str, str, str]]:
    """The language of every block, what it needs, and its text."""
    for info, text in FENCES.findall(page.read_text()):
        language, _, needs = info.partition(" needs=")
        yield language, needs, text


def run_fences(page: Path) -> list[tuple[str, str]]:
    """The language and the text of the blocks that are run here."""
    return [
        (language, text)
        for language, needs, text in fences(page)
        if language in (*SHELL, "python") and not needs and (page, language) not in RUN_WITH_A_TINY_MODEL
    ]


def commands(text: str) -> list[str]:
    """The commands of a block: lines, of which those that end with a stroke or inside of quotes go on."""
    found, open_line = [], ""
    for line in text.splitlines():
        open_line = f"{open_line}\n{line}" if open_line else line
        if not open_line.endswith("\\") and open_line.count("'") % 2 == 0:
            found.append(open_line)
            open_line = ""
    assert not open_line, f"a quote is open at the end of the block: {open_line}"
    return [re.sub(r"\s+#.*", "", command) for command in found if command.strip() and not command.startswith("#")]


class Shell:
    """A folder with examples/ and deploy/ in it, the `weft` of this checkout, and the server that was started last."""

    _done: ClassVar[set[str]] = set()
    """Commands that were run already and are not run again."""

    def __init__(self, folder: Path, plain: Server, stack: ExitStack) -> None:
        self._folder = folder
        self._plain = plain
        self._stack = stack
        self._server = plain
        (folder / "deploy").symlink_to(ROOT / "deploy")
        (folder / "examples").mkdir()
        for path in (ROOT / "examples").iterdir():
            (folder / "examples" / path.name).symlink_to(path)
        # It is summarised, and the model would read all of it.
        (folder / "examples/README.md").unlink()
        (folder / "examples/README.md").write_text((ROOT / "examples/README.md").read_text()[:100])
        (folder / "bin").mkdir()
        for name, words in (("weft", "-m weft"), ("python", "")):
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        (folder / ".curlrc").write_text("fail-with-body\n")

    def run(self, text: str) -> None:
        for by, group in groupby(commands(text), self._way):
            if by == self._run_shell:
                self._run_shell("\n".join(group))
            else:
                for command in group:
                    by(command)

    def _way(self, command: str) -> Callable[[str], object]:
        """How a command is run."""
        if command.startswith("weft serve"):
            return self._serve
        if EXAMPLE.fullmatch(command):
            return self._check_example
        return self._run_weft if PLAIN.fullmatch(command) else self._run_shell

    def _serve(self, command: str) -> None:
        self._stack.close()
        flags = self._serve_flags(command)
        self._server = self._stack.enter_context(Server(*flags, *SHORT)) if flags else self._plain

    def _check_example(self, command: str) -> None:
        found = EXAMPLE.fullmatch(command)
        assert found and (self._folder / found[1]).is_file(), command

    def _run_weft(self, command: str) -> None:
        found = PLAIN.fullmatch(self._at_the_server(command))
        assert found is not None
        if command in self._done:
            return
        (self._folder / "stdin").write_text(self._run_shell(found["before"]) if found["before"] else "")
        self._fork(command, forked.WEFT, *shlex.split(found["weft"])[1:], stdin=self._folder / "stdin")
        if ALONE.match(found["weft"]):
            self._done.add(command)

    def _run_shell(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._at_the_server(text)],
            cwd=self._folder, env=self._environment(), capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        _check(text, done)
        return done.stdout

    def run_python(self, text: str) -> None:
        program = self._folder / "program.py"
        program.write_text(self._at_the_server(text))
        self._fork(text, str(program))

    def _fork(self, text: str, module: str, *words: str, **how: Path) -> None:
        _check(text, forked.run(module, *words, environment=self._environment(), folder=self._folder, **how))

    def _at_the_server(self, text: str) -> str:
        return re.sub(r"http://(?:127\.0\.0\.1|localhost):8000", self._server.url, text)

    def _serve_flags(self, command: str) -> list[str]:
        """The flags with which a test may start it: this machine's address, and files of this folder."""
        words = shlex.split(command)[2:]
        flags = [word for word in words if word not in ("smollm2", "--host", "0.0.0.0")]
        return [str(self._folder / flag) if (self._folder / flag).is_file() else flag for flag in flags]

    def _environment(self) -> dict[str, str]:
        path = f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        where = {"SERVER_URL": self._server.url, "SERVER_GRPC": f"127.0.0.1:{self._server.grpc_port()}"}
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CURL_HOME": str(self._folder), **where}


def _check(command: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def plain(smollm2_files: ModelFiles) -> Iterator[Server]:
    """`weft serve`, for all pages."""
    with Server(*SHORT) as server:
        yield server


@pytest.mark.parametrize("page", filter(run_fences, PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page: Path, plain: Server, tmp_path: Path) -> None:
    with ExitStack() as stack:
        shell = Shell(tmp_path, plain, stack)
        for language, text in run_fences(page):
            if language == "python":
                shell.run_python(text)
            else:
                shell.run(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_commands_is_run_or_says_what_it_needs(page: Path) -> None:
    """What is marked as neither a shell's nor Python's is data, and holds no command."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert not re.search(r"^[ \t]+```", page.read_text(), re.MULTILINE), "a fence inside of a list is not seen here"
    for language, needs, text in fences(page):
        assert language in (*SHELL, "python", *DATA), f"```{language}\n{text}"
        assert language not in DATA or not COMMAND.search(text), f"```{language}\n{text}"
        assert {*needs.split(",")} - {""} <= reference.NEEDS.keys()
    marked = [needs for _, needs, _ in fences(page) if needs]
    assert [needs for _, needs in reference.FENCE.findall(page.read_text())] == marked  # The site tells them in words.


@functools.cache
def parser(of: typer.Typer) -> TyperCommand | TyperGroup:
    return typer.main.get_command(of)


def command_of(words: list[str]) -> tuple[TyperCommand | TyperGroup, list[str]]:
    """The command that words name, and the words behind its name."""
    group = parser(app)
    while isinstance(group, TyperGroup) and words:
        name, *words = words
        group = parser(bench_app) if name == "bench" else group.commands[name]
    return group, words


def weft_commands(page: Path) -> Iterator[str]:
    for language, _, text in fences(page):
        if language in SHELL:
            for command in commands(re.sub(r"\\\n\s*", "", text)):
                # Some pages have a word on each command behind several spaces, or behind #.
                found = re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?weft (?!\w+\s{2,}\|)([^|#<>&\n]+)", command)
                if found:
                    yield re.split(r"\s{3,}", found[1])[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_weft_is_one_that_its_command_line_takes(page: Path) -> None:
    for text in weft_commands(page):
        if re.match(r"[A-Z]{2,} |[\w ]+, ", text):
            continue  # a form, as in weft COMMAND --help, or several commands at once
        words = shlex.split(text)
        if text.startswith("-"):  # an option of `weft` itself
            assert words[0] in {"--help", *(flag for each in parser(app).params for flag in each.opts)}
            continue
        try:
            while words:
                command, words = command_of(words)
                if isinstance(command, TyperGroup):
                    break  # `weft bench` lists its commands
                rest = command.make_context("weft", words).args
                assert not rest or command.context_settings["allow_extra_args"], rest
                # What is not its own, `weft bench compare` gives to `weft bench serve`, and that to `weft serve`.
                words = [*(["bench", "serve"] if "compare" in text else ["serve"]), *rest] if rest else []
        except Exception as error:
            raise AssertionError(f"weft {text}: {error}") from error


def test_commands_are_found() -> None:
    for line in (
        "weft serve",
        "$ make show-agents",
        "WEFT_PORT=1 .venv/bin/weft top ",
        "    curl -N http://localhost/",
    ):
        assert COMMAND.search(f"WARNING The engine\n{line} x"), line
    assert not COMMAND.search("backends/vllm   engine/client\nThe engine native: pip install vllm")
    assert sum(len(list(weft_commands(page))) for page in PAGES) > 60
    command, _ = command_of(["serve"])
    with pytest.raises(Exception, match="No such option"):
        command.make_context("weft", ["--no-such-flag"])


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, (page, named - targets)
