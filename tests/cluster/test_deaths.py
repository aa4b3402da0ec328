"""Streams go on byte for byte when a replica, its engine or the network between dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.replicas import BRIEF, PATIENT, Edge, Proxy, Replica
from tests.cluster.streams import CHAT, Following
from tests.waiting import PATIENCE, wait_until

Answer = tuple[str, list[str], str]
NUM_STREAMS = 4


class Two(ExitStack):
    """Two replicas behind networks that can be cut, and an edge."""

    def __init__(self, model: Path, key: Path, of_replica: tuple[str, ...], of_edge: tuple[str, ...]) -> None:
        super().__init__()
        self.replicas = [self.enter_context(Replica(model, key, *of_replica)) for _ in range(2)]
        self.proxies = [self.enter_context(Proxy(one.port)) for one in self.replicas]
        self.edge = Edge(model, key, [proxy.address for proxy in self.proxies], *of_edge)
        self.enter_context(self.edge)
        self.edge.wait_connected(2)

    def streams(self) -> list[Following]:
        """As many streams on each replica, of which all have begun."""
        streams = [Following(self.edge.url) for _ in range(NUM_STREAMS)]
        return [stream.wait_for(5) for stream in streams]

    def num_moved(self) -> int:
        return sum(map(int, re.findall(r"(\d+) requests move", "".join(self.edge.log))))


@contextmanager
def two(
    model: Path, key: Path, of_replica: tuple[str, ...] = PATIENT, of_edge: tuple[str, ...] = PATIENT
) -> Iterator[Two]:
    with Two(model, key, of_replica, of_edge) as both:
        yield both


@contextmanager
def one_edge(model: Path, key: Path, *flags: str) -> Iterator[tuple[Replica, Edge]]:
    """One replica, and an edge."""
    with Replica(model, key, *PATIENT) as only, Edge(model, key, [only.address], *PATIENT, *flags) as edge:
        assert isinstance(edge, Edge)
        yield only, edge


def test_a_replica_is_killed(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    with two(long_model, cluster_key) as both:
        streams = both.streams()
        both.replicas[0].kill()
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        assert both.num_moved() > 0


def test_an_engine_is_killed(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    with two(long_model, cluster_key) as both:
        streams = both.streams()
        for replica in both.replicas:
            os.kill(replica.engine_pid, signal.SIGKILL)
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        assert both.num_moved() == 0, "the replica replaces its engine"
        assert both.edge.metric("weft_engine_restarts_total") == 2


def test_an_engine_is_given_up(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    """A replica that has no engine any more ends, and tells no client of it."""
    with two(long_model, cluster_key, of_replica=(*PATIENT, "--max-restarts", "0")) as both:
        streams = both.streams()
        os.kill(both.replicas[0].engine_pid, signal.SIGKILL)
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        assert both.replicas[0].process.wait(PATIENCE) == 1
        assert both.num_moved() > 0


def test_an_engine_hangs(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    with two(long_model, cluster_key, of_replica=BRIEF) as both:
        streams = both.streams()
        os.kill(both.replicas[0].engine_pid, signal.SIGSTOP)
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS


def test_a_replica_hangs(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    with two(long_model, cluster_key, of_edge=BRIEF) as both:
        streams = both.streams()
        both.replicas[0].process.send_signal(signal.SIGSTOP)
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        assert both.num_moved() > 0
        both.replicas[0].process.send_signal(signal.SIGCONT)
        both.edge.wait_connected(2)
        # What it goes on with is of requests that are elsewhere now: they are aborted, and their tokens reach nobody.
        assert Following(both.edge.url).answer() == expected


@pytest.mark.parametrize("cut", ["reset", "silence"])
def test_the_network_is_cut(long_model: Path, cluster_key: Path, expected: Answer, cut: str) -> None:
    with two(long_model, cluster_key, of_edge=BRIEF) as both:
        streams = both.streams()
        getattr(both.proxies[0], cut)()
        assert [stream.answer() for stream in streams] == [expected] * NUM_STREAMS
        assert both.num_moved() > 0
        both.proxies[0].resume()
        both.edge.wait_connected(2)


def test_one_after_the_other_dies(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    """A request that was moved is moved again, with the tokens of both replicas before; engines die in between."""
    with two(long_model, cluster_key) as both:
        (stream,) = [Following(both.edge.url).wait_for(5)]
        both.replicas[0].kill()
        stream.wait_for(60)
        os.kill(both.replicas[1].engine_pid, signal.SIGKILL)
        stream.wait_for(120)
        with Replica(long_model, cluster_key, *PATIENT, port=both.replicas[0].port):
            both.edge.wait_connected(2)
            both.replicas[1].kill()
            assert stream.answer() == expected


def test_a_stream_waits_for_a_replica(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    with one_edge(long_model, cluster_key, "--replica-wait-s", "300") as (only, edge):
        stream = Following(edge.url).wait_for(5)
        only.kill()
        edge.wait_connected(0)
        with Replica(long_model, cluster_key, *PATIENT, port=only.port):
            assert stream.answer() == expected


def test_without_a_replica_requests_are_refused_in_time(long_model: Path, cluster_key: Path) -> None:
    with one_edge(long_model, cluster_key, "--replica-wait-s", "1") as (only, edge):
        only.kill()
        edge.wait_connected(0)
        response = httpx.post(edge.url + "/v1/chat/completions", json=CHAT, timeout=PATIENCE)
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) > 0
        assert edge.get("/health").status_code == 503


def test_a_drained_replica_finishes_its_requests(long_model: Path, cluster_key: Path, expected: Answer) -> None:
    with two(long_model, cluster_key) as both:
        streams = both.streams()
        both.replicas[0].process.send_signal(signal.SIGTERM)
        wait_until(lambda: both.edge.get("/health").status_code == 200)
        streams += [Following(both.edge.url) for _ in range(2)]
        assert [stream.answer() for stream in streams] == [expected] * (NUM_STREAMS + 2)
        assert both.replicas[0].process.wait(300) == 0
        assert both.num_moved() == 0
