"""A real Ray cluster on this machine: several raylets, each with an address of its own on the loopback interface."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.processes import descendants
from tests.waiting import PATIENCE, wait_until

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # A raylet that is killed is found dead after a second or two, and one that has lost its head ends soon.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
OBJECT_STORE_BYTES = 80 << 20


def needs_ray() -> None:
    """Skip where Ray cannot run."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    if sys.platform != "linux":
        pytest.skip("other systems have no 127.0.0.2")


class RayNode:
    """One `ray start --block`, and all that it has started."""

    def __init__(self, folder: Path, host: str, *flags: str) -> None:
        self.host = host
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", host, "--object-store-memory", str(OBJECT_STORE_BYTES), *flags]
        self.log = folder / f"{host}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
            )
        self.wait_for("Ray runtime started")

    def wait_for(self, said: str) -> None:
        def is_said() -> bool:
            assert self.process.poll() is None, f"ray start ended: {self.log.read_text()[-2000:]}"
            return said in self.log.read_text()

        wait_until(is_said, f"{said!r} of the node {self.host}")

    def kill(self, *more: int) -> None:
        """End the node at once: Ray's processes, and others that the machine would take along."""
        for pid in (*more, *descendants(self.process.pid), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(PATIENCE)


class RayCluster:
    """A head without CPUs, and nodes with some. A context manager that leaves nothing running."""

    def __init__(self, num_nodes: int, cpus: int) -> None:
        # Ray has sockets in it, whose paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="wray-", dir="/tmp"))
        self.nodes: list[RayNode] = []
        try:
            flags = ("--head", "--port=0", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self.folder}")
            self.head = RayNode(self.folder, "127.0.0.1", *flags)
            self.address = self._address()
            for number in range(num_nodes):
                self.add_node(f"127.0.0.{number + 2}", cpus)
        except BaseException:
            self.close()
            raise

    def add_node(self, host: str, cpus: int) -> RayNode:
        node = RayNode(self.folder, host, f"--address={self.address}", f"--num-cpus={cpus}")
        self.nodes.append(node)
        return node

    def _address(self) -> str:
        latest = self.folder / "ray_current_cluster"
        wait_until(latest.exists, "the address of the head")
        return latest.read_text().strip()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for node in (*self.nodes, *([self.head] if hasattr(self, "head") else [])):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class ClusterView:
    """The cluster as `weft cluster top --json` shows it. The command may end with the raylet that it is connected to,
    and is started again."""

    def __init__(self, address: str, name: str) -> None:
        self._words = ("cluster", "top", "--json", "--ray-address", address, "--cluster-name", name)
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self.newest: dict[str, Any] = {}
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def replicas(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in self.newest.get("replicas", [])}

    def ready(self) -> list[str]:
        return [name for name, one in self.replicas.items() if one["state"] == "ready"]

    def close(self) -> None:
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        self._reading.join(PATIENCE)

    def _read(self) -> None:
        while not self._is_closed:
            command = [sys.executable, "-m", "weft", *self._words]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
            ) as self._process:
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    if line.startswith("{") and line.endswith("\n"):  # all of it, and not a word of Ray
                        self.newest = json.loads(line)


def environment() -> dict[str, str]:
    """Return the environment of a node, where Python finds the Weft that is tested."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
