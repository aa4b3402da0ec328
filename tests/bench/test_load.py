"""The load: when requests are sent, what they ask for, and what a comparison of two runs says."""

from __future__ import annotations

import json
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest

from weft.bench.arrivals import Arrival, Load, Size, log_normal
from weft.bench.compare import compare
from weft.bench.datasets import DatasetName, DatasetSpec, dialogues
from weft.bench.generator import ANY, Distribution, Run, figures
from weft.bench.http_load import MeasuredAnswer
from weft.bench.load_commands import points_of
from weft.bench.serve import DEFAULT_POINTS, Point, PointFigures, ServeReport, ServeWork
from weft.errors import ConfigError

DATASETS: list[DatasetName] = ["random", "chat", "prefix", "multi-turn", "long", "images", "standard"]


def gaps(arrival: Arrival, rate: float = 4.0, rate_at_end: float = 0.0, count: int = 4000) -> list[float]:
    load = Load(requests=count, rate=rate, rate_at_end=rate_at_end, arrival=arrival)
    times = list(load.times(random.Random(3)))
    assert times[0] == 0 and len(times) == count
    return [after - before for before, after in pairwise(times)]


def test_arrivals_keep_their_rate_and_differ_in_how_even_they_are() -> None:
    found: dict[Arrival, list[float]] = {"constant": [], "poisson": [], "bursty": []}
    spread = {}
    for arrival in found:
        between = gaps(arrival)
        assert statistics.fmean(between) == pytest.approx(0.25, rel=0.1)
        spread[arrival] = statistics.stdev(between) / statistics.fmean(between)
    assert spread["constant"] == pytest.approx(0, abs=1e-9)
    assert spread["poisson"] == pytest.approx(1, rel=0.1)
    assert spread["bursty"] == pytest.approx(2, rel=0.15)


def test_a_ramp_rises_from_one_rate_to_the_other() -> None:
    between = gaps("constant", rate=2, rate_at_end=10, count=100)
    assert between[0] == pytest.approx(0.5) and between[-1] == pytest.approx(0.1, rel=0.02)
    assert all(later < earlier for earlier, later in pairwise(between))


def test_long_texts_are_rare() -> None:
    chance = random.Random(0)
    lengths = sorted(log_normal(60, 1.0, 2_000, chance) for _ in range(4_000))
    assert lengths[0] >= 1 and lengths[-1] <= 2_000
    assert lengths[2_000] == pytest.approx(60, rel=0.1) and lengths[3_960] > 400


@pytest.mark.parametrize("name", DATASETS)
def test_a_seed_is_a_promise(name: DatasetName) -> None:
    def drawn(seed: int) -> list[object]:
        return list(islice(dialogues(DatasetSpec(name=name), random.Random(seed)), 5))

    assert drawn(1) == drawn(1)
    assert name == "standard" or drawn(1) != drawn(2)


def test_prompts_share_their_beginnings_by_groups() -> None:
    spec = DatasetSpec(name="prefix", prefix_tokens=50, groups=3, input_tokens=Size(5, 9))
    prompts = [each.turns[0].body["prompt"] for each in islice(dialogues(spec, random.Random(0)), 40)]
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert {len(prompt) - 50 for prompt in prompts} <= set(range(5, 10))


def test_requests_of_ones_own_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    spec = DatasetSpec(file=str(file))
    paths = [each.turns[0].path for each in islice(dialogues(spec, random.Random(0)), 3)]
    assert paths == ["/v1/completions", "/v1/chat/completions", "/v1/completions"]
    for wrong in ("", "{}", "[1]", '{"prompt": "a", "messages": []}', '{"prompt": "a", "n": 2}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            dialogues(spec, random.Random(0))


def test_flags_make_sweeps() -> None:
    def points(work: str = "", rate: str = "", concurrency: str = "") -> list[str]:
        made = points_of(
            work=work, rate=rate, concurrency=concurrency, requests=9, arrival="poisson", dataset=DatasetSpec()
        )
        return [str(point) for point in made]

    assert points(work="2x4:7:5,1x1:3:3") == ["2x4:7:5", "1x1:3:3"]
    assert points(concurrency="1,8") == ["1x9:128:256", "8x9:128:256"]
    assert points(rate="2,4-8") == ["2/s poisson, 9:128:256", "4 to 8/s poisson, 9:128:256"]
    assert points(rate="2", concurrency="3") == ["2/s poisson, 3 open, 9:128:256"]
    assert points() == [str(point) for point in DEFAULT_POINTS]
    larger = points_of(
        work="", rate="", concurrency="", requests=9, arrival="poisson", dataset=DatasetSpec(vocabulary=99)
    )
    assert [str(point) for point in larger] == points() and {point.dataset.vocabulary for point in larger} == {99}
    for wrong in ({"rate": "x"}, {"rate": "0"}, {"concurrency": "0"}, {"work": "1x1:1:1", "rate": "2"}):
        with pytest.raises(ConfigError):
            points(**wrong)


def run_of(*speeds: float) -> list[Run]:
    times = Distribution.of([0.1, 0.2])
    return [
        Run(
            seconds=1.0, requests=1, succeeded=1, cancelled=0, errors={}, failures=[], prompt_tokens=1, output_tokens=1,
            messages=1, received_bytes=1, output_tokens_per_s=speed, total_tokens_per_s=speed, requests_per_s=1.0,
            goodput_per_s=1.0, first_token_ms=times, inter_token_ms=times, e2e_ms=times, late_ms=times,
            client_cpu_share=0.1, timeline=[],
        )
        for speed in speeds
    ]  # fmt: skip


def report_of(*speeds: float, name: str = "1x1:1:1") -> ServeReport:
    times = Distribution()
    point = PointFigures(
        point=Point.parse("1x1:1:1"), name=name, output_tokens_per_s=1, total_tokens_per_s=1, requests_per_s=1,
        goodput_per_s=1, spread=0, std_dev=0, first_token_ms=times, inter_token_ms=times, e2e_ms=times,
        server_cpu_us_per_token=None, num_failures=0, runs=run_of(*speeds),
    )  # fmt: skip
    return ServeReport(
        model="m", url="u", tokens_per_sec=1, ttft_ms=1, std_dev=0, runs=len(speeds), seed=0, startup_seconds=None,
        figures=[point], environment={}, work=ServeWork(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "in_turns", "outcome"),
    [
        ((100, 101, 99), (130, 131, 129), False, "better"),
        ((100, 101, 99), (70, 71, 69), False, "worse"),
        ((100, 101, 99), (101, 100, 100), False, "same"),
        ((100, 140, 60), (110, 150, 66), False, "same"),
        ((100, 140, 60), (110, 154, 66), True, "better"),
        ((100, 101, 99), (101.5, 102.5, 100.5), True, "same"),
        ((100,), (200,), False, "unknown"),
    ],
)
def test_a_difference_counts_when_it_is_surer_than_chance(
    before: tuple[float, ...], after: tuple[float, ...], in_turns: bool, outcome: str
) -> None:
    [verdict] = [
        each
        for each in compare(report_of(*before), report_of(*after), in_turns=in_turns)
        if each.metric == "output tok/s"
    ]
    assert verdict.outcome == outcome
    assert verdict.low <= verdict.ratio <= verdict.high


def test_reports_without_a_load_in_common_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="no load in common"):
        compare(report_of(1, 2), report_of(1, 2, name="other"), in_turns=False)


def test_every_quantile_was_measured_and_cancelled_answers_have_none() -> None:
    answers = [MeasuredAnswer(first_s=float(i), seconds=float(i) + 1, output_tokens=2) for i in range(1, 101)]
    answers.append(MeasuredAnswer(first_s=1e6, was_cancelled=True))
    answers.append(MeasuredAnswer(seconds=9.0, error="HTTP 500", reason="status 500"))
    run = figures(answers, 10.0, 0.5, ANY)
    first = run.first_token_ms
    assert (first.p50, first.p90, first.p99, first.max) == (50_000, 90_000, 99_000, 100_000)
    assert len(first.curve) == 51 and first.curve[0] == 1_000
    assert (run.succeeded, run.cancelled, run.errors) == (100, 1, {"HTTP 500": 1})
    assert run.output_tokens_per_s == 20 and run.goodput_per_s == 10
    assert json.dumps(run.failures) == '["status 500"]'
