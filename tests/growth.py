"""Linear time is shown by growth, never by seconds, which differ between machines: see tests/test_suite.py."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FACTOR = 4
MAX_RATIO = 9.0
"""Four times the input takes 4 times as long in linear time, and 16 times in quadratic time."""
NUM_TRIES = 5
_MEASURABLE_S = 0.005
"""So many CPU seconds are far above the resolution of the clock."""


def check_linear(prepare: Callable[[int], T], work: Callable[[T], object], size: int) -> None:
    """The check fails where the CPU time of `work` grows faster than its input, which `prepare` makes of a size.

    `work` runs again and again with the same input, and must leave it as it is. Choose a size at which a part that is
    not linear would take most of the time. Of a few tries the least times count: a busy machine disturbs some. The
    garbage collector is off meanwhile: it walks the objects of all tests before, and more often for the large input.
    """
    small, large = prepare(size), prepare(FACTOR * size)
    gc.disable()
    try:
        _check_growth(work, small, large)
    finally:
        gc.enable()


def _check_growth(work: Callable[[T], object], small: T, large: T) -> None:
    small_s = large_s = math.inf
    ratios: list[float] = []
    for _ in range(NUM_TRIES):
        # The small input before and after the large one: were it disturbed, it would hide that the large one is slow.
        before, large_now, after = _seconds(work, small), _seconds(work, large), _seconds(work, small)
        small_s, large_s = min(small_s, before, after), min(large_s, large_now)
        ratios.append(large_s / small_s)
        if ratios[-1] < MAX_RATIO:
            return
    told = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    raise AssertionError(f"{FACTOR} times the input takes {told} times as long: that is not linear")


def _seconds(work: Callable[[T], object], given: T) -> float:
    """Return the CPU seconds of one run, the mean of as many as can be measured well."""
    num_runs, seconds, began = 0, 0.0, time.process_time()
    while seconds < _MEASURABLE_S:
        work(given)
        num_runs += 1
        seconds = time.process_time() - began
    return seconds / num_runs
