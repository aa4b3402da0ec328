"""Coding agents of the command line, unchanged, against a server of their own, which `make show-clients` runs as well.

Each is asked for a file, writes it as its own prompt says, and reads the end of the answer. The model is scripted
(tests/clients/coder.py); the server, the agents and the file are real.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from msgspec import Struct

from tests.clients.coder import DONE, FILE, WRITTEN
from tests.waiting import PATIENCE

ASKED = f"Write {FILE}"


class Agent(Struct, frozen=True):
    words: tuple[str, ...]
    """What follows the command: it asks once, allows every tool, and ends."""
    settings: Callable[[str, Path], Mapping[str, str]]
    """Returns the environment for a server's address and a home; writes there what the agent reads."""


def over_openai(url: str, home: Path) -> Mapping[str, str]:
    place = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    return {**place, "OPENAI_MODEL": "scripted"}


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
    _write(
        home / ".codex/config.toml",
        'model = "scripted"\nmodel_provider = "weft"\n[model_providers.weft]\n'
        f'name = "Weft"\nbase_url = "{url}/v1"\nwire_api = "responses"\n',
    )
    return {}


def opencode_settings(url: str, home: Path) -> Mapping[str, str]:
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Weft", "options": options, "models": {"scripted": {}}}
    _write(home / ".config/opencode/opencode.json", json.dumps({"provider": {"weft": provider}}))
    return {}


def continue_settings(url: str, home: Path) -> Mapping[str, str]:
    model = {"name": "Weft", "provider": "openai", "model": "scripted", "apiBase": f"{url}/v1", "apiKey": "none"}
    about = {"name": "Weft", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    _write(home / ".continue/config.yaml", json.dumps(about))
    return {"CONTINUE_TELEMETRY_ENABLED": "0"}


def pi_settings(url: str, home: Path) -> Mapping[str, str]:
    provider = {"baseUrl": f"{url}/v1", "apiKey": "none", "api": "openai-completions", "models": [{"id": "scripted"}]}
    _write(home / ".pi/agent/models.json", json.dumps({"providers": {"weft": provider}}))
    return {}


def gptme_settings(url: str, home: Path) -> Mapping[str, str]:
    _write(home / ".config/gptme/config.toml", f'[prompt]\n[env]\nOPENAI_BASE_URL = "{url}/v1"\n')
    return over_openai(url, home)


AGENTS = {
    "claude": Agent(("-p", ASKED, "--dangerously-skip-permissions"), claude_settings),
    "codex": Agent(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED), codex_settings
    ),
    "aider": Agent(
        (
            *("--model", "openai/scripted", "--edit-format", "whole", "--message", ASKED, FILE, "--yes-always"),
            *("--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-gitignore"),
        ),
        over_openai,
    ),
    "opencode": Agent(("run", "--model", "weft/scripted", ASKED), opencode_settings),
    "qwen": Agent(("--auth-type", "openai", "--model", "scripted", "--yolo", "-p", ASKED), over_openai),
    "cn": Agent(("-p", ASKED, "--auto"), continue_settings),
    "pi": Agent(("-p", ASKED, "--model", "weft/scripted"), pi_settings),
    "gptme": Agent(
        ("--non-interactive", "--no-confirm", "--tool-format", "markdown", "--model", "local/scripted", ASKED),
        gptme_settings,
    ),
}
"""The agents by their commands."""


class Session(Struct, frozen=True):
    wrote: bool
    answered: bool
    requests: int
    refused: list[str]
    without_effect: list[str]
    said: str


def session(name: str, commands: Path) -> Session:
    """Let an agent write the file, against a server that no other asks."""
    agent = AGENTS[name]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.clients.coder", "{}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, server:
        home, project = Path(folder, "home"), Path(folder, "project")
        home.mkdir()
        project.mkdir()
        try:
            assert server.stdout is not None and server.stderr is not None
            found = re.search(r"at (http://\S+)", server.stdout.readline())
            assert found is not None, "the server did not start"
            environment = {**os.environ, "HOME": str(home), "PWD": str(project), **agent.settings(found[1], home)}
            done = subprocess.run(
                [str(commands / name), *agent.words], cwd=project, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
            )  # fmt: skip
            metrics = httpx.get(found[1] + "/metrics", timeout=PATIENCE).text
        finally:
            server.terminate()
        log = server.stderr.read()
        written = project / FILE
        return Session(
            wrote=written.exists() and written.read_text().strip() == WRITTEN.strip(),
            answered=DONE in done.stdout,
            requests=len(re.findall(r"path=\S+ status=200", log)),
            refused=re.findall(r"path=(\S+ status=[45]\d\d)", log),
            without_effect=re.findall(r'^weft_fields_without_effect_total\{field="(.+?)"', metrics, re.MULTILINE),
            said=done.stdout[-1500:],
        )


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
