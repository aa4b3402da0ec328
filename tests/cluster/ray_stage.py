"""The kill matrix on Ray: a head, and three nodes with room for a replica each, every one like a machine with a network
of its own (network namespaces on one bridge). Two replicas are wanted, so that one can be replaced. The edge is on the
head's machine, and clients are on none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from tests.cluster.namespaces import Namespaces, why_not
from tests.cluster.ray_nodes import ENVIRONMENT, ClusterView, RayCluster, environment
from tests.cluster.stages import Death, Setting, Stage
from tests.e2e.server import Server
from tests.e2e.tiny_server import NAME
from tests.processes import runs
from tests.waiting import PATIENCE, wait_until

CLUSTER = "kill-matrix"
HEAD = 0
NUM_NODES = 3


class RayStage(Stage):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        if why := why_not():
            sys.exit(f"The rows on Ray cannot be run here: {why}.")
        try:
            self._machines = self.enter_context(Namespaces(1 + NUM_NODES))
            self._ray = self.enter_context(RayCluster(num_nodes=NUM_NODES, cpus=1, machines=self._machines))
            self._edge = self.enter_context(self._start_edge(setting))
            self._view = ClusterView(self._ray.address, CLUSTER, under=self._machines.under(HEAD))
            self.callback(self._view.close)
            self._wait_for_two()
        except BaseException:
            self.close()
            raise
        self.edges = [self._edge]
        self.deaths = {
            "Ray: replica killed": Death(lambda: os.kill(self._victim()["pid"], signal.SIGKILL), "moves"),
            "Ray: actor killed": Death(lambda: os.kill(self._victim()["actor_pid"], signal.SIGKILL), "moves"),
            "Ray: controller killed": Death(lambda: os.kill(self._view.newest["pid"], signal.SIGKILL), "none"),
            "Ray: raylet killed": Death(self._kill_raylet, "moves"),
            "Ray: node killed": Death(lambda: self._machines.kill(self._place()), "moves"),
            "Ray: network cut": Death(lambda: self._machines.cut(self._place()), "moves"),
            "Ray: head killed": Death(self._kill_head, "none"),
        }
        self.operations = {"Ray: drain": self._drain, "Ray: rolling restart": self._restart}

    def _start_edge(self, setting: Setting) -> Server:
        model = ("--model", str(setting.model), "--served-model-name", NAME, "--threads", "1", "--device", "cpu")
        where = ("--host", self._machines.host(HEAD), "--insecure")
        ray = ("--replicas", "2", "--ray-address", self._ray.address, "--cluster-name", CLUSTER)
        flags = (*model, *where, *ray, *setting.engine, *setting.front("ray-edge"))
        return Server(*flags, env=ENVIRONMENT, under=self._machines.under(HEAD))

    def mend(self) -> None:
        for place in range(1 + NUM_NODES):
            self._machines.join(place)
        if not self._ray.head.raylets():
            # What a machine loses when it is switched off and on; the edge stays.
            for number in range(NUM_NODES):
                self._machines.kill(number + 1)
            self._ray.restart_head()
        for number, node in enumerate(self._ray.nodes):
            if not node.raylets() or node.process.poll() is not None:
                self._machines.kill(number + 1)
                self._ray.restart_node(number)
        self._wait_for_two()

    def _wait_for_two(self) -> None:
        """Wait until the controller and the edge know the same two replicas, which run."""

        def are_there() -> bool:
            newest, replicas = self._view.newest, self._view.replicas
            if len(self._view.ready()) != 2 or len(replicas) != 2:
                return False
            processes = [newest["pid"], *(one["pid"] for one in replicas.values())]
            return all(map(runs, processes)) and set(self._connected()) == set(replicas)

        wait_until(are_there, "two replicas")

    def _connected(self) -> list[str]:
        return [name for name, is_ready in self.gauges("weft_replica_ready", self._edge).items() if is_ready]

    def _victim(self) -> dict[str, Any]:
        return self._view.replicas[self.busiest()]

    def _place(self) -> int:
        return self._machines.number(self._victim()["address"].rpartition(":")[0])

    def _kill_raylet(self) -> None:
        (pid,) = self._ray.nodes[self._place() - 1].raylets()
        os.kill(pid, signal.SIGKILL)

    def _kill_head(self) -> None:
        """Return when the edge knows, so that what is asked next is asked without Ray."""
        num_told = self._times_lost()
        self._ray.head.kill()
        wait_until(lambda: self._times_lost() > num_told, "the edge's word on it")

    def _times_lost(self) -> int:
        return sum("Ray is lost" in line for line in self._edge.log)

    def _drain(self) -> None:
        victim = self.busiest()
        self._command("drain", victim)
        wait_until(lambda: victim not in self._view.replicas, "the end of the replica that drains")
        self._wait_for_two()

    def _restart(self) -> None:
        old = set(self._view.replicas)
        self._command("restart")
        wait_until(lambda: not old & set(self._view.replicas), "the end of all old replicas")
        self._wait_for_two()

    def _command(self, *words: str) -> None:
        where = ("--ray-address", self._ray.address, "--cluster-name", CLUSTER)
        command = [*self._machines.under(HEAD), sys.executable, "-m", "weft", "cluster", *words, *where]
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL, timeout=PATIENCE)
