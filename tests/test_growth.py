"""`check_linear` lets linear work through and no other, also where a busy machine disturbs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import growth
from tests.growth import NUM_TRIES, check_linear


def numbers(size: int) -> list[int]:
    return list(range(size))


def test_linear_work_passes() -> None:
    check_linear(numbers, lambda items: sum(items), 50_000)


def test_quadratic_work_fails() -> None:
    with pytest.raises(AssertionError, match="not linear"):
        check_linear(numbers, lambda items: [items.index(item) for item in items], 300)


class Clock:
    """The clock tells CPU time that passes by the work alone, three times as much where it is disturbed."""

    def __init__(self, power: float, disturbed: tuple[int, ...] = ()) -> None:
        self._power = power
        self._disturbed = disturbed
        self._now = 0.0
        self.worked: list[int] = []

    def process_time(self) -> float:
        return self._now

    def work(self, size: int) -> None:
        self._now += size**self._power * (3 if len(self.worked) in self._disturbed else 1)
        self.worked.append(size)


def checked(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[int]:
    monkeypatch.setattr(growth, "time", SimpleNamespace(process_time=clock.process_time))
    check_linear(int, clock.work, 10)
    return clock.worked


def test_a_try_that_was_disturbed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(monkeypatch, Clock(1, disturbed=(1, 4))) == [10, 40, 10] * 3


def test_a_small_input_that_was_disturbed_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2, disturbed=(0, 5, 6, 8))
    with pytest.raises(AssertionError, match=r"takes 16\.0(, 16\.0){4} times"):
        checked(monkeypatch, clock)
    assert clock.worked == [10, 40, 10] * NUM_TRIES


def test_work_of_a_moment_is_repeated_until_it_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(monkeypatch, Clock(-3)) == [10] * 5 + [40] * 320 + [10] * 5
