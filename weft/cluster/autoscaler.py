"""The autoscaler says how many replicas a cluster should have, by what it was asked to do: up fast, down slowly.

The need of a moment is the replicas that would have held its running requests with KV caches full to a target, and
enough more to take the requests that wait. More replicas are wanted when every moment of the last seconds needed more;
fewer when no moment of the last minutes needed so many, at a lower target, so that the next moment does not ask for
them back. It reads no clock: now is the time of the newest load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct


class ClusterLoad(Struct, frozen=True):
    """The load of all replicas at one moment."""

    at: float
    """Seconds, by any clock that only goes forward."""
    replicas: int
    """Replicas that are ready."""
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    """The part of the KV caches that running requests hold, from 0 to 1, as a mean of the ready replicas."""


class ScaleLimits(Struct, frozen=True):
    """The limits say how many replicas there may be, and when their number changes."""

    min_replicas: int
    max_replicas: int
    up_seconds: float = 5.0
    """More are wanted after so long a need."""
    down_seconds: float = 300.0
    """Fewer are wanted after so long without need."""
    kv_target: float = 0.7
    """KV caches that are fuller than this need more replicas."""
    kv_target_down: float = 0.5
    """With fewer replicas KV caches may be no fuller than this."""
    waiting_per_replica: int = 4
    """Requests that may wait at a replica; each further so many need one more."""
    max_growth: float = 2.0
    """At most so many times the replicas that are ready are wanted at once."""


def wanted_replicas(history: Sequence[ClusterLoad], current: int, limits: ScaleLimits) -> int:
    """Return how many replicas there should be. `history` is of loads, the oldest first; `current` counts those that
    are ready and those that start. Between the bounds the number stays as it is unless the history gives a reason."""
    wanted = current
    if history:
        now = history[-1].at
        recent = [load for load in history if load.at >= now - limits.up_seconds]
        up = min(_need(load, limits.kv_target, limits) for load in recent)
        if up > current and _covers(history, limits.up_seconds):
            most = max(1, math.floor(history[-1].replicas * limits.max_growth))
            wanted = max(current, min(up, most))
        elif _covers(history, limits.down_seconds):
            quiet = [load for load in history if load.at >= now - limits.down_seconds]
            wanted = min(current, max(_need(load, limits.kv_target_down, limits) for load in quiet))
    return min(max(wanted, limits.min_replicas), limits.max_replicas)


def _need(load: ClusterLoad, kv_target: float, limits: ScaleLimits) -> int:
    """Return how many replicas a load needs."""
    # Rounded, so that a sum of usages that is a hair above a whole number needs no replica of its own.
    held = math.ceil(round(load.kv_usage * load.replicas / kv_target, 6))
    may_wait = limits.waiting_per_replica * load.replicas
    if load.waiting <= may_wait:
        # Those that wait do so for a reason that fewer replicas would not mend.
        return max(held, load.replicas if load.waiting else 0, 1 if load.running else 0)
    return max(held, load.replicas + math.ceil((load.waiting - may_wait) / limits.waiting_per_replica))


def _covers(history: Sequence[ClusterLoad], seconds: float) -> bool:
    return history[-1].at - history[0].at >= seconds
