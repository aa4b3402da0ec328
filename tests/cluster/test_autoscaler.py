"""How many replicas are wanted: within bounds, more soon after a need, fewer long after it, and never to and fro."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from weft.cluster.autoscaler import ClusterLoad, ScaleLimits, wanted_replicas

LIMITS = ScaleLimits(1, 20)
loads = st.builds(
    ClusterLoad,
    at=st.just(0.0),
    replicas=st.integers(0, 20),
    waiting=st.integers(0, 500),
    running=st.integers(0, 500),
    kv_usage=st.floats(0, 1),
)
histories = st.lists(loads, max_size=40).map(
    lambda each: [
        ClusterLoad(20.0 * i, load.replicas, load.waiting, load.running, load.kv_usage) for i, load in enumerate(each)
    ]
)


def lasting(
    seconds: float, replicas: int, waiting: int = 0, running: int = 0, kv_usage: float = 0.0
) -> list[ClusterLoad]:
    return [ClusterLoad(float(at), replicas, waiting, running, kv_usage) for at in range(math.ceil(seconds) + 1)]


@settings(max_examples=200 * EFFORT)
@given(histories, st.integers(0, 30), st.integers(0, 5), st.integers(5, 20))
def test_it_stays_within_its_bounds(history: list[ClusterLoad], current: int, least: int, most: int) -> None:
    wanted = wanted_replicas(history, current, ScaleLimits(least, most))
    assert least <= wanted <= most
    assert wanted == wanted_replicas(history, current, ScaleLimits(least, most))


@settings(max_examples=100 * EFFORT)
@given(st.integers(1, 10), st.integers(0, 400), st.integers(0, 400), st.floats(0, 1))
def test_more_waiting_never_wants_fewer(replicas: int, waiting: int, more: int, kv_usage: float) -> None:
    few = lasting(10, replicas, waiting, 1, kv_usage)
    many = lasting(10, replicas, waiting + more, 1, kv_usage)
    assert wanted_replicas(few, replicas, LIMITS) <= wanted_replicas(many, replicas, LIMITS)


@settings(max_examples=100 * EFFORT)
@given(st.floats(0, 14), st.integers(1, 20))
def test_a_steady_load_comes_to_rest(total_kv: float, current: int) -> None:
    """Whatever the number is at first: under a load that does not change it is right after a while, and stays."""
    seen = [current]
    for _ in range(30):
        usage = min(1.0, total_kv / current)
        current = wanted_replicas(
            lasting(LIMITS.down_seconds, current, 0, 1 if total_kv else 0, usage), current, LIMITS
        )
        seen.append(current)
    changes = [later - earlier for earlier, later in itertools.pairwise(seen) if later != earlier]
    assert seen[-1] == seen[-2] == seen[-3]
    assert total_kv / current <= LIMITS.kv_target + 1e-5 or current == LIMITS.max_replicas
    assert all(change > 0 for change in changes) or all(change < 0 for change in changes), seen


def test_a_queue_brings_replicas_at_once_but_not_for_a_moment() -> None:
    assert wanted_replicas(lasting(LIMITS.up_seconds, 4, waiting=40), 4, LIMITS) == 8, "at most twice as many"
    assert wanted_replicas(lasting(LIMITS.up_seconds, 4, waiting=24), 4, LIMITS) == 6
    spike = [*lasting(10, 4), ClusterLoad(11.0, 4, waiting=400)]
    assert wanted_replicas(spike, 4, LIMITS) == 4


def test_replicas_that_start_are_not_asked_for_again() -> None:
    history = lasting(60, 4, waiting=24)
    assert wanted_replicas(history, wanted_replicas(history, 4, LIMITS), LIMITS) == 6


def test_full_caches_bring_replicas() -> None:
    assert wanted_replicas(lasting(10, 4, running=9, kv_usage=0.95), 4, LIMITS) == 6


def test_replicas_go_only_after_a_long_quiet_time() -> None:
    assert wanted_replicas(lasting(LIMITS.down_seconds - 1, 8), 8, LIMITS) == 8
    assert wanted_replicas(lasting(LIMITS.down_seconds, 8), 8, LIMITS) == 1
    assert wanted_replicas(lasting(LIMITS.down_seconds, 8), 8, ScaleLimits(0, 20)) == 0, "an idle cluster may sleep"
    assert wanted_replicas(lasting(LIMITS.down_seconds, 8, running=1, kv_usage=0.01), 8, ScaleLimits(0, 20)) == 1
    busy_once = [ClusterLoad(0.0, 8, running=80, kv_usage=0.45), *lasting(LIMITS.down_seconds, 8)[1:]]
    assert wanted_replicas(busy_once, 8, LIMITS) == 8
    assert wanted_replicas([*busy_once, ClusterLoad(LIMITS.down_seconds + 1, 8)], 8, LIMITS) == 1


def test_from_none_one_is_started() -> None:
    assert wanted_replicas(lasting(10, 0, waiting=3), 0, ScaleLimits(0, 4)) == 1
    assert wanted_replicas([], 0, ScaleLimits(2, 4)) == 2
