"""Tests the modes of the mixed benchmark, what they count, and the command's exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from tests import virtual_time
from tests.api.scripted_engine import PAINTER, ScriptedEngine, Step, all_steps, answer
from tests.tiny_images import save_image_model
from weft.backends.contract import Stream, tokens_of
from weft.bench import mixed
from weft.bench.commands import app as bench
from weft.bench.mixed import (
    Chat,
    MixedFigures,
    MixedReport,
    MixedWork,
    ModeReport,
    Picture,
    WorkResult,
    figures_of,
    num_runs,
    run_mixed,
)
from weft.config import load
from weft.engine_stats import EngineStats
from weft.errors import ConfigError, EngineFault, InvalidRequest
from weft.types import FinishReason, GenerateImage, GenerationRequest, Output

ALL_MODES = [
    "chats one at a time",
    "images one at a time",
    "text only",
    "images only",
    "together",
    "one after the other",
    "blocking",
    "blocking, batched",
]
FEW = MixedWork(chats=3, images=2, max_tokens=8, steps=3, runs=1)
USUAL: list[Step] = [0.01, *answer("Hello", ", ", "world", finish=FinishReason.LENGTH)]
ODD: list[Step] = [0.01, *answer("Hello", ", ", "World", finish=FinishReason.LENGTH)]


class Scripted(ScriptedEngine):
    """An engine that notes for every request how many chats and images are running when it comes."""

    def __init__(self) -> None:
        super().__init__(USUAL, images=PAINTER)
        self.odd_chats: set[int] = set()
        """Numbers of the chats that get another answer."""
        self.odd_images: set[int] = set()
        self.chats_came: list[tuple[int, int]] = []
        self.images_came: list[tuple[int, int]] = []

    def stats(self) -> EngineStats:
        return replace(super().stats(), prepared=True)

    async def submit(self, request: GenerationRequest) -> Stream:
        if isinstance(request.task, GenerateImage):
            self.images_came.append(self._under_way())
            is_odd = len(self.drawn) in self.odd_images
            params = request.task.params
            params = replace(params, seed=params.seed + 9 * is_odd)
            self.image_script = [0.002, *all_steps(params, len(tokens_of(request.prompt)))]
            return await super().submit(replace(request, task=replace(request.task, params=params)))
        self.script = ODD if len(self.submitted) in self.odd_chats else USUAL
        self.chats_came.append(self._under_way())
        return await super().submit(request)

    def _under_way(self) -> tuple[int, int]:
        images = sum("Image" in name for name in self.open)
        return len(self.open) - images, images


class Engines:
    """The engines that a benchmark starts, and what is switched off when it does."""

    def __init__(self) -> None:
        self.first = Scripted()
        self.started: list[Scripted] = []
        self.without: list[list[str]] = []

    async def start(self, *_: Any) -> Scripted:
        self.started.append(Scripted() if self.started else self.first)
        self.without.append(sorted(filter(None, os.environ.get("WEFT_WITHOUT", "").split(","))))
        return self.started[-1]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """They take time, which passes on the virtual clock."""
    engines = Engines()
    monkeypatch.setattr(mixed, "start_native", engines.start)
    monkeypatch.setattr("weft.bench.commands.run", virtual_time.run)
    return engines


def measure(work: MixedWork, tick: Callable[[str], None] = lambda name: None) -> MixedReport:
    [report] = virtual_time.run(run_mixed(load(env={}), [work], tick))
    return report


def by_name(report: MixedReport) -> dict[str, ModeReport]:
    return {mode.name: mode for mode in report.modes}


def test_every_mode_is_served_by_an_engine_with_its_switches(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_WITHOUT", "overlap")
    ticks: list[str] = []
    report = measure(FEW, ticks.append)
    assert list(by_name(report)) == ALL_MODES
    assert ticks == [name for name in ALL_MODES for _ in range(2)] and len(ticks) == num_runs([FEW])
    weft, one_whole, whole = ["overlap"], ["denoise-batches", "denoise-steps", "overlap"], ["denoise-steps", "overlap"]
    assert engines.without == [weft, one_whole, whole]
    assert [mode.without for mode in report.modes] == [weft] * 5 + [one_whole] * 2 + [whole]
    assert os.environ["WEFT_WITHOUT"] == "overlap"
    assert all(engine.closed and not engine.open for engine in engines.started)


def test_chats_alone_are_measured_once_for_all_numbers_of_steps(engines: Engines) -> None:
    works, ticks = [replace(FEW, steps=steps) for steps in (2, 3, 4)], list[str]()
    reports = virtual_time.run(run_mixed(load(env={}), works, ticks.append))
    assert [list(by_name(report)) for report in reports] == [ALL_MODES] * 3
    assert ticks.count("text only") == 2 and ticks.count("together") == 6 and len(ticks) == num_runs(works)


def test_the_same_work_is_done_in_every_mode(engines: Engines) -> None:
    measure(replace(FEW, seed=5, runs=2))
    chats = [request for engine in engines.started for request in engine.submitted]
    images = [request for engine in engines.started for request in engine.drawn]
    assert len(chats) == 3 * FEW.chats * 6 and len(images) == 3 * FEW.images * 6
    assert len({tuple(chat.prompt) for chat in chats}) == FEW.chats
    assert {len(chat.prompt) for chat in chats} == {FEW.input_tokens}
    params = chats[0].params
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0, 8, True)
    assert len({tuple(image.prompt) for image in images}) == FEW.images
    assert {(one.image.seed, one.image.steps, one.image.guidance_scale) for one in images} == {(5, 3, 3.0), (6, 3, 3.0)}


def test_no_run_finds_what_another_has_cached(engines: Engines) -> None:
    measure(FEW)
    for engine in engines.started:
        chats, images = engine.submitted, engine.drawn
        assert len({(chat.cache_salt, *chat.prompt) for chat in chats}) == len(chats)
        assert len({(image.cache_salt, *image.prompt) for image in images}) == len(images)


def test_who_is_served_beside_whom(engines: Engines) -> None:
    measure(FEW)
    first, peer, _ = engines.started
    alone, at_once = [(0, 0)] * 3, [(0, 0), (1, 0), (2, 0)]
    assert first.chats_came == 2 * alone + 2 * at_once + 2 * at_once, "one at a time, text only, together"
    drawn_alone, drawn_at_once, beside_chats = [(0, 0)] * 2, [(0, 0), (0, 1)], [(3, 0), (3, 1)]
    assert first.images_came == 2 * drawn_alone + 2 * drawn_at_once + 2 * beside_chats
    assert peer.images_came == 2 * drawn_at_once + 2 * beside_chats, "one after the other, blocking"


def test_what_is_not_as_alone_is_counted_where_it_was(engines: Engines) -> None:
    # Three chats, each mode twice, the first time uncounted: one at a time, text only, together.
    engines.first.odd_chats = {16}
    engines.first.odd_images = {10, 11}
    report = measure(FEW)
    same = {name: (mode.same_texts, mode.same_images) for name, mode in by_name(report).items()}
    assert same == dict.fromkeys(ALL_MODES, (3, 2)) | {
        "chats one at a time": (3, None),
        "images one at a time": (None, 2),
        "text only": (3, None),
        "images only": (None, 2),
        "together": (2, 0),
    }
    assert report.verdict is not None
    assert (report.verdict.same_texts, report.verdict.same_images) == (2, 0)
    assert not report.all_as_alone
    engines.started.clear()
    engines.first = Scripted()
    engines.first.odd_chats = {12}
    assert measure(FEW).all_as_alone, "the first run is not counted"


def test_a_chat_that_differs_in_one_run_of_three_differs(engines: Engines) -> None:
    engines.first.odd_chats = {13}
    assert by_name(measure(MixedWork(chats=2, images=0, runs=3)))["text only"].same_texts == 1


@pytest.mark.parametrize(("chats", "names"), [(0, ALL_MODES[1:4:2]), (3, ALL_MODES[0:3:2])])
def test_one_kind_alone_has_only_its_own_modes(engines: Engines, chats: int, names: list[str]) -> None:
    report = measure(replace(FEW, chats=chats, images=0 if chats else 4))
    assert list(by_name(report)) == names and len(engines.started) == 1
    assert report.verdict is None and report.all_as_alone
    assert all(bool(mode.median.output_tokens_per_s) == bool(chats) for mode in report.modes)
    assert all(bool(mode.median.images_per_s) != bool(chats) for mode in report.modes)


def test_images_that_arrive_one_by_one(engines: Engines) -> None:
    report = measure(replace(FEW, chats=1, images=3, stagger_s=0.04))
    modes = by_name(report)
    assert modes["together"].median.seconds >= 0.08 > modes["text only"].median.seconds
    assert modes["images one at a time"].median.seconds < 0.08, "whose turn it is has arrived"
    assert engines.first.images_came[-3:][1:] == [(0, 0), (0, 0)]


def test_what_cannot_be_measured_is_refused(engines: Engines) -> None:
    with pytest.raises(ConfigError, match="neither chats nor images"):
        measure(MixedWork(chats=0, images=0))
    assert not engines.started
    engines.first.model = replace(engines.first.model, images=None)
    with pytest.raises(InvalidRequest, match="no image model"):
        measure(FEW)
    assert engines.first.closed


def test_a_request_that_fails_ends_the_benchmark(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.bench.test_mixed.USUAL", [Output(finish=FinishReason.ERROR, error="lost")])
    with pytest.raises(EngineFault, match="lost"):
        measure(FEW)
    assert engines.first.closed and os.environ.get("WEFT_WITHOUT", "") == ""


def test_figures_are_of_the_times_that_things_came() -> None:
    chats = [
        Chat(0.0, [1, 2, 3, 4], [1.0, 2.0, 3.0, 5.0]),
        Chat(0.5, [1, 2, 3, 4], [2.0, 2.5, 2.5, 6.0]),
    ]
    images = [
        Picture(arrived=0.0, asked=1.0, ended=3.0, rgb=b""),
        Picture(arrived=1.0, asked=2.25, ended=4.0, rgb=b""),
    ]
    assert figures_of(WorkResult(began=0.0, chats=chats, images=images)) == MixedFigures(
        seconds=6.0,
        output_tokens_per_s=8 / 6,
        decode_tokens_per_s=3 / 2,  # from 2, where both decode, to 4, where the last image ends
        first_token_p50_ms=1500.0,
        first_token_max_ms=1500.0,
        inter_token_p50_ms=1000.0,
        inter_token_p95_ms=3500.0,
        inter_token_max_ms=3500.0,
        images_per_s=2 / 3,
        image_p50_s=3.0,
        image_max_s=3.0,
    )
    text = figures_of(WorkResult(began=0.0, chats=chats, images=[]))
    assert text.decode_tokens_per_s == 4 / 3 and text.images_per_s is None and text.image_max_s is None
    later = [Picture(arrived=0.0, asked=6.0, ended=7.0, rgb=b"")]
    late = figures_of(WorkResult(began=0.0, chats=chats, images=later))
    assert late.decode_tokens_per_s is None, "no chat decodes then"


def test_the_command_measures_real_engines(tiny_model: Path, tmp_path: Path) -> None:
    painter = save_image_model(tmp_path / "painter", 96)
    # No variables of Weft: an engine would not be a fork.
    settings = tmp_path / "small.toml"
    settings.write_text("[model]\nmax_model_len = 256\nthreads = 1\n[cache]\nkv_cache_memory_mb = 16\n")
    work = "--chats 2 --images 2 --input-tokens 9 --max-tokens 8 --runs 1 --guidance 2.5 --device cpu --steps 4"
    files = ("--image-model", str(painter), "--config", str(settings), "--json", str(tmp_path / "report.json"))
    done = CliRunner().invoke(bench, ["mixed", str(tiny_model), *work.split(), *files], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [mode["name"] for mode in report["modes"]] == ALL_MODES
    for mode in report["modes"]:
        assert mode["same_texts"] in (None, 2) and mode["same_images"] in (None, 2)
        assert mode["median"]["seconds"] > 0 and len(mode["runs"]) == 1
        assert done.output.count(f"\n{mode['name']} ") == 2, "in a table of chats, and one of images"
    assert "…" not in done.output, "all of it fits into 80 columns"
    together, verdict = report["modes"][4]["median"], report["verdict"]
    assert None not in together.values() or together["decode_tokens_per_s"] is None
    assert verdict["times_as_long"]["blocking"] == report["modes"][6]["median"]["seconds"] / together["seconds"]
    assert report["image_model"] == "painter" and report["device"] == "cpu"
    assert "2 of 2" in done.output and "over text only" in done.output


def test_several_numbers_of_steps_are_measured_in_the_same_engines(engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ["--chats", "3", "--images", "2", "--steps", "3,5", "--runs", "2", "--json", str(file)]
    done = CliRunner().invoke(bench, ["mixed", *flags], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert len(engines.started) == 3 and {one.image.steps for one in engines.first.drawn} == {3, 5}
    report = json.loads(file.read_text())
    assert report["steps"] == [3, 5] == [one["work"]["steps"] for one in report["reports"]]
    for one in report["reports"]:
        assert [mode["name"] for mode in one["modes"]] == ALL_MODES
        assert all(len(mode["runs"]) == 2 for mode in one["modes"])
    assert "together, by denoise steps" in done.output and "images of 5 steps" in done.output and "…" not in done.output


@pytest.mark.parametrize("steps", ["0", "5,0", "x", "5,"])
def test_steps_that_are_no_numbers_are_refused(engines: Engines, steps: str) -> None:
    done = CliRunner().invoke(bench, ["mixed", "--steps", steps])
    assert done.exit_code != 0 and not engines.started


def test_the_command_fails_where_a_text_is_not_as_alone(engines: Engines) -> None:
    engines.first.odd_chats = {16}
    done = CliRunner().invoke(bench, ["mixed", "--chats", "3", "--images", "2", "--runs", "1"])
    assert done.exit_code == 1 and "2 of 3" in done.output
