"""Replicas on a real Ray cluster: streams go on, byte for byte, while what they run on dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import weft
from tests import forked
from tests.cluster.ray_nodes import ENVIRONMENT, ClusterView, RayCluster, environment, needs_ray
from tests.cluster.replicas import PATIENT
from tests.cluster.streams import Following
from tests.e2e.server import Server
from tests.e2e.tiny_server import NAME, TinyServer
from tests.ports import reserved_port
from tests.processes import runs
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.long

CLUSTER = "kill-matrix"
LONG = {"max_tokens": 2500}

Answer = tuple[str, list[str], str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    needs_ray()
    with RayCluster(num_nodes=2, cpus=2) as cluster:
        yield cluster


def edge_flags(cluster: RayCluster, name: str) -> tuple[str, ...]:
    return ("--ray-address", cluster.address, "--cluster-name", name, "--device", "cpu", "--threads", "1", *PATIENT)


@pytest.fixture(scope="module")
def edge(cluster: RayCluster, long_model: Path) -> Iterator[Server]:
    model = ("--model", str(long_model), "--served-model-name", NAME)
    with Server(*model, "--replicas", "2", *edge_flags(cluster, CLUSTER), env=ENVIRONMENT) as edge:
        yield edge


@pytest.fixture(scope="module")
def view(cluster: RayCluster, edge: Server) -> Iterator[ClusterView]:
    view = ClusterView(cluster.address, CLUSTER)
    yield view
    view.close()


@pytest.fixture(scope="module")
def unharmed(direct: TinyServer) -> Answer:
    """The answer of a single server, where nothing dies."""
    return Following(direct.url, LONG).answer()


@contextmanager
def stream_at_one_replica(edge: Server, view: ClusterView) -> Iterator[tuple[Following, dict[str, Any]]]:
    """A stream that has begun, and the replica that has it."""
    wait_until(lambda: len(view.ready()) == 2, "two replicas")
    # The edge hears of a replica's steps a while later: it would else still know the one of the stream before.
    wait_until(lambda: not busy(edge), "idle replicas")
    stream = Following(edge.url, LONG).wait_for(20)
    wait_until(lambda: busy(edge) or stream.finish, "the replica of the stream")
    (name,) = busy(edge)
    yield stream, view.replicas[name]
    stream.ended()


def busy(edge: Server) -> list[str]:
    """The replicas that compute requests, as the edge knows it."""
    running = re.findall(r'^weft_replica_requests_running{.*replica="(\w+)".*} (\S+)$', edge.get("/metrics").text, re.M)
    return [name for name, count in running if float(count)]


def test_a_stream_goes_on_while_its_replica_is_killed(edge: Server, view: ClusterView, unharmed: Answer) -> None:
    with stream_at_one_replica(edge, view) as (stream, replica):
        os.kill(replica["pid"], signal.SIGKILL)
        assert stream.answer() == unharmed
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another in its place")


def test_a_stream_goes_on_while_the_actor_of_its_replica_is_killed(
    edge: Server, view: ClusterView, unharmed: Answer
) -> None:
    with stream_at_one_replica(edge, view) as (stream, replica):
        os.kill(replica["actor_pid"], signal.SIGKILL)
        assert stream.answer() == unharmed
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another in its place")
    wait_until(lambda: not runs(replica["pid"]), "the end of the process that the actor had started")


def test_a_replica_drains_by_command_and_is_replaced(
    cluster: RayCluster, edge: Server, view: ClusterView, unharmed: Answer
) -> None:
    with stream_at_one_replica(edge, view) as (stream, replica):
        assert "drains" in weft_cluster(cluster, CLUSTER, "drain", replica["id"])
        assert stream.answer() == unharmed
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another in its place")


def test_replicas_stay_when_their_controller_is_killed(edge: Server, view: ClusterView, unharmed: Answer) -> None:
    with stream_at_one_replica(edge, view) as (stream, _):
        before, known = view.newest["pid"], set(view.replicas)
        os.kill(before, signal.SIGKILL)
        assert stream.answer() == unharmed
    wait_until(lambda: view.newest["pid"] != before and len(view.ready()) == 2, "another controller")
    assert set(view.replicas) == known


def test_replicas_come_and_go_under_load_without_a_failed_request(
    cluster: RayCluster, long_model: Path, expected: Answer
) -> None:
    model = ("--model", str(long_model), "--served-model-name", NAME, "--max-num-seqs", "2")
    counts = ("--replicas", "1", "--min-replicas", "1", "--max-replicas", "2")
    view = ClusterView(cluster.address, "scaling")
    with Server(*model, *counts, *edge_flags(cluster, "scaling"), env=ENVIRONMENT) as edge:
        streams: list[Following] = []

        def under_load(condition: Callable[[], object]) -> Callable[[], object]:
            def kept_busy() -> object:
                num_open = sum(not stream.finish for stream in streams)
                streams.extend(Following(edge.url) for _ in range(10 - num_open))
                return condition()

            return kept_busy

        wait_until(under_load(lambda: len(view.ready()) == 2), "a second replica, by the load")
        wait_until(under_load(lambda: len(busy(edge)) == 2), "work for both")
        assert "1 replicas" in weft_cluster(cluster, "scaling", "scale", "1")
        wait_until(under_load(lambda: len(view.replicas) == 1), "the end of one, which drains first")
        assert all(stream.answer() == expected for stream in streams)
    view.close()


def test_ray_serve_runs_an_edge_as_an_application(
    cluster: RayCluster, long_model: Path, unharmed: Answer, tmp_path: Path
) -> None:
    engine = {"device": "cpu", "threads": 1, "heartbeat_timeout_s": 120, "cluster_name": "serve"}
    arguments = {"model": str(long_model), "served_model_name": NAME, "replicas": 1, **engine}
    application = {"name": "weft", "import_path": "weft.cluster:app", "route_prefix": "/", "args": arguments}
    deployed = {"name": "Edge", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    with reserved_port() as port:
        proxy = {"host": "127.0.0.1", "port": port}
        config = {
            "proxy_location": "HeadOnly",
            "http_options": proxy,
            "applications": [{**application, "deployments": [deployed]}],
        }
        (tmp_path / "serve.yaml").write_text(json.dumps(config))
        with served_by_ray(cluster, tmp_path / "serve.yaml"):
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_healthy(url), "the application")
            assert Following(url, LONG).answer() == unharmed


@contextmanager
def served_by_ray(cluster: RayCluster, config: Path) -> Iterator[None]:
    """`serve run`, to the end."""
    root = str(Path(weft.__file__).parents[1])
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, "--app-dir", root]
    with (config.parent / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [*command, str(config)], env=environment(), stdout=log, stderr=subprocess.STDOUT, cwd=config.parent
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


def weft_cluster(cluster: RayCluster, name: str, *words: str) -> str:
    """Run a command of `weft cluster`, and return what it says."""
    where = ("--ray-address", cluster.address, "--cluster-name", name)
    told = forked.weft("cluster", *words, *where, environment=environment())
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_a_stream_goes_on_while_its_node_dies(
    cluster: RayCluster, edge: Server, view: ClusterView, unharmed: Answer
) -> None:
    with stream_at_one_replica(edge, view) as (stream, replica):
        host = replica["address"].rpartition(":")[0]
        (node,) = (node for node in cluster.nodes if node.host == host)
        node.kill(replica["pid"])
        assert stream.answer() == unharmed
    wait_until(lambda: replica["id"] not in view.replicas and len(view.ready()) == 2, "another on another node")


def test_the_edge_serves_on_while_the_head_dies(
    cluster: RayCluster, edge: Server, view: ClusterView, unharmed: Answer
) -> None:
    with stream_at_one_replica(edge, view) as (stream, _):
        cluster.head.kill()
        assert stream.answer() == unharmed
    wait_until(lambda: any("Ray is lost" in line for line in edge.log), "the edge's word on it")
    wait_until(lambda: not cluster.nodes[0].raylets(), "the end of a raylet without a head")
    assert Following(edge.url, LONG).answer() == unharmed


def test_the_edge_joins_a_head_that_comes_back(cluster: RayCluster, edge: Server, unharmed: Answer) -> None:
    """Its state is empty: another controller starts other replicas, and has made another key for them."""
    if cluster.head.process.poll() is None:
        cluster.head.kill()
    before = set(connected(edge))
    cluster.restart_head()
    for number in range(len(cluster.nodes)):
        cluster.restart_node(number)
    wait_until(lambda: len(set(connected(edge)) - before) == 2, "replicas of the new head")
    assert Following(edge.url, LONG).answer() == unharmed


def connected(edge: Server) -> list[str]:
    """The replicas that take requests of the edge."""
    return re.findall(r'^weft_replica_ready{.*replica="(\w+)".*} 1', edge.get("/metrics").text, re.M)
