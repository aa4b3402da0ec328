"""Streams go on byte for byte when a replica, its engine or the network between dies."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.cluster.replicas import BRIEF, PATIENT, Edge, Proxy, Replica
from tests.cluster.streams import CHAT, Following
from tests.waiting import PATIENCE, wait_until

Answer = tuple[str, list[str], str]
NUM_STREAMS = 4


class Two(ExitStack):
    """Two replicas behind networks that can be cut, and an edge; tests leave what they killed to the next one, and are
    in an order in which few are started."""

    def __init__(self, model: Path, key: Path) -> None:
        super().__init__()
        self._model, self._key = model, key
        self._salts = itertools.count()
        self.replicas = [self.enter_context(Replica(model, key, *PATIENT)) for _ in range(2)]
        self.proxies = [self.enter_context(Proxy(one.port)) for one in self.replicas]
        self._flags = [PATIENT, PATIENT]
        self.edge = self.new_edge(*PATIENT, "--replica-wait-s", "300")

    def new_edge(self, *flags: str, num_connected: int = 2) -> Edge:
        edge = Edge(self._model, self._key, [proxy.address for proxy in self.proxies], *flags)
        self.enter_context(edge)
        edge.wait_connected(num_connected)
        return edge

    def with_first(self, *flags: str) -> None:
        """Have two replicas, of which the first has these flags."""
        if self._flags[0] != flags and self.replicas[0].process.poll() is None:
            self.replicas[0].kill()
        if self.replicas[0].process.poll() is not None:
            self.start(0, *flags)
        self.mend()

    def mend(self) -> None:
        """Have two replicas: those that were killed are started anew."""
        for number, replica in enumerate(self.replicas):
            if replica.process.poll() is not None:
                self.start(number, *PATIENT)
        self.edge.wait_connected(2)

    def start(self, number: int, *flags: str) -> None:
        """Start a replica where one was."""
        port = self.replicas[number].port
        self.replicas[number] = self.enter_context(Replica(self._model, self._key, *flags, port=port))
        self._flags[number] = flags

    def stream(self, edge: Edge | None = None) -> Following:
        """A stream whose prompt no replica has cached: what was asked before does not choose its replica."""
        return Following((edge or self.edge).url, {"cache_salt": str(next(self._salts))})

    def streams(self, edge: Edge | None = None) -> list[Following]:
        """As many streams on each replica, of which all have begun."""
        return [stream.wait_for(5) for stream in [self.stream(edge) for _ in range(NUM_STREAMS)]]


def num_moved(edge: Edge) -> int:
    return sum(map(int, re.findall(r"(\d+) requests move", "".join(edge.log))))


def check_moves(edge: Edge, disturb: Callable[[], None]) -> None:
    """Disturb a replica until streams have moved from it. One that has none when it is disturbed shows nothing."""
    before = num_moved(edge)

    def has_moved() -> bool:
        disturb()
        return num_moved(edge) > before

    wait_until(has_moved, "moved requests in the log")


@pytest.fixture(scope="module")
def shared(long_model: Path, cluster_key: Path) -> Iterator[Two]:
    with Two(long_model, cluster_key) as both:
        yield both


@pytest.fixture(scope="module")
def brief(shared: Two) -> Edge:
    """An edge that gives a silent replica up."""
    return shared.new_edge(*BRIEF)


@pytest.fixture
def both(shared: Two) -> Two:
    shared.mend()
    return shared


def test_an_engine_is_killed(both: Two, expected: Answer) -> None:
    before, restarts = num_moved(both.edge), both.edge.metric("weft_engine_restarts_total")
    streams = both.streams()
    for replica in both.replicas:
        os.kill(replica.engine_pid, signal.SIGKILL)
    assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
    assert num_moved(both.edge) == before, "the replica replaces its engine"
    wait_until(lambda: both.edge.metric("weft_engine_restarts_total") == restarts + 2, "both restarts")


def test_a_replica_is_killed(both: Two, expected: Answer) -> None:
    def kill() -> None:
        both.mend()
        streams = both.streams()
        both.replicas[0].kill()
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS

    check_moves(both.edge, kill)


def test_an_engine_is_given_up(shared: Two, expected: Answer) -> None:
    """A replica that has no engine any more ends, and tells no client of it."""

    def kill_engine() -> None:
        shared.with_first(*PATIENT, "--max-restarts", "0")
        streams = shared.streams()
        os.kill(shared.replicas[0].engine_pid, signal.SIGKILL)
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        assert shared.replicas[0].process.wait(PATIENCE) == 1

    check_moves(shared.edge, kill_engine)


def test_an_engine_hangs(shared: Two, expected: Answer) -> None:
    shared.with_first(*BRIEF)
    streams = shared.streams()
    os.kill(shared.replicas[0].engine_pid, signal.SIGSTOP)
    assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS


def test_a_replica_hangs(both: Two, brief: Edge, expected: Answer) -> None:
    def stop() -> None:
        brief.wait_connected(2)
        streams = both.streams(brief)
        both.replicas[0].process.send_signal(signal.SIGSTOP)
        try:
            assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        finally:
            both.replicas[0].process.send_signal(signal.SIGCONT)

    check_moves(brief, stop)
    brief.wait_connected(2)
    # What it goes on with is of requests that are elsewhere now: they are aborted, and their tokens reach nobody.
    assert both.stream(brief).answer() == expected


@pytest.mark.parametrize("cut", ["reset", "silence"])
def test_the_network_is_cut(both: Two, brief: Edge, expected: Answer, cut: str) -> None:
    def cut_off() -> None:
        brief.wait_connected(2)
        streams = both.streams(brief)
        getattr(both.proxies[0], cut)()
        try:
            assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        finally:
            both.proxies[0].resume()

    check_moves(brief, cut_off)
    brief.wait_connected(2)


def test_a_drained_replica_finishes_its_requests(both: Two, expected: Answer) -> None:
    before, streams = num_moved(both.edge), both.streams()
    both.replicas[0].process.send_signal(signal.SIGTERM)
    streams += [both.stream() for _ in range(2)]
    assert [stream.answer() for stream in streams] == [expected] * (NUM_STREAMS + 2)
    assert both.replicas[0].process.wait(PATIENCE) == 0
    assert num_moved(both.edge) == before


def test_one_after_the_other_dies(both: Two, expected: Answer) -> None:
    """A request that was moved is moved again, with the tokens of both replicas before; engines die in between, and
    at last it waits for a replica."""
    stream = both.stream().wait_for(5)
    both.replicas[0].kill()
    stream.wait_for(40)
    os.kill(both.replicas[1].engine_pid, signal.SIGKILL)
    stream.wait_for(80)
    both.start(0, *PATIENT)
    both.edge.wait_connected(2)
    both.replicas[1].kill()
    stream.wait_for(120)
    both.replicas[0].kill()
    both.edge.wait_connected(0)
    both.start(1, *PATIENT)
    assert stream.answer() == expected


def test_without_a_replica_requests_are_refused_in_time(shared: Two) -> None:
    alive = [replica for replica in shared.replicas if replica.process.poll() is None]
    edge = shared.new_edge(*PATIENT, "--replica-wait-s", "0.3", num_connected=len(alive))
    for replica in alive:
        replica.kill()
    edge.wait_connected(0)
    response = httpx.post(edge.url + "/v1/chat/completions", json=CHAT, timeout=PATIENCE)
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) > 0
    assert edge.get("/health").status_code == 503
