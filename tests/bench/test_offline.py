"""How fast requests decode together, of when their tokens came; and how often a line is measured."""

from __future__ import annotations

import asyncio

import pytest

from weft.bench.offline import Arrivals, measure, speed_together
from weft.errors import ConfigError


def request(start: float, step: float, tokens: int) -> Arrivals:
    return [(start + step * i, 1) for i in range(tokens)]


def test_steps_count_in_which_all_decode() -> None:
    # The first decodes beside the second's prompt in steps of half a second, and the second goes on alone, faster.
    early = [(0.5 * i, 1) for i in range(20)] + [(10.0 + 0.1 * i, 1) for i in range(50)]
    late = [(10.0 + 0.1 * i, 1) for i in range(50)] + [(14.9 + 0.01 * i, 1) for i in range(1, 100)]
    assert speed_together([early, late]) == pytest.approx(20.0)


def test_one_request_is_measured_after_its_first_token() -> None:
    assert speed_together([request(3.0, 0.25, 9)]) == pytest.approx(4.0)


def test_tokens_of_one_message_all_count() -> None:
    assert speed_together([[(0.0, 1), (1.0, 3), (2.0, 3)]]) == pytest.approx(3.0)


def test_requests_that_do_not_decode_together_have_no_speed() -> None:
    with pytest.raises(ConfigError, match="2 requests do not decode together"):
        speed_together([request(0.0, 0.1, 10), request(5.0, 0.1, 10)])


@pytest.mark.parametrize(("seconds", "counted"), [(0.125, 2), (0.0625, 4), (0.03125, 8), (60.0, 2)])
def test_a_short_line_is_measured_more_often_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, seconds: float, counted: int
) -> None:
    now = 100.0
    ticks: list[str] = []

    async def once() -> float:
        nonlocal now
        now += seconds
        return seconds

    monkeypatch.setattr("weft.bench.offline.time.perf_counter", lambda: now)
    figure = asyncio.run(measure("first token", "s", once, 2, ticks.append, is_warm=False))
    assert len(figure.runs) == counted and figure.value == seconds
    assert len(ticks) == 3, "the progress bar counts on so many"
