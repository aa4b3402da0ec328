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
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest

import weft
from tests.processes import descendants, name_of, runs
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

    def __init__(self, folder: Path, host: str, *flags: str, under: Sequence[str] = ()) -> None:
        """`under`: a command that runs another, in the same process."""
        self.host = host
        command = [*under, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
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

    def raylets(self) -> list[int]:
        """Return the process that Ray's work on this node depends on, as long as it runs."""
        return [pid for pid in descendants(self.process.pid) if name_of(pid) == "raylet" and runs(pid)]

    def kill(self, *more: int) -> None:
        """End the node at once: Ray's processes, and others that the machine would take along."""
        for pid in (*more, *descendants(self.process.pid), self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(PATIENCE)


class Machines(Protocol):
    """Where nodes are, by their numbers; the head's is 0."""

    def host(self, number: int) -> str: ...

    def under(self, number: int) -> tuple[str, ...]: ...


class Loopback:
    """Nodes with addresses of their own on the loopback interface of this machine."""

    def host(self, number: int) -> str:
        return f"127.0.0.{number + 1}"

    def under(self, number: int) -> tuple[str, ...]:
        return ()


class RayCluster:
    """A head without CPUs, and nodes with some. A context manager that leaves nothing running."""

    def __init__(self, num_nodes: int, cpus: int, machines: Machines | None = None) -> None:
        # Ray has sockets in it, whose paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="wray-", dir="/tmp"))
        self.machines = machines or Loopback()
        self.nodes: list[RayNode] = []
        self._cpus = cpus
        try:
            self.head = self._head(port=0)
            self.address = self._address()
            for number in range(num_nodes):
                self.nodes.append(self._node(number))
        except BaseException:
            self.close()
            raise

    def restart_head(self) -> None:
        """Start a head at the address of the one that died. It knows nothing of it."""
        self.head.kill()
        self.head = self._head(port=int(self.address.rpartition(":")[2]))

    def restart_node(self, number: int) -> None:
        self.nodes[number].kill()
        self.nodes[number] = self._node(number)

    def _head(self, port: int) -> RayNode:
        flags = ("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self.folder}")
        return RayNode(self.folder, self.machines.host(0), *flags, under=self.machines.under(0))

    def _node(self, number: int) -> RayNode:
        flags = (f"--address={self.address}", f"--num-cpus={self._cpus}")
        place = number + 1
        return RayNode(self.folder, self.machines.host(place), *flags, under=self.machines.under(place))

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

    def __init__(self, address: str, name: str, under: Sequence[str] = ()) -> None:
        top = ("cluster", "top", "--json", "--ray-address", address, "--cluster-name", name)
        self._command = [*under, sys.executable, "-m", "weft", *top]
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
            with subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
            ) as self._process:
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    if line.startswith("{") and line.endswith("\n"):  # all of it, and not a word of Ray
                        self.newest = json.loads(line)


def environment() -> dict[str, str]:
    """Return the environment of a node, where Python finds the Weft that is tested."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(weft.__file__).parents[1])}
