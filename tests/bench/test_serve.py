"""Tests the load benchmark against real servers: what it counts, what it calls a failure, and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import time
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from tests.api.clock import Clock
from tests.api.http import real_server
from tests.api.scripted_engine import ScriptedEngine, answer, forever
from tests.waiting import PATIENCE, until
from weft.api.app import build_app
from weft.bench import generator, http_load
from weft.bench.arrivals import Load, Size
from weft.bench.commands import app as bench
from weft.bench.datasets import DatasetSpec
from weft.bench.generator import Cancellations, Run, Slo
from weft.bench.grpc_load import open_channel
from weft.bench.http_load import StreamTimes
from weft.bench.serve import Point, ServeReport, ServeWork, Target, own_server, run_serve
from weft.config import load
from weft.errors import ConfigError, EngineFault, Overloaded, Unavailable
from weft.types import FinishReason, Output

FIVE = ["He", "l", "lo"]
"""Five tokens of a byte each, in three events."""


def five_tokens() -> ScriptedEngine:
    return ScriptedEngine(answer(*FIVE, finish=FinishReason.LENGTH))


def point(text: str, vocabulary: int = 250) -> Point:
    return Point.parse(text, DatasetSpec(vocabulary=vocabulary))


def measure(engine: ScriptedEngine, *points: str, runs: int = 1, **work: Any) -> ServeReport:
    asked = ServeWork(points=tuple(map(point, points)), runs=runs, warm_up=0, **work)
    with real_server(build_app(engine, load(env={}))) as url:
        bench_url = f"{url}/v1"
        [report] = asyncio.run(run_serve([Target(url=bench_url)], asked))
    assert report.url == bench_url and report.startup_seconds is None
    return report


def test_tokens_are_the_servers_and_times_are_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the engine moves: by 20 ms before the first event of an answer, by 100 ms behind it."""
    clock = Clock()
    begun: set[StreamTimes] = set()
    engine = five_tokens()

    class Watched(StreamTimes):
        def read(self, data: bytes) -> None:
            super().read(data)
            if self.first_s is not None:
                begun.add(self)

    async def before_the_first() -> None:
        clock.now += 0.02

    async def behind_the_first() -> None:
        await until(lambda: len(begun) == len(engine.submitted), "the first event at its reader")
        clock.now += 0.1

    first_step, *later = engine.script
    engine.script = [before_the_first, first_step, behind_the_first, *later]
    times = SimpleNamespace(perf_counter=clock, process_time=time.process_time)
    monkeypatch.setattr(http_load, "time", times)
    monkeypatch.setattr(generator, "time", times)
    monkeypatch.setattr(http_load, "StreamTimes", Watched)
    report = measure(engine, "1x3:7:5", "2x6:7:5", runs=2)
    assert report.model == "scripted" and report.num_failures == 0
    alone, first = report.figures
    assert [run.output_tokens for run in alone.runs] == [15, 15]
    assert [run.output_tokens for run in first.runs] == [30, 30]
    for run in alone.runs:
        assert run.first_token_ms.p50 == pytest.approx(20)
        # Two events a stream follow the first: one after 100 ms, one at once.
        assert run.inter_token_ms.p99 == pytest.approx(100)
        assert run.seconds == pytest.approx(3 * 0.12), "three requests one after the other"
    for run in first.runs:
        assert run.seconds == pytest.approx(6 * 0.12)
        assert run.output_tokens_per_s == pytest.approx(30 / run.seconds)
    speeds = sorted(run.output_tokens_per_s for run in first.runs)
    assert first.output_tokens_per_s == pytest.approx(sum(speeds) / 2)
    assert first.spread == pytest.approx((speeds[1] - speeds[0]) / first.output_tokens_per_s)


def test_the_cpu_time_of_the_servers_process_is_counted_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's clock, as its metrics tell it, is one that rises by 0.3 s with every reading."""
    readings = count(10.0, 0.3)
    monkeypatch.setattr("weft.observe.metrics.process_time", lambda: next(readings))
    first, second = measure(five_tokens(), "2x6:7:5", "3x3:4:5", runs=2).figures
    assert [run.server_cpu_us_per_token for run in first.runs] == [pytest.approx(0.3e6 / 30)] * 2
    assert first.server_cpu_us_per_token == pytest.approx(10_000)
    assert second.server_cpu_us_per_token == pytest.approx(20_000)


def test_a_server_that_does_not_tell_its_cpu_time_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.app.exposition", lambda *_: b"# nothing\n")
    report = measure(five_tokens(), "1x1:4:5")
    assert only_run(report).server_cpu_us_per_token is None is report.figures[0].server_cpu_us_per_token


def test_prompts_are_token_ids_of_the_asked_length_and_none_comes_twice() -> None:
    engine = five_tokens()
    measure(engine, "2x20:7:5", "1x20:7:5", runs=2)
    prompts = [tuple(submitted.prompt) for submitted in engine.submitted]
    assert len(prompts) == len(set(prompts)) == 80
    assert {len(prompt) for prompt in prompts} == {7}
    assert all(10 <= token < 250 for prompt in prompts for token in prompt)
    params = engine.submitted[0].params
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0, 5, True)


def only_run(report: ServeReport) -> Run:
    [figures] = report.figures
    [run] = figures.runs
    assert figures.num_failures == sum(run.errors.values())
    return run


def test_an_answer_of_another_length_is_a_failure() -> None:
    run = only_run(measure(five_tokens(), "1x2:4:6"))
    assert run.errors == {"length": 2} and run.failures == ["6 tokens were asked for, 5 came"]
    assert run.output_tokens == 10 and run.succeeded == 0


def test_a_refusal_is_a_failure_and_the_rest_is_measured() -> None:
    engine = five_tokens()
    engine.refuse, engine.refuse_from = Overloaded("The queue is full."), 3
    run = only_run(measure(engine, "1x5:4:5"))
    [reason] = run.failures
    assert run.errors == {"HTTP 429": 2} and "status 429" in reason and "queue is full" in reason
    assert (run.output_tokens, run.succeeded, run.requests) == (15, 3, 5)


def test_a_stream_that_breaks_is_a_failure() -> None:
    engine = ScriptedEngine([Output(text="a", token_ids=[97]), EngineFault("The engine broke.")])
    run = only_run(measure(engine, "1x1:4:5"))
    assert "The engine broke." in run.failures[0]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_events_are_found_however_they_are_cut(cut: int) -> None:
    stream = (
        b'data: {"choices":[{"text":"a\\"usage\\":{"}],"usage":null}\n\n'
        b': a comment\r\ndata:{"choices":[{"text":"b"}]}\r\n\r\n'
        b'data: {"choices":[{"text":""}],"usage":{"completion_tokens":1,"x":2}}\n\n'
        b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    times = StreamTimes()
    for begin in range(0, len(stream), cut):
        times.read(stream[begin : begin + cut])
    assert times.failure(200, 2) == ("", "")
    assert len(times.gaps_s) == 2 and times.first_s is not None


def test_what_a_stream_lacks_is_named() -> None:
    times = StreamTimes()
    times.read(b'data: {"choices":[{"text":"a"}]}\n\n')
    assert "without [DONE]" in times.failure(200, 1)[1]
    times.read(b"data: [DONE]\n\n")
    assert "usage" in times.failure(200, 1)[1]


def test_loads_are_read_as_they_are_written() -> None:
    parsed = Point.parse(" 32x64:128:64-256 ")
    assert (parsed.load.connections, parsed.load.requests) == (32, 64)
    assert (parsed.dataset.input_tokens, parsed.dataset.output_tokens) == (Size(128, 128), Size(64, 256))
    assert str(parsed) == "32x64:128:64-256"
    for wrong in ("32", "32x64", "32x64:128", "0x1:1:1", "1x1:0:1", "1x1:1:-1", "axb:c:d"):
        with pytest.raises(ConfigError, match=r"not a load|not a number"):
            Point.parse(wrong)


def test_the_command_prints_a_table_writes_json_and_fails_when_a_request_does(tmp_path: Path) -> None:
    four = ScriptedEngine(answer("ab", "cd", finish=FinishReason.LENGTH))
    file = tmp_path / "report.json"
    with real_server(build_app(four, load(env={}))) as url:
        common = ["serve", "--url", url, "--runs", "2", "--vocabulary", "200", "--json", str(file)]
        good = CliRunner().invoke(bench, [*common, "--work", "2x4:3:4,1x1:5:4"])
        assert good.exit_code == 0, good.output
        assert "2x4:3:4" in good.output and "1x1:5:4" in good.output
        assert len(four.submitted) == 2 + 2 * 5, "two to warm up, and the work"
        report = json.loads(file.read_text())
        assert [line["num_failures"] for line in report["figures"]] == [0, 0]
        for line in report["figures"]:
            shown = f"{line['server_cpu_us_per_token']:,.0f}"
            assert line["server_cpu_us_per_token"] > 0 and f" {shown} " in good.output
        bad = CliRunner().invoke(bench, [*common, "--work", "1x1:3:9", "--warm-up", "0"])
        assert bad.exit_code == 1 and "9 tokens were asked for, 4 came" in bad.output
        wrong = CliRunner().invoke(bench, ["serve", "--url", url, "m", "--max-num-seqs", "3"])
        assert isinstance(wrong.exception, ConfigError)


def test_no_server_and_a_wrong_one_are_told_before_anything_is_measured() -> None:
    with pytest.raises(Unavailable, match="no server with a model"):
        asyncio.run(run_serve([Target(url="http://127.0.0.1:9")], ServeWork()))
    with real_server(build_app(five_tokens(), load(env={}))) as url, pytest.raises(Unavailable, match="5 came"):
        asyncio.run(run_serve([Target(url=url)], ServeWork(points=(point("1x1:4:6"),))))


def test_a_server_of_its_own_is_started_measured_and_ended(tiny_model: Path) -> None:
    async def scenario() -> ServeReport:
        flags = [str(tiny_model), "--device", "cpu", "--max-model-len", "256", "--kv-cache-memory-mb", "16"]
        work = ServeWork(points=(point("2x4:8:6", 300),), runs=1)
        with TemporaryDirectory() as folder:  # pytest's own may have too long a name for a socket
            async with (
                own_server(flags, grpc_socket=f"{folder}/s") as (url, seconds),
                open_channel(f"unix:{folder}/s") as channel,
            ):
                await asyncio.wait_for(channel.channel_ready(), PATIENCE)
                [report] = await run_serve([Target(url=url, startup_seconds=seconds)], work)
        with pytest.raises(Unavailable):
            await run_serve([Target(url=url)], work)
        return report

    report = asyncio.run(scenario())
    assert report.num_failures == 0 and report.figures[0].runs[0].output_tokens == 24
    assert report.startup_seconds is not None and report.startup_seconds > 0.2
    cpu = report.figures[0].server_cpu_us_per_token
    assert cpu is not None and 0 < cpu < 1e6 * (os.cpu_count() or 1) * report.figures[0].runs[0].seconds


def test_a_server_that_does_not_start_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with own_server(["--no-such-flag"]):
            pytest.fail("it cannot be ready")

    with pytest.raises(EngineFault, match="did not start"):
        asyncio.run(scenario())
    assert "--no-such-flag" in capfd.readouterr().err


def test_an_open_loop_sends_when_it_is_time_whatever_is_open() -> None:
    """All twelve are open before the first is answered."""
    engine = ScriptedEngine()

    async def all_are_open() -> None:
        await until(lambda: len(engine.submitted) == 12, "every request is open")

    engine.script = [all_are_open, *answer("Hel", "lo", finish=FinishReason.LENGTH)]
    load_ = Load(requests=12, rate=400.0, arrival="poisson")
    work = ServeWork(points=(Point(load=load_, dataset=DatasetSpec(vocabulary=250, output_tokens=Size(5, 5))),), runs=1)
    with real_server(build_app(engine, load(env={}))) as url:
        [report] = asyncio.run(run_serve([Target(url=url)], replace(work, warm_up=0)))
    run = only_run(report)
    assert run.errors == {} and run.succeeded == 12
    assert sum(moment.open_requests for moment in run.timeline) >= 12


def test_clients_leave_and_their_requests_are_aborted() -> None:
    engine = ScriptedEngine([Output(text="a", token_ids=[97]), Output(text="b", token_ids=[98]), forever])
    run = only_run(measure(engine, "2x8:4:5", cancellations=Cancellations(1.0, most_events=2)))
    assert (run.cancelled, run.succeeded, run.errors) == (8, 0, {})
    assert len(engine.submitted) == 8


def test_a_conversation_repeats_what_was_said() -> None:
    engine = ScriptedEngine(answer("Hel", "lo", finish=FinishReason.LENGTH))
    dataset = DatasetSpec(name="multi-turn", num_turns=3, input_tokens=Size(2, 2), output_tokens=Size(5, 5))
    work = ServeWork(points=(Point(load=Load(requests=1, connections=1), dataset=dataset),), runs=1, warm_up=0)
    with real_server(build_app(engine, load(env={}))) as url:
        [report] = asyncio.run(run_serve([Target(url=url)], work))
    run = only_run(report)
    assert run.errors == {} and run.succeeded == 3
    first, second, third = (bytes(asked.prompt).decode() for asked in engine.submitted)
    assert first.count("Hello") == 0 and second.count("Hello") == 1 and third.count("Hello") == 2


def test_goodput_counts_what_keeps_the_slo() -> None:
    engine = five_tokens()
    assert only_run(measure(engine, "1x4:7:5", slo=Slo.parse("e2e:60000"))).goodput_per_s > 0
    assert only_run(measure(engine, "1x4:7:5", slo=Slo.parse("ttft:0.0001"))).goodput_per_s == 0
    for wrong in ("ttft", "ttft:x", "itl=3", "speed:3"):
        with pytest.raises(ConfigError, match="not an SLO"):
            Slo.parse(wrong)


def test_two_servers_are_asked_the_same_in_turns_and_compared(tmp_path: Path) -> None:
    one, other = five_tokens(), five_tokens()
    file, page = tmp_path / "both.json", tmp_path / "both.html"
    with real_server(build_app(one, load(env={}))) as url, real_server(build_app(other, load(env={}))) as second:
        words = ["compare", url, second, "--work", "2x4:7:5", "--vocabulary", "250", "--runs", "3"]
        done = CliRunner().invoke(bench, [*words, "--json", str(file), "--html", str(page)])
    assert done.exit_code in (0, 1), done.output
    assert sorted(asked.prompt for asked in one.submitted) == sorted(asked.prompt for asked in other.submitted)
    read = json.loads(file.read_text())
    assert {verdict["outcome"] for verdict in read["verdicts"]} <= {"better", "same", "worse"}
    assert (done.exit_code == 1) == any(verdict["outcome"] == "worse" for verdict in read["verdicts"])
    html = page.read_text()
    assert html.count("<svg") >= 8 and "http://" not in html.replace(url, "").replace(second, "")


def test_the_report_has_what_the_source_s_scripts_read_and_its_environment(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with real_server(build_app(five_tokens(), load(env={}))) as url:
        words = ["serve", url, "--work", "1x2:7:5", "--vocabulary", "250", "--runs", "2", "--seed", "7"]
        done = CliRunner().invoke(
            bench, [*words, "--json", str(file)], env={"WEFT_API_KEY": "secret", "CY_LLM_ENGINE": ""}
        )
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["tokens_per_sec"] > 0 and report["ttft_ms"] > 0 and report["std_dev"] >= 0
    assert (report["runs"], report["seed"]) == (2, 7)
    about = report["environment"]
    assert {"cpu", "memory", "devices", "driver", "cuda", "packages", "settings", "commit"} <= about.keys()
    assert about["packages"]["torch"] and "secret" not in file.read_text()
    assert CliRunner().invoke(bench, ["compare", str(file), str(file)]).exit_code == 0


@pytest.mark.parametrize("content", ['""', "null"])
def test_the_event_with_the_role_alone_is_no_first_token(content: str) -> None:
    times = StreamTimes()
    times.read(b'data: {"choices":[{"delta":{"role":"assistant","content":%s}}]}\n\n' % content.encode())
    assert times.first_s is None
    times.read(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    assert times.first_s is not None and times.gaps_s == []
    with_token = StreamTimes()
    with_token.read(b'data: {"choices":[{"delta":{"role":"assistant","content":"a"}}]}\n\n')
    assert with_token.first_s is not None


def test_what_grpc_has_no_field_for_is_refused() -> None:
    work = ServeWork(options={"temperature": 0, "logprobs": 3})
    with pytest.raises(ConfigError, match="no logprobs"):
        asyncio.run(run_serve([Target(url="grpc://127.0.0.1:9")], work))
