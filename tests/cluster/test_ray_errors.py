"""What a user reads when replicas cannot be had from Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import ENVIRONMENT, needs_ray
from tests.e2e.server import run_first
from tests.ports import reserved_port
from tests.waiting import PATIENCE
from weft.cluster.ray_membership import check_counts, cluster_spec
from weft.cluster.ray_messages import ReplicaSpec
from weft.config import load
from weft.errors import ConfigError
from weft.hub.resolve import find_model
from weft.options import ClusterOptions


def served(model: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "serve", str(model), "--port", "0", "--replicas", "1", *flags]
    environment = {**os.environ, **ENVIRONMENT, **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_an_address_where_no_ray_is(tiny_model: Path) -> None:
    needs_ray()
    with reserved_port() as port:
        told = served(tiny_model, "--ray-address", f"127.0.0.1:{port}")
    assert told.returncode == 2
    assert f"No Ray cluster answers at --ray-address 127.0.0.1:{port}" in told.stderr
    assert "Traceback" not in told.stderr


def test_the_address_of_a_ray_client_is_no_address_of_a_cluster(tiny_model: Path) -> None:
    needs_ray()
    told = served(tiny_model, "--ray-address", "ray://127.0.0.1:10001")
    assert told.returncode == 2 and "the address of a Ray client" in told.stderr


def test_ray_that_is_not_installed(tiny_model: Path, tmp_path: Path) -> None:
    told = served(tiny_model, **run_first("import sys\nsys.modules['ray'] = None\n", tmp_path))
    assert told.returncode == 2
    assert "Ray, which is not installed" in told.stderr and "pip install 'weft-serve[ray]'" in told.stderr


def test_resources_that_no_node_has_are_told_with_those_that_there_are() -> None:
    needs_ray()
    from weft.cluster.ray_controller import unplaceable

    spec = ReplicaSpec(config=load(env={}), key="", num_cpus=1, num_gpus=4)
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0, "memory": float(64 << 30)}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    said = unplaceable(spec, nodes)
    assert "asks for 1 CPU, 4 GPU on one node" in said and "8 CPU, 2 GPU, 64.0 GiB of memory" in said
    assert not unplaceable(spec, [{"Alive": True, "Resources": {"CPU": 1.0, "GPU": 4.0}}])


def test_counts_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="--min-replicas 3, --replicas 2"):
        check_counts(ClusterOptions(replicas=2, min_replicas=3))
    assert check_counts(ClusterOptions(replicas=2)) == (2, 2, 2)
    assert check_counts(ClusterOptions(min_replicas=1, max_replicas=4)) == (1, 1, 4)


def test_replicas_get_no_keys_of_the_server_and_the_model_s_whole_path(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    flags = {"model": tiny_model.name, "api_key": ["sesame"], "admin_key": ["boss"], "replicas": 2, "threads": 3}
    config = load({**flags, "otlp_endpoint": "http://collector/v1/traces"}, env={})
    replica = cluster_spec(config, find_model(config)).replica
    assert replica.config.model.model == str(tiny_model)
    assert not replica.config.server.api_key and not replica.config.server.admin_key
    assert replica.config.server.otlp_endpoint == "http://collector/v1/traces"
    assert replica.asked["CPU"] == 3 and replica.asked["memory"] > 0
