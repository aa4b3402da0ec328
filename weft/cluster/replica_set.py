"""The replicas of one cluster, and what is to be done next to have as many as are wanted: a pure state machine.

It starts replicas, lets them drain before they end, and replaces them one at a time in a rolling restart: the new one
first, then the old one drains. It knows neither Ray nor a clock; the controller carries out what `decide` returns.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from weft.cluster.membership import ReplicaAddress, ReplicaState, ReplicaTable

SURGE_S = 60.0
"""Seconds that a rolling restart waits for a new replica before it lets an old one go first: a full cluster has no
place for one more."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""Seconds between starts, when replicas fail while they start; twice as long after each."""

IDLE_REPORTS = 2
"""Reports in a row without a request after which a replica that drains may end: the first may be from before the last
edge knew."""


class ReplicaReport(Struct, frozen=True, kw_only=True):
    """The report of a replica says how it stands."""

    host: str = ""
    port: int = 0
    """The port where edges reach it; 0: it is not ready."""
    pid: int = 0
    actor_pid: int = 0
    node: str = ""
    waiting: int = 0
    running: int = 0
    open_requests: int = 0
    kv_usage: float = 0.0
    """The share of its KV cache that is in use, 0 to 1."""
    restarts: int = 0
    """Times that its engine process was replaced."""
    error: str = ""
    """The reason why it cannot start; empty: there is none."""


class Member(Struct, kw_only=True):
    """A replica that was started and has not been removed."""

    id: str
    generation: int
    since: float
    """The time at which it was started, or began to drain."""
    state: ReplicaState = "starting"
    report: ReplicaReport = ReplicaReport()
    drain_version: int = 0
    """The version of the first table that said that it drains."""
    idle_reports: int = 0
    """Reports in a row, since every edge knows that it drains, by which it has no request."""


class Decision(Struct, frozen=True):
    """The replicas to start and to end now."""

    start: int = 0
    drain: tuple[str, ...] = ()
    """Replicas that began to drain."""
    stop: tuple[str, ...] = ()


class ReplicaSet:
    def __init__(self, target: int, version: int, drain_timeout_s: float) -> None:
        self.target = target
        self.version = version
        self.generation = 0
        self.members: dict[str, Member] = {}
        self.last_error = ""
        """The reason why the last replica that failed did; empty: the last one started."""
        self._drain_timeout_s = drain_timeout_s
        self._asked_to_drain: set[str] = set()
        self._failures = 0
        self._next_start = 0.0

    # What happened.

    def started(self, replica_id: str, now: float, *, generation: int | None = None) -> None:
        generation = self.generation if generation is None else generation
        self.members[replica_id] = Member(id=replica_id, generation=generation, since=now)
        self.version += 1

    def reported(self, replica_id: str, report: ReplicaReport) -> None:
        member = self.members.get(replica_id)
        if member is None:
            return
        member.report = report
        member.idle_reports = 0 if report.open_requests else member.idle_reports + 1
        if member.state == "starting" and report.port:
            member.state = "ready"
            self._failures, self.last_error = 0, ""
            self.version += 1

    def died(self, replica_id: str, why: str, now: float) -> None:
        """Forget a replica. One that never was ready delays the start of the next, twice as long each time."""
        member = self.members.pop(replica_id, None)
        self._asked_to_drain.discard(replica_id)
        if member is None:
            return
        self.version += 1
        if member.state == "starting":
            self.last_error = why
            self._next_start = now + min(LAST_RETRY_S, FIRST_RETRY_S * 2**self._failures)
            self._failures += 1

    def restart(self) -> None:
        """Begin a rolling restart: every replica is replaced."""
        self.generation += 1

    def drain(self, replica_id: str) -> bool:
        """Let a replica drain and end; another is started in its place. False: there is none of this name."""
        if replica_id in self.members:
            self._asked_to_drain.add(replica_id)
        return replica_id in self.members

    # What to do.

    def decide(self, now: float, seen_versions: Iterable[int]) -> Decision:
        """Return what is to be done now. `seen_versions`: the newest table that each edge has. What it returns to drain
        is marked so already; what it returns to stop is forgotten."""
        drained = [*self._requested_drains(), *self._surplus(), *self._outdated(now)]
        if drained:
            self.version += 1
        for member in drained:
            member.state, member.since = "draining", now
            member.drain_version, member.idle_reports = self.version, 0
        stopped = tuple(self._finished(now, min(seen_versions, default=self.version)))
        for replica_id in stopped:
            del self.members[replica_id]
            self._asked_to_drain.discard(replica_id)
        if stopped:
            self.version += 1
        return Decision(self._num_to_start(now), tuple(member.id for member in drained), stopped)

    def table(self) -> ReplicaTable:
        replicas = (
            ReplicaAddress(
                id=member.id,
                host=member.report.host,
                port=member.report.port,
                node=member.report.node,
                state=member.state,
            )
            for member in self.members.values()
        )
        return ReplicaTable(self.version, tuple(replicas))

    @property
    def staying(self) -> list[Member]:
        """The replicas that do not drain."""
        return [member for member in self.members.values() if member.state != "draining"]

    @property
    def ready(self) -> list[Member]:
        return [member for member in self.members.values() if member.state == "ready"]

    def _requested_drains(self) -> list[Member]:
        return [member for member in self.staying if member.id in self._asked_to_drain]

    def _surplus(self) -> list[Member]:
        """Return the replicas above the target: those that are not ready first, then those with the least work."""
        staying = [member for member in self.staying if member.id not in self._asked_to_drain]
        if any(member.generation != self.generation for member in staying):
            return []  # the rolling restart takes them
        staying.sort(key=lambda member: (member.state == "ready", member.report.open_requests, member.id))
        return staying[: max(0, len(staying) - self.target)]

    def _outdated(self, now: float) -> list[Member]:
        """Return the old replica that a rolling restart lets go now, if any."""
        staying = [member for member in self.staying if member.id not in self._asked_to_drain]
        old = [member for member in staying if member.generation != self.generation]
        if not old:
            return []
        new = [member for member in staying if member.generation == self.generation]
        num_ready = sum(member.state == "ready" for member in staying)
        waits_long = any(member.state == "starting" and now - member.since > SURGE_S for member in new)
        if num_ready <= self.target and not waits_long and self.target > 0:
            return []
        old.sort(key=lambda member: (member.state == "ready", member.report.open_requests, member.id))
        draining = any(member.state == "draining" for member in self.members.values())
        return [] if draining and waits_long else old[:1]

    def _finished(self, now: float, seen_version: int) -> Iterable[str]:
        for member in self.members.values():
            if member.state != "draining":
                continue
            if seen_version < member.drain_version:
                member.idle_reports = 0
            if (
                member.idle_reports >= IDLE_REPORTS
                or not member.report.port
                or now - member.since > self._drain_timeout_s
            ):
                yield member.id

    def _num_to_start(self, now: float) -> int:
        if now < self._next_start:
            return 0
        new = [member for member in self.staying if member.generation == self.generation]
        missing = self.target - len(new)
        if len(new) < len(self.staying):
            # One more than wanted, until the old ones have gone.
            missing = min(missing, self.target + 1 - len(self.staying))
        return max(0, missing)
