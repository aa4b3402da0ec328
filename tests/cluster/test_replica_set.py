"""What a cluster does next: it starts what is missing, drains before it ends, and replaces one at a time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from weft.cluster.replica_set import FIRST_RETRY_S, LAST_RETRY_S, SURGE_S, Decision, ReplicaReport, ReplicaSet

DRAIN_S = 30.0


class Simulated:
    """A cluster in which replicas start when they are told to, and edges know every table at once."""

    def __init__(self, target: int, places: int = 1000) -> None:
        self.set = ReplicaSet(target, version=1, drain_timeout_s=DRAIN_S)
        self.now = 0.0
        self.places = places
        self.open: dict[str, int] = {}
        self.stopped: list[str] = []
        self._count = 0

    def tick(self, *, seconds: float = 1.0, starts: bool = True, seen: int | None = None) -> Decision:
        self.now += seconds
        for place, replica_id in enumerate(list(self.set.members)):
            if starts and place < self.places:
                self.report(replica_id)
        decision = self.set.decide(self.now, [self.set.version if seen is None else seen])
        for _ in range(decision.start):
            self._count += 1
            self.set.started(f"r{self._count}", self.now)
        self.stopped += decision.stop
        return decision

    def report(self, replica_id: str) -> None:
        self.set.reported(replica_id, ReplicaReport(host="h", port=1, open_requests=self.open.get(replica_id, 0)))

    def settle(self) -> None:
        for _ in range(8):
            self.tick()

    def ready(self) -> list[str]:
        return [member.id for member in self.set.ready]


def running(target: int, places: int = 1000) -> Simulated:
    cluster = Simulated(target, places)
    cluster.settle()
    assert len(cluster.ready()) == target
    return cluster


def test_it_starts_as_many_as_are_wanted() -> None:
    assert len(running(3).set.members) == 3


def test_a_replica_that_died_is_replaced_under_another_name() -> None:
    cluster = running(2)
    cluster.set.died("r1", "its node is lost", cluster.now)
    cluster.settle()
    assert cluster.ready() == ["r2", "r3"]


def test_one_that_is_too_many_drains_and_ends_when_it_has_no_request() -> None:
    cluster = running(2)
    cluster.open = {"r1": 3, "r2": 5}
    cluster.tick()
    cluster.set.target = 1
    assert cluster.tick().drain == ("r1",), "the one with less to do"
    cluster.settle()
    assert "r1" in cluster.set.members
    cluster.open["r1"] = 0
    cluster.settle()
    assert cluster.stopped == ["r1"] and cluster.ready() == ["r2"]


def test_a_replica_drains_until_every_edge_knows() -> None:
    cluster = running(2)
    old = cluster.set.version
    cluster.set.target = 1
    for _ in range(5):
        cluster.tick(seen=old)
    assert not cluster.stopped
    cluster.settle()
    assert len(cluster.stopped) == 1


def test_a_replica_that_does_not_get_done_ends_after_the_drain_timeout() -> None:
    cluster = running(1)
    cluster.open = {"r1": 1}
    cluster.set.drain("r1")
    cluster.tick()
    cluster.tick(seconds=DRAIN_S + 1)
    assert cluster.stopped == ["r1"]


def test_a_drained_replica_is_replaced() -> None:
    cluster = running(2)
    assert cluster.set.drain("r2") and not cluster.set.drain("r9")
    cluster.settle()
    assert cluster.ready() == ["r1", "r3"] and cluster.stopped == ["r2"]


def test_a_rolling_restart_replaces_all_and_never_has_fewer_ready() -> None:
    cluster = running(3)
    cluster.set.restart()
    for _ in range(20):
        cluster.tick()
        assert len(cluster.ready()) >= 3
        assert len(cluster.set.staying) <= 4
    assert cluster.ready() == ["r4", "r5", "r6"] and sorted(cluster.stopped) == ["r1", "r2", "r3"]


def test_a_rolling_restart_of_a_full_cluster_lets_an_old_one_go_first() -> None:
    cluster = running(2, places=2)
    cluster.set.restart()
    for _ in range(6):
        cluster.tick()
    assert not cluster.stopped, "a place may come free"
    cluster.tick(seconds=SURGE_S)
    for _ in range(300):
        cluster.tick()
    assert cluster.ready() == ["r3", "r4"] and sorted(cluster.stopped) == ["r1", "r2"]


def test_replicas_that_fail_while_they_start_are_tried_less_and_less_often() -> None:
    cluster = Simulated(1)
    starts: list[float] = []
    while cluster.now < 200:
        decision = cluster.tick(seconds=0.5, starts=False)
        if decision.start:
            starts.append(cluster.now)
            cluster.set.died(next(iter(cluster.set.members)), "the model is not there", cluster.now)
    pauses = [after - before for before, after in pairwise(starts)]
    assert pauses[0] <= 2 * FIRST_RETRY_S and pauses == sorted(pauses) and pauses[-1] >= LAST_RETRY_S
    assert cluster.set.last_error == "the model is not there"


def test_every_change_has_a_higher_version() -> None:
    cluster = running(2)
    before = cluster.set.table()
    cluster.set.died("r1", "", cluster.now)
    assert cluster.set.table().version > before.version
    assert [replica.id for replica in cluster.set.table().replicas] == ["r2"]


events = st.lists(
    st.tuples(st.sampled_from(["tick", "die", "drain", "restart", "scale"]), st.integers(0, 5)), max_size=60
)


@given(events)
@settings(max_examples=100 * EFFORT)
def test_whatever_happens_only_drained_replicas_end_and_the_number_is_right_at_last(
    happened: list[tuple[str, int]],
) -> None:
    cluster = Simulated(2)
    for what, number in happened:
        ids = list(cluster.set.members)
        match what:
            case "die" if ids:
                cluster.set.died(ids[number % len(ids)], "killed", cluster.now)
            case "drain" if ids:
                cluster.set.drain(ids[number % len(ids)])
            case "restart":
                cluster.set.restart()
            case "scale":
                cluster.set.target = number
            case _:
                draining = {member.id for member in cluster.set.members.values() if member.state == "draining"}
                decision = cluster.tick()
                assert set(decision.stop) <= draining | set(decision.drain)
    for _ in range(80):
        cluster.tick()
    assert len(cluster.ready()) == len(cluster.set.members) == cluster.set.target
    assert all(member.generation == cluster.set.generation for member in cluster.set.ready)
