"""Counters outlive the engine that counted; gauges do not."""

from __future__ import annotations

from msgspec.structs import fields

from weft.engine_stats import COUNTERS, EngineStats

GAUGES = {
    "running",
    "waiting",
    "blocks_total",
    "blocks_used",
    "prepared",
    "images_running",
    "images_waiting",
    "embedding_bytes",
    "open_requests",
    "replicas",
    "memory_allocated",
    "memory_reserved",
}


def test_every_figure_is_a_counter_or_a_gauge() -> None:
    assert {field.name for field in fields(EngineStats)} == {*COUNTERS} | GAUGES
    assert not GAUGES.intersection(COUNTERS)


def test_counters_add_up_and_gauges_are_those_of_now() -> None:
    past = EngineStats(**dict.fromkeys(COUNTERS, 5), **dict.fromkeys(GAUGES, 7))
    now = EngineStats(**dict.fromkeys(COUNTERS, 2), **dict.fromkeys(GAUGES, 1))
    assert now.with_counters_of(past) == EngineStats(**dict.fromkeys(COUNTERS, 7), **dict.fromkeys(GAUGES, 1))
