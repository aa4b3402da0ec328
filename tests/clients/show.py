"""Real clients against real servers: what `make show-clients` runs, and the table that it prints.

tests/clients/clients.toml says which clients there are. Each is installed into a folder of its own; its program tries
feature after feature against one server of the default model. The coding agents write a file, each through a server
with a scripted model (tests/clients/coding_clis.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from tests.clients.coding_clis import session
from tests.e2e.server import Server
from tests.waiting import PATIENCE, wait_until

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
MODEL = "smollm2"
FEATURES = (
    *("models", "chat", "stream", "tools", "structured", "logprobs", "completions", "responses", "count_tokens"),
    *("embeddings", "images", "batches", "edit"),
)
QUIET = {
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
    "ANONYMIZED_TELEMETRY": "False",
    "PYTHONWARNINGS": "ignore",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Clients that would tell others of their use, or ask them for tables, do not."""
LEFT_OUT = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "HTTP_PROXY", "HTTPS_PROXY"}
PREFIX = "FEATURE "

console = Console(width=600)  # A row of the table is a line.


class Client(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    features: tuple[str, ...]
    program: str = ""
    agent: str = ""
    """The command of a coding agent, in place of a program."""
    args: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    command: str = ""

    @property
    def package(self) -> str:
        """The first package without its version and extras."""
        return re.sub(r"(?<=.)[=@\[<>].*", "", (*self.pip, *self.npm)[0])

    def folder(self, root: Path) -> Path:
        kind = "pip" if self.pip else "npm" if self.npm else "system"
        return root / kind / re.sub(r"\W+", "-", self.package if self.pip or self.npm else self.command).strip("-")

    def commands(self, root: Path) -> Path:
        return self.folder(root) / ("bin" if self.pip else "node_modules/.bin")


class Tried(Struct, frozen=True):
    """What a program says of one feature."""

    feature: str
    ok: bool
    said: str = ""
    status: int | None = None

    @property
    def word(self) -> str:
        return "ok" if self.ok else "REFUSED" if self.status is not None and 400 <= self.status < 500 else "FAILED"


class Row(Struct, frozen=True):
    client: str
    version: str
    tried: list[Tried]
    requests: int = 0
    refused: list[str] = []
    """Path and status of every answer that was none."""
    without_effect: list[str] = []

    @property
    def is_good(self) -> bool:
        return bool(self.tried) and all(one.ok for one in self.tried) and not self.refused


def clients() -> list[Client]:
    return msgspec.convert(tomllib.loads((HERE / "clients.toml").read_text())["client"], list[Client])


def install(client: Client, root: Path) -> None:
    """Put a client's packages into its folder, unless they are there."""
    folder = client.folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    marker, wanted = folder / "installed", "\n".join((*client.pip, *client.npm))
    if not wanted or (marker.exists() and marker.read_text() == wanted):
        return
    if client.pip:
        uv, python = _uv(root), str(folder / "bin/python")
        _run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)])
        _run([uv, "pip", "install", "--quiet", "--python", python, *client.pip])
    else:
        _run(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", *client.npm])
    marker.write_text(wanted)


def _uv(root: Path) -> str:
    """Return the installer of Python's packages, which is pip's interface at a tenth of its time."""
    folder = root / "uv"
    if not (folder / "bin/uv").exists():
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python")]
        _run([*pip, "install", "--quiet", "--only-binary", ":all:", "uv"])
    return str(folder / "bin/uv")


def version(client: Client, root: Path) -> str:
    if client.pip:
        text = f"from importlib.metadata import version; print(version('{client.package}'))"
        return _run([str(client.folder(root) / "bin/python"), "-c", text]).strip()
    if client.npm:
        about = client.folder(root) / "node_modules" / client.package / "package.json"
        return str(json.loads(about.read_text())["version"])
    found = re.search(r"\d+(\.\d+)+", _run([client.command, "--version"]))
    return found[0] if found else "?"


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=1200, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from error
    if done.returncode:
        raise InstallError((done.stderr or done.stdout).strip()[-800:])
    return done.stdout


class InstallError(Exception):
    """A client cannot be had on this machine."""


class Watched:
    """A server, and what it says of the requests since it was asked last."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._line = len(server.log)
        self._counts = self._fields()

    def since(self) -> tuple[int, list[str], list[str]]:
        """Return how many requests were answered, the path and status of those refused, and the fields of no effect."""
        text = self.log()
        counts = self._fields()
        fields = [name for name, count in counts.items() if count > self._counts.get(name, 0)]
        self._counts = counts
        return len(re.findall(r" path=\S+ status=2", text)), re.findall(r" path=(\S+ status=[45]\d\d)", text), fields

    def log(self) -> str:
        """Return what was logged."""
        mark = uuid.uuid4().hex
        httpx.get(self._server.url + "/version", headers={"x-request-id": mark}, timeout=PATIENCE)
        wait_until(lambda: any(mark in line for line in self._server.log[self._line :]), "the log")
        lines = [line for line in self._server.log[self._line :] if mark not in line]
        self._line = len(self._server.log)
        return "".join(lines)

    def _fields(self) -> dict[str, float]:
        text = self._server.get("/metrics").text
        found = re.findall(r'^weft_fields_without_effect_total\{field="(.+?)".*\} (\S+)$', text, re.MULTILINE)
        return {name: float(count) for name, count in found}


def use(client: Client, root: Path, url: str, timeout: float) -> list[Tried]:
    """Run a client's program, and return what it says of every feature."""
    folder = client.folder(root)
    if client.npm:  # A module of Node.js finds packages from where it lies.
        for name in ("features.mjs", client.program):
            shutil.copy(PROGRAMS / name, folder / name)
    python = str(folder / "bin/python") if client.pip else sys.executable
    words = ["node", str(folder / client.program)] if client.npm else [python, str(PROGRAMS / client.program)]
    kept = {name: value for name, value in os.environ.items() if name.upper() not in LEFT_OUT}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        env = {**kept, **QUIET, "HOME": home, "WEFT_URL": url, "WEFT_MODEL": MODEL, "OPENAI_API_KEY": "none"}
        try:
            done = subprocess.run(
                [*words, *client.args], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=timeout,
            )  # fmt: skip
            output, end = done.stdout, done.stderr.strip()[-1500:]
        except subprocess.TimeoutExpired as error:
            output, end = (error.stdout or b"").decode(), f"It did not end within {timeout:g} s."
    lines = [line.removeprefix(PREFIX) for line in output.splitlines() if line.startswith(PREFIX)]
    told = {one.feature: one for one in (msgspec.json.decode(line, type=Tried) for line in lines)}
    return [told.get(name, Tried(name, ok=False, said=end)) for name in client.features]


def row(client: Client, root: Path, watched: Watched, url: str, timeout: float) -> Row:
    had = version(client, root)
    if client.agent:
        try:
            done = session(client.agent, client.commands(root).resolve())
        except subprocess.TimeoutExpired as error:
            return Row(client.name, had, [Tried("edit", ok=False, said=str(error))])
        edit = Tried("edit", ok=done.wrote and done.answered, said=done.said)
        return Row(client.name, had, [edit], done.requests, done.refused, done.without_effect)
    tried = use(client, root.resolve(), url, timeout)
    return Row(client.name, had, tried, *watched.since())


def rows(chosen: list[Client], root: Path, timeout: float) -> Iterator[Row]:
    """Install and run client after client, and tell how far it has come."""
    with (
        tempfile.TemporaryDirectory() as data,
        Server("--model", MODEL, "--compat-api", "ollama,llamacpp", "--data-dir", data, is_fork=False) as server,
    ):
        watched = Watched(server)
        for number, client in enumerate(chosen, 1):
            console.print(f"{number}/{len(chosen)} {client.name}", end=" ")
            try:
                install(client, root)
                made = row(client, root, watched, server.url, timeout)
            except InstallError as error:
                made = Row(client.name, "not installed", [Tried("install", ok=False, said=str(error))])
            console.print(made.version, *(f"{one.feature}: {one.word}" for one in made.tried), *made.refused, sep=", ")
            for said in dict.fromkeys(one.said for one in made.tried if not one.ok):
                console.print("   ", said, markup=False)
            yield made


def table(made: list[Row]) -> Table:
    """Return the table of clients and features, as Markdown."""
    table = Table("client", "version", *FEATURES, "requests", "refused", "fields without effect", box=box.MARKDOWN)
    for one in made:
        words = {tried.feature: tried.word for tried in one.tried}
        cells = (words.get(name, "") for name in FEATURES)
        fields = ", ".join(f"`{name}`" for name in one.without_effect)
        table.add_row(one.client, one.version, *cells, str(one.requests), str(len(one.refused)), fields)
    return table


def show(
    folder: Annotated[Path, typer.Option(help="Where the clients are installed.")] = Path("build/clients"),
    only: Annotated[str, typer.Option(help="Clients whose names hold one of these words, parted by commas.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for the program of a client.")] = 240,
) -> None:
    """Run every client, and end with 1 unless each could do what it tried and was refused nothing."""
    chosen = [one for one in clients() if any(word in one.name for word in only.split(","))]
    made = list(rows(chosen, folder, timeout))
    folder.joinpath("table.json").write_bytes(msgspec.json.format(msgspec.json.encode(made)))
    had = [one for one in made if one.version != "not installed"]
    console.print(table(had))
    for one in made:
        if one not in had:
            console.print(f"{one.client} is not installed: {one.tried[0].said}", markup=False)
    console.print(f"{len(had)} clients, {sum(one.is_good for one in had)} of them without a failure or a refusal")
    raise typer.Exit(not all(one.is_good for one in made))


if __name__ == "__main__":
    typer.run(show)
