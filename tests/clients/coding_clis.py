"""Coding agents of the command line, unchanged, against a server of their own: what `make show-clients` runs.

Each is asked for a file, calls its own tool to write it, and reads the end of the answer. The model is scripted
(tests/clients/coder.py); the server, the agents and the file are real.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import httpx
import typer
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests.clients.coder import DONE, FILE, WRITTEN
from tests.waiting import PATIENCE

ASKED = f"Write {FILE}"


class Agent(Struct, frozen=True):
    name: str
    command: str
    words: tuple[str, ...]
    """What follows the command: it asks once, allows every tool, and ends."""
    settings: Callable[[str, Path], Mapping[str, str]]
    """Returns the environment for a server's address and a home; writes there what the agent reads."""


def claude_settings(url: str, home: Path) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }


def codex_settings(url: str, home: Path) -> Mapping[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(
        'model = "scripted"\nmodel_provider = "weft"\n[model_providers.weft]\n'
        f'name = "Weft"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    return {}


AGENTS = (
    Agent("Claude Code", "claude", ("-p", ASKED, "--dangerously-skip-permissions"), claude_settings),
    Agent(
        "Codex CLI",
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED),
        codex_settings,
    ),
)


class Session(Struct, frozen=True):
    version: str
    wrote: bool
    answered: bool
    requests: int
    refused: int
    without_effect: list[str]


def session(agent: Agent, commands: Path) -> Session:
    """Let an agent write the file, against a server that no other asks."""
    command = str(commands / agent.command)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.clients.coder", "{}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with tempfile.TemporaryDirectory() as folder, server:
        home, project = Path(folder, "home"), Path(folder, "project")
        home.mkdir()
        project.mkdir()
        try:
            assert server.stdout is not None and server.stderr is not None
            found = re.search(r"at (http://\S+)", server.stdout.readline())
            assert found is not None, "the server did not start"
            environment = {**os.environ, "HOME": str(home), **agent.settings(found[1], home)}
            version = _run([command, "--version"], environment, project).strip()
            said = _run([command, *agent.words], environment, project)
            metrics = httpx.get(found[1] + "/metrics", timeout=PATIENCE).text
        finally:
            server.terminate()
        log = server.stderr.read()
        written = project / FILE
        return Session(
            version=version,
            wrote=written.exists() and written.read_text().strip() == WRITTEN.strip(),
            answered=DONE in said,
            requests=len(re.findall(r"path=/v1/\S+ status=200", log)),
            refused=len(re.findall(r"status=[45]\d\d", log)),
            without_effect=re.findall(r'^weft_fields_without_effect_total\{field="(.+?)"', metrics, re.MULTILINE),
        )


def _run(command: list[str], environment: Mapping[str, str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    return done.stdout


def show(
    commands: Annotated[Path, typer.Option(help="The folder with the agents' commands.")] = Path(
        "build/clients/node_modules/.bin"
    ),
) -> None:
    """Run every agent, and end with 1 unless each has written its file and was refused nothing."""
    table = Table("agent", "version", "file", "answer", "requests", "refused", "fields without effect")
    is_good = True
    for agent in AGENTS:
        done = session(agent, commands.resolve())
        table.add_row(
            agent.name, done.version, "written" if done.wrote else "MISSING", "read" if done.answered else "MISSING",
            str(done.requests), str(done.refused), ", ".join(done.without_effect),
        )  # fmt: skip
        is_good &= done.wrote and done.answered and not done.refused
    Console(width=200).print(table)
    raise typer.Exit(not is_good)


if __name__ == "__main__":
    typer.run(show)
