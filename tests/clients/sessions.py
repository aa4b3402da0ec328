"""Sessions of coding agents as they go wrong and on: what `make show-agents` runs, and the lines that it prints.

The server is real, with the native engine. Its model is tiny, with a context that holds the agents' own prompts, and
its answer is always the same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import httpx
import torch
import typer
from msgspec import Struct
from safetensors.torch import save_file

from tests import tiny_models
from tests.clients.coding_clis import AGENTS
from tests.clients.show import HERE, Client, Watched, clients, console, install, version
from tests.e2e.server import Server
from tests.waiting import PATIENCE, wait_until

MODEL = "scripted"
LONG = 20_000
CONTEXT = 65_536
VOCAB_SIZE = 2048
LAST = 1024
"""The token that ends an answer."""
HIDDEN = 64
PAGE = HERE.parents[1] / "docs/API.md"
INSTRUCTIONS_CHARS = 32_000
"""Codex reads no more of the file with a project's instructions."""

INSTRUCTIONS = {"claude": "CLAUDE.md", "codex": "AGENTS.md"}
"""The file with a project's instructions, which an agent puts into its prompt."""
PLACES = 32
"""Requests that the server lets in at the same time; Claude Code counts the tokens of some twenty texts at once."""
OTHERS = "/v1/completions"
"""The path of another client, which no agent uses."""
CONTINUED = {
    "claude": ("-c", "-p", "Go on", "--dangerously-skip-permissions"),
    "codex": (*AGENTS["codex"].words[:-1], "resume", "--last", "Go on"),
}


def save_long_model(folder: Path) -> None:
    """Write a model that counts: after a token comes the next of its vocabulary, up to LAST, whatever the temperature.
    It has one layer and one head, so that a prompt of many tokens takes seconds."""
    folder.mkdir()
    tiny_models.save_tokenizer(folder)
    about = tiny_models.config_json("llama2") | {
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        **{f"{layer}.self_attn.{part}_proj.weight": (16, HIDDEN) for part in "qkv"},
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, 16),
        **{f"{layer}.mlp.{part}_proj.weight": (96, HIDDEN) for part in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (HIDDEN, 96),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    tokens = weights["model.embed_tokens.weight"] = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    weights["lm_head.weight"] = 2 * tokens.roll(1, dims=0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": LAST}))
    (folder / "tokenizer.json").write_text(tiny_models.tokenizer_json(VOCAB_SIZE, (PAGE.read_text(),)))


class Check(Struct, frozen=True):
    what: str
    ok: bool
    said: str
    printed: str
    """What the agent printed, for a reader of a failure."""


class Ended(Struct, frozen=True):
    """What came of an agent's process, and what its server logged."""

    status: int
    answer: str
    """The agents print the answer to the standard output, and all else to the other."""
    messages: str
    log: str

    def numbers(self, name: str) -> list[int]:
        """Return a number of every answer that was generated."""
        return [int(count) for count in re.findall(rf" request .* {name}=(\d+) ", self.log)]

    @property
    def requests(self) -> str:
        answered = [one for one in re.findall(r" method=(\S+ path=\S+) status=2", self.log) if OTHERS not in one]
        counts = {one.replace("path=", ""): answered.count(one) for one in answered}
        return ", ".join(f"{count} {one}" for one, count in counts.items())

    @property
    def refused(self) -> list[str]:
        return re.findall(r" path=\S+ status=([45]\d\d)", self.log)

    @property
    def printed(self) -> str:
        return f"status {self.status}\n{self.messages[-1500:]}\n{self.answer[-500:]}\n{self.log[-1500:]}"


class Running:
    """An agent's process, in a group of its own, as a terminal starts it."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str], watched: Watched) -> None:
        self._watched = watched
        self._output, self._messages = (folder.parent / name for name in ("output", "messages"))
        with self._output.open("w") as output, self._messages.open("w") as messages:
            self._process = subprocess.Popen(
                words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=messages,
                start_new_session=True,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait(PATIENCE)

    def end(self) -> Ended:
        status = self._process.wait(PATIENCE)
        return Ended(status, self._output.read_text(), self._messages.read_text(), self._watched.log())


class Sessions:
    """One agent's sessions in one project, against one server."""

    def __init__(self, name: str, commands: Path, server: Server, folder: Path) -> None:
        self._name, self._command = name, str(commands / name)
        self._server, self._watched = server, Watched(server)
        self._opened = ExitStack()
        self._project, home = folder / "project", folder / "home"
        self._project.mkdir()
        home.mkdir()
        (self._project / INSTRUCTIONS[name]).write_text(PAGE.read_text()[:INSTRUCTIONS_CHARS])
        settings = AGENTS[name].settings(server.url, home)
        self._env = {**os.environ, "HOME": str(home), "PWD": str(self._project), **settings}

    def checks(self) -> Iterator[Check]:
        """Leave no process behind, whatever comes."""
        with self._opened:
            yield from self._checks()

    def _checks(self) -> Iterator[Check]:
        first = self._start().end()
        (length,) = first.numbers("tokens")
        yield self._check("first session", first, 0)
        for what, number in (("Ctrl-C in mid-answer", signal.SIGINT), ("SIGKILL in mid-answer", signal.SIGKILL)):
            yield self._cancelled(what, number, length)
        for what, words in (("another session", ()), ("the same, continued", CONTINUED[self._name])):
            hits = self._metric("prefix_cache_hits_total")
            ended = self._start(*words).end()
            yield self._check(what, ended, self._metric("prefix_cache_hits_total") - hits, least_cached=LONG)
        yield self._without_engine(first.answer)
        if self._name == "claude":
            ended = self._start("-p", "/context").end()
            is_counted = "/count_tokens" in ended.requests and not ended.refused
            yield Check("/context", ended.status == 0 and is_counted, ended.requests, ended.printed)
        yield self._refused()

    def _check(self, what: str, ended: Ended, cached: int, least_cached: int = 0) -> Check:
        prompts, answers = ended.numbers("prompt_tokens"), ended.numbers("tokens")
        is_long = bool(prompts) and min(prompts) >= LONG and cached >= least_cached
        sizes = f"prompt {_listed(prompts)} tokens, {cached:,} of them cached; answer {_listed(answers)}"
        ok = ended.status == 0 and is_long and not ended.refused
        return Check(what, ok, f"{ended.requests}; {sizes}", ended.printed)

    def _cancelled(self, what: str, number: signal.Signals, length: int) -> Check:
        running = self._in_mid_answer()
        running.signal(number)
        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(self._server.metric(f"weft_{name}") for name in held), f"0 of {held}")
        ended = running.end()
        tokens = ended.numbers("tokens")
        said = f"aborted after {_listed(tokens)} of {length:,} tokens; then 0 requests run and 0 blocks are held"
        return Check(what, "finish=abort" in ended.log and max(tokens) < length, said, ended.printed)

    def _without_engine(self, answer: str) -> Check:
        """The engine is killed; the api process starts another, which goes on with the stream."""
        running = self._in_mid_answer()
        os.kill(self._server.engine_pid(), signal.SIGKILL)
        ended = running.end()
        died = re.findall(r"The engine died: .* (\d+) requests are open", ended.log)
        is_same = ended.answer == answer
        said = (
            f"{ended.requests}; open as it died: {', '.join(died)}; answer {'as the first' if is_same else 'DIFFERS'}"
        )
        ok = ended.status == 0 and died == ["1"] and is_same and not ended.refused
        return Check("engine killed in mid-answer", ok, said, ended.printed)

    def _refused(self) -> Check:
        """Another client has all places until the agent was refused."""
        body = {"model": MODEL, "prompt": "The weft", "stream": True, "ignore_eos": True, "max_tokens": CONTEXT - 1000}
        rejected = self._metric("num_requests_rejected_total")
        with httpx.Client(timeout=PATIENCE) as other, ExitStack() as opened:
            for _ in range(PLACES):
                stream = other.stream("POST", self._server.url + OTHERS, json=body)
                opened.enter_context(stream).raise_for_status()
            running = self._start()
            wait_until(lambda: self._metric("num_requests_rejected_total") > rejected, "a refusal")
        ended = running.end()
        said = f"answered {', '.join(ended.refused)} and asked again; then {ended.requests}"
        return Check("server full", ended.status == 0 and {*ended.refused} == {"429"}, said, ended.printed)

    def _in_mid_answer(self) -> Running:
        generated = self._metric("generation_tokens_total")
        running = self._start()
        wait_until(lambda: self._metric("generation_tokens_total") > generated, "the answer's beginning")
        return running

    def _start(self, *words: str) -> Running:
        command = [self._command, *(words or AGENTS[self._name].words)]
        running = Running(command, self._project, self._env, self._watched)
        self._opened.callback(running.close)
        return running

    def _metric(self, name: str) -> int:
        return int(self._server.metric(f"weft_{name}"))


def _listed(numbers: list[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


def checks(client: Client, root: Path) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = Path(folder, "model")
        save_long_model(model)
        flags = ("--served-model-name", MODEL, "--tool-style", "hermes", "--max-concurrent-per-key", str(PLACES))
        with Server("--model", str(model), *flags, is_fork=False) as server:
            yield from Sessions(client.agent, client.commands(root).resolve(), server, Path(folder)).checks()


def show(
    folder: Annotated[Path, typer.Option(help="Where the clients are installed.")] = Path("build/clients"),
    only: Annotated[str, typer.Option(help="Agents whose names hold one of these words, parted by commas.")] = "",
) -> None:
    """Run the sessions of every agent, and end with 1 unless all went well."""
    agents = [one for one in clients() if one.agent in INSTRUCTIONS]
    made = []
    for client in [one for one in agents if any(word in one.name for word in only.split(","))]:
        install(client, folder)
        console.print(f"{client.name} {version(client, folder)}")
        for check in checks(client, folder):
            console.print(f"  {'ok' if check.ok else 'FAILED'}: {check.what}: {check.said}", markup=False)
            if not check.ok:
                console.print(check.printed, markup=False)
            made.append(check)
    raise typer.Exit(not all(check.ok for check in made))


if __name__ == "__main__":
    typer.run(show)
