"""`weft image` and `LLM.draw` give the same image, and refuse the same requests."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.api.openai.pixels import pixels_of
from tests.api.scripted_engine import PAINTER, ScriptedEngine, Step, picture
from tests.waiting import PATIENCE, wait_until
from weft import LLM, llm, terminal
from weft.checkpoint.model_files import ModelFiles
from weft.cli import main as cli
from weft.errors import ConfigError, EngineFault, InvalidRequest
from weft.serving.image_request import ImageOptions
from weft.types import FinishReason, ImageParams, Output

TELLS_OF_ITS_STEPS = """
import sys
from pathlib import Path
from weft.cli import main as cli
from weft import terminal

begun = Path(sys.argv.pop(1))

class Progress(terminal.Progress):
    def update(self, *args, **fields):
        super().update(*args, **fields)
        begun.touch()

terminal.Progress = Progress
cli.main()
"""
"""The command, which makes a file when it shows the first step of an image."""

WIDE = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The engine that every command and every LLM starts."""
    engine = ScriptedEngine(images=PAINTER)

    async def start(*_: Any) -> ScriptedEngine:
        return engine

    monkeypatch.setattr(cli, "_start", start)
    monkeypatch.setattr(llm, "start_engine", start)
    return engine


def weft(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["image", *words], env=WIDE)


def test_the_command_writes_the_image_and_says_where_it_is(engine: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "out.png"
    words = ("--steps", "3", "--seed", "7", "--guidance", "2.5", "--negative", "b", "--sampler", "heun")
    done = weft("a red circle", "-o", str(file), *words, "--size", "4x2")
    assert done.exit_code == 0, done.output
    [drawn] = engine.drawn
    assert drawn.prompt == list(b"a red circle")
    assert drawn.image == ImageParams(
        width=4, height=2, steps=3, guidance_scale=2.5, seed=7, sampler="heun", negative_token_ids=list(b"b")
    )
    assert pixels_of(file.read_bytes()) == (4, 2, picture(drawn.image, 3))
    assert f"{file}: 4x2, 3 steps in " in done.output and "seed 7" in done.output
    assert engine.closed and not engine.open


def test_a_bar_tells_how_far_the_image_is(tmp_path: Path) -> None:
    engine = ScriptedEngine(images=PAINTER)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    asyncio.run(terminal.write_image(engine, ImageOptions(prompt="a"), tmp_path / "a.png", console))
    assert "6/6" in written.getvalue()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-o", "out.jpg"), ConfigError),
        (("-o", "nowhere/at/all/out.png"), ConfigError),
        (("--size", "big"), InvalidRequest),
        (("--size", "64x64"), InvalidRequest),
        (("--steps", "0"), InvalidRequest),
        (("--sampler", "ddim"), InvalidRequest),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_nothing(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: type
) -> None:
    monkeypatch.chdir(tmp_path)
    done = weft("a", *words)
    assert type(done.exception) is error
    assert not engine.drawn and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "end", [Output(denoise_step=1, finish=FinishReason.ERROR, error="no luck"), EngineFault("no luck")]
)
def test_an_image_that_fails_closes_the_engine(engine: ScriptedEngine, tmp_path: Path, end: Step) -> None:
    engine.image_script = [Output(denoise_step=1), end]
    done = weft("a", "-o", str(tmp_path / "out.png"))
    assert isinstance(done.exception, EngineFault) and "no luck" in str(done.exception)
    assert engine.closed and not engine.open and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_named(engine: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "out.png").mkdir()
    done = weft("a", "-o", str(tmp_path / "out.png"))
    assert "out.png cannot be written" in str(done.exception)


def test_the_help_teaches() -> None:
    text = weft("--help").output
    assert 'weft image "a red circle on a blue background" -o circle.png' in text
    for flag in ("--steps", "--seed", "--guidance", "--size", "--model", "--output"):
        assert flag in text


def test_the_python_api_draws(engine: ScriptedEngine, tmp_path: Path) -> None:
    with LLM("smollm2") as model:
        image = model.draw("a", seed=3, steps=2, guidance_scale=1, size="4x2")
        assert (image.width, image.height) == (4, 2)
        assert image.rgb == picture(engine.drawn[0].image, 2)
        image.save(tmp_path / "a.png")
        assert pixels_of((tmp_path / "a.png").read_bytes())[2] == image.rgb
        with pytest.raises(InvalidRequest, match="4x2"):
            model.draw("a", size="8x8")
    assert engine.closed and not engine.open


def test_ctrl_c_ends_it_without_a_word_and_without_a_file(smollm2_files: ModelFiles, tmp_path: Path) -> None:
    """The whole process group is interrupted during the image, as a terminal does it."""
    file, begun = tmp_path / "out.png", tmp_path / "begun"
    words = ("image", "a red circle", "--steps", "1000", "-o", str(file))
    process = subprocess.Popen(
        [sys.executable, "-c", TELLS_OF_ITS_STEPS, str(begun), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # As in a terminal: what a shell starts in the background ignores Ctrl-C, and so does all that it starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(begun.exists, "the first step")
    assert process.poll() is None, "it is still drawing"
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert said.strip() == "" and not file.exists()
