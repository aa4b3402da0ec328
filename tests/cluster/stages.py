"""Where things die in the kill matrix: replicas and edges that are started by hand, with one rank or two. (Those on Ray
are in ray_stage.py.)"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from msgspec import Struct

from tests import tiny_models
from tests.cluster.replicas import Edge, Proxy, Replica, key_file
from tests.e2e.server import Server
from tests.e2e.tiny_server import TinyServer
from tests.processes import descendants, is_rank
from tests.tiny_images import save_image_model
from tests.waiting import PATIENCE

Effect = Literal["moves", "restarts", "breaks", "none"]
"""What must be seen, or nothing has died under a request: requests that moved to another replica, an engine that was
replaced, or connections of clients that broke. Others die without a trace in the requests."""


class Death(Struct, frozen=True):
    kill: Callable[[], None]
    effect: Effect


class Setting(ExitStack):
    """The model that all serve, and a server with an engine of its own, whose answers are the right ones."""

    def __init__(self, folder: Path, *, has_images: bool) -> None:
        super().__init__()
        self.folder = folder
        self.model = tiny_models.save_directory("smollm2", folder / "tiny")
        facts = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 1 << 14}))
        images = str(save_image_model(folder / "dit", 96)) if has_images else "none"
        self.engine = ("--image-model", images, "--image-checkpoint-steps", "5", "--heartbeat-timeout-s", "3")
        self.single = TinyServer(self.model, "--threads", "1", *self.engine, *self.front("single"))
        self.enter_context(self.single)

    def front(self, name: str) -> tuple[str, ...]:
        """Return the flags of a server for clients."""
        (self.folder / name).mkdir(exist_ok=True)
        return "--tool-style", "hermes", "--data-dir", str(self.folder / name)


class Stage(ExitStack):
    """Replicas, and edges. Clients ask the first edge."""

    edges: list[Server]
    deaths: dict[str, Death]
    operations: dict[str, Callable[[], None]]
    """What an operator does under load; each returns when it is done."""

    def mend(self) -> None:
        """Start again what died, and wait until all are there."""
        raise NotImplementedError

    def busiest(self) -> str:
        """Return the replica that computes most, as the first edge knows it."""
        return max(running := self.running(), key=lambda name: running[name])

    def running(self) -> dict[str, float]:
        """Return how many requests each replica computes."""
        return self.gauges("weft_replica_requests_running", self.edges[0])

    @staticmethod
    def gauges(name: str, edge: Server) -> dict[str, float]:
        """Return a metric of every replica, as an edge knows it."""
        found = re.findall(rf'^{name}{{.*replica="([^"]+)".*}} (\S+)$', edge.get("/metrics").text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}


class HandStage(Stage):
    """Two replicas behind networks that can be cut, and two edges."""

    def __init__(self, setting: Setting, num_ranks: int = 1) -> None:
        super().__init__()
        self._setting = setting
        self._key = key_file(setting.folder)
        self._ranks = ("--tensor-parallel-size", str(num_ranks)) if num_ranks > 1 else ()
        try:
            self.replicas = [self.enter_context(self._replica()) for _ in range(2)]
            self.proxies = [self.enter_context(Proxy(one.port)) for one in self.replicas]
            self.edges = [self._edge(number) for number in range(1 if self._ranks else 2)]
        except BaseException:
            self.close()
            raise
        self.operations = {}
        self.deaths = (
            {
                "rank killed": Death(lambda: os.kill(self._rank_pid(), signal.SIGKILL), "restarts"),
                "rank stopped": Death(lambda: os.kill(self._rank_pid(), signal.SIGSTOP), "restarts"),
            }
            if self._ranks
            else {
                "engine killed": Death(lambda: os.kill(self._victim().engine_pid, signal.SIGKILL), "restarts"),
                "engine stopped": Death(lambda: os.kill(self._victim().engine_pid, signal.SIGSTOP), "restarts"),
                "replica killed": Death(lambda: self._victim().kill(), "moves"),
                "replica stopped": Death(lambda: self._victim().process.send_signal(signal.SIGSTOP), "moves"),
                "network reset": Death(lambda: self._network().reset(), "moves"),
                "network silent": Death(lambda: self._network().silence(), "moves"),
                "edge killed": Death(self._kill_edge, "breaks"),
            }
        )

    def mend(self) -> None:
        for number, replica in enumerate(self.replicas):
            if replica.process.poll() is not None:
                self.replicas[number] = self.enter_context(self._replica(port=replica.port))
            replica.process.send_signal(signal.SIGCONT)
        for proxy in self.proxies:
            proxy.resume()
        for number, edge in enumerate(self.edges):
            if edge.process.poll() is not None:
                self.edges[number] = self._edge(number)
        for edge in self.edges:
            assert isinstance(edge, Edge)
            edge.wait_connected(2)

    def _replica(self, port: int = 0) -> Replica:
        return Replica(self._setting.model, self._key, *self._setting.engine, *self._ranks, port=port)

    def _edge(self, number: int) -> Edge:
        flags = (*self._setting.engine, *self._setting.front(f"edge-{number}"))
        edge = Edge(self._setting.model, self._key, [proxy.address for proxy in self.proxies], *flags)
        self.enter_context(edge)
        edge.wait_connected(2)
        return edge

    def _number(self) -> int:
        return [proxy.address for proxy in self.proxies].index(self.busiest())

    def _victim(self) -> Replica:
        return self.replicas[self._number()]

    def _network(self) -> Proxy:
        return self.proxies[self._number()]

    def _rank_pid(self) -> int:
        return next(pid for pid in descendants(self._victim().process.pid) if is_rank(pid))

    def _kill_edge(self) -> None:
        self.edges[0].process.kill()
        self.edges[0].process.wait(PATIENCE)
