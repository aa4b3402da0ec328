"""Speed by the server's own count of tokens, each figure by the load generator of `weft bench serve`."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from tests.performance.conftest import Bounds
from weft.bench.generator import Run
from weft.bench.serve import Point, ServeWork, Target, run_serve

pytestmark = pytest.mark.performance

ROUNDS = 3
Measured = Callable[[str], list[Run]]


@pytest.fixture
def measured(url: str, benchmark: Any) -> Measured:
    """Measure a load, as `weft bench serve --work` writes it, once to warm up and then three times."""

    def measured(load: str) -> list[Run]:
        runs: list[Run] = []

        def once() -> None:
            work = ServeWork(points=(Point.parse(load),), runs=1, seed=len(runs), warm_up=0)
            [report] = asyncio.run(run_serve([Target(url=url)], work))
            assert not report.num_failures, report.figures[0].runs[0].failures
            runs.extend(report.figures[0].runs)

        benchmark.pedantic(once, rounds=ROUNDS, warmup_rounds=1)
        return runs[1:]

    return measured


def test_token_speed(measured: Measured, bounds: Bounds, benchmark: Any) -> None:
    speed = statistics.median(run.output_tokens_per_s for run in measured("1x2:32:64"))
    benchmark.extra_info["tokens_per_s"] = speed
    assert speed >= bounds.min_tokens_per_s


def test_time_to_first_token(measured: Measured, bounds: Bounds, benchmark: Any) -> None:
    first_ms = statistics.median(run.first_token_ms.p50 for run in measured("1x4:32:4"))
    benchmark.extra_info["ttft_ms"] = first_ms
    assert not bounds.max_ttft_ms or first_ms <= bounds.max_ttft_ms


def test_tokens_of_eight_at_a_time(measured: Measured, bounds: Bounds, benchmark: Any) -> None:
    speed = statistics.median(run.output_tokens_per_s for run in measured("8x16:32:32"))
    benchmark.extra_info["tokens_per_s"] = speed
    assert speed >= bounds.min_total_tokens_per_s


def test_short_requests_of_eight_at_a_time(measured: Measured, bounds: Bounds, benchmark: Any) -> None:
    rate = statistics.median(run.requests_per_s for run in measured("8x32:16:1"))
    benchmark.extra_info["requests_per_s"] = rate
    assert rate >= bounds.min_requests_per_s
