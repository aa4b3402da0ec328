"""Replicas on a real Ray cluster: streams go on, byte for byte, while what they run on dies."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import forked
from tests.cluster.ray_nodes import ENVIRONMENT, ClusterView, RayCluster, environment, needs_ray
from tests.e2e.server import Server
from tests.waiting import PATIENCE, wait_until

NAME = "kill-matrix"
LONG = {"prompt": "The weft runs", "max_tokens": 2500, "ignore_eos": True, "seed": 7, "temperature": 1.0}


class Edge(Server):
    """A server whose engines are replicas on Ray."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    needs_ray()
    with RayCluster(num_nodes=2, cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def edge(cluster: RayCluster, long_model: Path) -> Iterator[Edge]:
    flags = ("--replicas", "2", "--ray-address", cluster.address, "--cluster-name", NAME, "--device", "cpu")
    small = ("--threads", "1", "--image-model", "none", "--kv-cache-memory-mb", "64", "--heartbeat-timeout-s", "60")
    with Edge("--model", str(long_model), "--served-model-name", "tiny", *flags, *small, env=ENVIRONMENT) as edge:
        yield edge


@pytest.fixture(scope="module")
def view(cluster: RayCluster, edge: Edge) -> Iterator[ClusterView]:
    view = ClusterView(cluster.address, NAME)
    yield view
    view.close()


@pytest.fixture(scope="module")
def expected(edge: Edge) -> str:
    """The stream as it is when nothing dies."""
    with Reading(edge) as reading:
        return reading.text()


class Reading:
    """A stream that is read in a thread."""

    def __init__(self, edge: Edge) -> None:
        self.received: list[str] = []
        self.problem = ""
        self._url = edge.url
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join(PATIENCE)

    def _read(self) -> None:
        body = {"model": "tiny", "stream": True, **LONG}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=PATIENCE) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.problem = str(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.problem = json.dumps(event)
        else:
            self.received += [choice["text"] for choice in event["choices"]]

    def wait_for_some(self) -> None:
        wait_until(lambda: len(self.received) > 20 or self.problem, "the stream's beginning")

    def text(self) -> str:
        self._thread.join(PATIENCE)
        assert not self.problem
        return "".join(self.received)


@contextmanager
def stream_at_one_replica(edge: Edge, view: ClusterView) -> Iterator[tuple[Reading, dict[str, Any]]]:
    """A stream that has begun, and the replica that has it."""
    wait_until(lambda: len(view.ready()) == 2, "two replicas")
    with Reading(edge) as reading:
        reading.wait_for_some()

        def busy() -> list[dict[str, Any]]:
            return [one for one in view.replicas.values() if one["open_requests"]]

        wait_until(busy, "the replica of the stream")
        yield reading, busy()[0]


def test_a_stream_goes_on_while_its_replica_is_killed(edge: Edge, view: ClusterView, expected: str) -> None:
    with stream_at_one_replica(edge, view) as (reading, replica):
        os.kill(replica["pid"], signal.SIGKILL)
        assert reading.text() == expected
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another in its place")


def test_a_stream_goes_on_while_the_actor_of_its_replica_is_killed(
    edge: Edge, view: ClusterView, expected: str
) -> None:
    with stream_at_one_replica(edge, view) as (reading, replica):
        os.kill(replica["actor_pid"], signal.SIGKILL)
        assert reading.text() == expected
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another in its place")
    wait_until(lambda: not is_alive(replica["pid"]), "the end of the process that the actor had started")


def test_a_replica_drains_by_command_and_is_replaced(
    cluster: RayCluster, edge: Edge, view: ClusterView, expected: str
) -> None:
    with stream_at_one_replica(edge, view) as (reading, replica):
        words = ("cluster", "drain", replica["id"], "--ray-address", cluster.address, "--cluster-name", NAME)
        told = forked.weft(*words, environment=environment())
        assert told.returncode == 0, told.stderr
        assert reading.text() == expected
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another in its place")


def test_a_stream_goes_on_while_its_node_dies(
    cluster: RayCluster, edge: Edge, view: ClusterView, expected: str
) -> None:
    with stream_at_one_replica(edge, view) as (reading, replica):
        host = replica["address"].rpartition(":")[0]
        (node,) = (node for node in cluster.nodes if node.host == host)
        node.kill(replica["pid"])
        assert reading.text() == expected
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another on another node")


def test_the_edge_serves_on_while_the_head_dies(
    cluster: RayCluster, edge: Edge, view: ClusterView, expected: str
) -> None:
    with stream_at_one_replica(edge, view) as (reading, _):
        cluster.head.kill()
        assert reading.text() == expected
    wait_until(lambda: any("Ray is lost" in line for line in edge.log), "the edge's word on it")
    wait_until(lambda: not any(raylets(node) for node in cluster.nodes[:1]), "the end of a raylet without a head")
    with Reading(edge) as again:
        assert again.text() == expected


def raylets(node: Any) -> list[int]:
    from tests.processes import descendants

    return [pid for pid in descendants(node.process.pid) if "raylet" in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return bool(command_of(pid))
