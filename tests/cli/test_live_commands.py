"""`weft top` and `weft ps`, against a real server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.api.http import CHAT, HELLO, real_server
from tests.api.scripted_engine import PAINTER, ScriptedEngine
from tests.ports import reserved_port
from tests.waiting import PATIENCE, wait_until
from weft.api.app import build_app
from weft.cli.live_text import models_table, snapshot_text
from weft.cli.main import app
from weft.config import load
from weft.errors import ConfigError, Unavailable
from weft.serving.live import CacheBlocks, LiveModel, Snapshot, SpentBudget, Throughput
from weft.serving.timing import Timeline

KEYED = load({"api_key": ["sesame"]}, env={})


@pytest.fixture
def url() -> Iterator[str]:
    engine = ScriptedEngine(images=PAINTER)
    engine.memory = (1, 3 << 20)
    with real_server(build_app(engine, load(env={}))) as url:
        assert httpx.post(url + CHAT, json=HELLO, headers={"x-request-id": "0123456789"}, timeout=PATIENCE).is_success
        yield url


def said(*words: str) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_ps_lists_the_models_in_memory(url: str) -> None:
    header, line = said("ps", "--url", url).splitlines()
    assert header.split() == ["name", "state", "engine", "device", "memory", "running", "waiting", "restarts"]
    assert line.split() == ["scripted", "loaded", "scripted", "cpu", "3", "MiB", "0", "2", "1"]
    [model] = json.loads(said("ps", "--json", "--url", url))
    assert model == {
        "name": "scripted", "state": "loaded", "stage": "", "engine": "scripted", "device": "cpu",
        "memory_bytes": 3 << 20, "running": 0, "waiting": 2, "restarts": 1,
    }  # fmt: skip


def test_top_writes_one_snapshot_where_there_is_no_terminal(url: str) -> None:
    text = said("top", "--url", url)
    assert "running 0  waiting 2" in text and "output 0.0 tok/s" in text and "in use 5" in text
    assert "01234567  stop" in text and "0123456789" not in text, "ids are short"
    assert "\x1b" not in text
    snapshot = msgspec.json.decode(said("top", "--json", "--url", url), type=Snapshot)
    assert snapshot.models[0].throughput is not None and [one.id for one in snapshot.ended] == ["0123456789"]


def test_the_key_goes_in_a_header_and_a_wrong_one_is_told() -> None:
    with real_server(build_app(ScriptedEngine(), KEYED), KEYED) as url:
        assert "scripted" in said("ps", "--url", url, "--api-key", "sesame")
        for key in ("", "wrong"):
            with pytest.raises(Unavailable, match="wants an API key"):
                said("ps", "--url", url, "--api-key", key)


def test_a_server_without_a_live_view_and_no_server_are_told() -> None:
    off = load({"live": False}, env={})
    with (
        real_server(build_app(ScriptedEngine(), off), off) as url,
        pytest.raises(Unavailable, match="has no live view") as refused,
    ):
        said("top", "--url", url)
    assert "--no-live" in refused.value.hint
    with reserved_port() as port, pytest.raises(Unavailable, match="No server answers"):
        said("ps", "--url", f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="--url"):
        said("ps", "--url", "127.0.0.1")


@pytest.mark.parametrize("end", ["q", "interrupt"])
def test_top_on_a_terminal_goes_on_until_q_or_an_interrupt(url: str, end: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weft", "top", "--url", url]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=root)
    os.close(theirs)
    written = bytearray()
    try:
        while written.count(b"running 0") < 3:
            written += os.read(ours, 1 << 16)
        if end == "q":
            os.write(ours, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        with pytest.raises(OSError):  # the terminal's other end is closed
            while True:
                written += os.read(ours, 1 << 16)
        wait_until(lambda: process.poll() is not None, "the end of weft top")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 0
    assert b"Traceback" not in written
    assert b"\x1b[?1049l" in written, "the terminal is as it was before"


def hostile() -> Snapshot:
    name = "m\x1b[31m\n\u202e"
    model = LiveModel(
        name=name, state=name, stage=name, engine=name, device=name, memory_bytes=1 << 40, running=1, waiting=0,
        restarts=0, preemptions=0, not_told=name,
        spent=SpentBudget(steps=4, decode=10, prefill=20, encode=0, denoise=10),
        throughput=Throughput(
            prompt_tokens_per_s=1, output_tokens_per_s=2, images_per_s=0.5, denoise_steps_per_s=3
        ),
        blocks=CacheBlocks(
            total=8, used=4, block_size=16, cached=2, blocks_per_cell=1, used_cells="ffff0000", cached_cells="0000ff00"
        ),
    )  # fmt: skip
    timeline = Timeline(
        id=name, answer_id=name, tenant=name, model=name, kind="image", state=name, began=0.0,
        phases=[("queue", 1.0), ("encode", 1.0), ("denoise", 2.0)], choices=1, prompt_tokens=3, tokens=0, steps=(3, 10),
    )  # fmt: skip
    return Snapshot(time=0.0, tick_s=0.5, models=[model], open=[timeline], ended=[])


def test_what_a_server_says_does_not_steer_the_terminal_and_needs_no_colours() -> None:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(snapshot_text(hostile(), console))
        console.print(models_table(hostile().models))
    text = captured.get()
    assert "\x1b" not in text and "\u202e" not in text
    lines = text.splitlines()
    budget = next(line for line in lines if line.startswith("step budget")).split()[-1]
    assert [budget.count(letter) / len(budget) for letter in "dpn"] == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    assert "8.0 steps/s  decode 20  prefill 40  denoise 20 tok/s" in text
    assert "3/10 steps" in text and "qqqqqqqqeeeeeeeennnnnnnnnnnnnnn" in text
    assert "50.0 %  in use 4  cached 2  of 8 blocks" in text
