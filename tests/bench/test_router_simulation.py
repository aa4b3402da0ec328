"""The simulation of a cluster: the same requests under every rule, the same figures for a seed, and rules that differ
in what they find cached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from weft.bench.commands import app as bench
from weft.bench.router_simulation import POLICIES, WORKLOADS, PolicyFigures, RouterWork, simulate

WORK = RouterWork(replicas=10, requests=2000)


def figures(work: RouterWork, *policies: str) -> dict[str, PolicyFigures]:
    found = simulate(work, lambda description, count=1: None, policies or POLICIES).figures
    return {each.policy: each for each in found}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_rule_answers_every_workload(workload: str) -> None:
    found = figures(replace(WORK, workload=workload))
    assert list(found) == list(POLICIES)
    for each in found.values():
        assert 0 <= each.hit_rate < 1 and 1 <= each.imbalance < 10
        assert each.queue_p50_ms <= each.queue_p99_ms and each.ttft_p50_ms <= each.ttft_p99_ms
    assert (found["weft"].hit_rate == 0) == (workload == "unrelated")


def test_published_digests_bring_more_cached_tokens_and_shorter_queues_than_chance() -> None:
    found = figures(replace(WORK, workload="chat", requests=4000), "power of two", "weft")
    assert found["weft"].hit_rate > 1.5 * found["power of two"].hit_rate
    assert found["weft"].queue_p99_ms < found["power of two"].queue_p99_ms


def test_beside_a_flood_other_tenants_wait_as_long_however_large_it_is() -> None:
    """At three times the load that the replicas can compute the flood's own queue grows without end."""
    works = [replace(WORK, workload="flood", load=load, requests=6000) for load in (1.2, 3.0)]
    busy, flooded = (figures(work, "weft")["weft"] for work in works)
    assert flooded.simulated_s < busy.simulated_s / 2, "the same requests come in less time"
    assert flooded.queue_p99_ms < 2 * busy.queue_p99_ms
    assert flooded.hit_rate > 0.5


def test_a_seed_gives_the_same_figures() -> None:
    def untimed(work: RouterWork) -> list[PolicyFigures]:
        return [
            replace(each, decision_p50_us=0, decision_mean_us=0, decision_p99_us=0) for each in figures(work).values()
        ]

    bursty = replace(WORK, arrivals="bursty", edges=3, requests=500)
    assert untimed(bursty) == untimed(bursty)
    assert untimed(bursty) != untimed(replace(bursty, seed=1))


def test_the_command_writes_tables_and_a_report(tmp_path: Path) -> None:
    flags = ["--requests", "1000", "--replicas", "5", "--loads", "70,90", "--workloads", "unrelated"]
    done = CliRunner().invoke(bench, ["router", *flags, "--json", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    reports = json.loads((tmp_path / "report.json").read_text())["reports"]
    assert [(each["work"]["workload"], each["work"]["load"]) for each in reports] == [
        ("unrelated", 0.7),
        ("unrelated", 0.9),
    ]
    assert done.stdout.count("power of two") == 2


def test_a_workload_that_is_not_known_is_told() -> None:
    done = CliRunner().invoke(bench, ["router", "--workloads", "chat,novels"])
    assert done.exit_code == 2 and "novels" in done.output
