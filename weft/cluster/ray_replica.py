"""One replica on Ray: an actor that holds the place and the devices, and a process of its own that serves.

`python -m weft.cluster.ray_replica` is that process. It is no child of the actor's, because Ray ends a worker's
children and a worker ends with its raylet, while edges can go on with a replica whose raylet is lost. The two have a
socket pair: orders go down, and reports come up, one JSON object a line. When the actor has ended, the replica serves
on as long as an edge is connected: edges leave it when the controller tells them to, and where the head of the cluster
or the node's own raylet is lost, they do not. Workers may end seconds before their raylet does when the head is lost,
so a raylet that lives only bounds that time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import weft
from weft import logs
from weft.cluster.ray_messages import ReplicaSpec
from weft.cluster.replica_link import tls_context
from weft.cluster.replica_server import ReplicaServer, serve_replica
from weft.cluster.replica_set import ReplicaReport
from weft.errors import WeftError

log = logging.getLogger(__name__)

REPORT_S = 0.5
LEFT_S = 2.0
"""Seconds without an edge after which a replica without its actor ends, while the raylet lives."""
LOST_RAYLET_S = 30.0
"""Seconds in which a raylet that is ending has ended, once its worker has."""
LONELY_S = 15.0
"""Seconds without an edge after which a replica without a raylet ends."""
STOP_S = 10.0
MAX_LINE = 1 << 20
STOP = b"stop\n"


class _Order(Struct, frozen=True):
    """The first line to the process."""

    spec: ReplicaSpec
    raylet_pid: int
    host: str
    node: str


class ReplicaActor:
    """The actor: Ray gives it the devices, and it starts the process and tells how that stands."""

    def __init__(self, spec: bytes) -> None:
        import ray

        wanted = msgspec.json.decode(spec, type=ReplicaSpec)
        self._process = _Process(
            _Order(
                spec=wanted,
                raylet_pid=os.getppid(),
                host=wanted.host or ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
                node=ray.get_runtime_context().get_node_id()[:12],
            )
        )

    async def report(self) -> bytes:
        """Return the newest report. It has an error once the process has ended."""
        return msgspec.json.encode(msgspec.structs.replace(self._process.report, actor_pid=os.getpid()))

    async def stop(self) -> None:
        """End the process: open requests are the edges' to move."""
        await asyncio.to_thread(self._process.stop)


class _Process:
    """The actor's side of the process that serves."""

    def __init__(self, order: _Order) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # The one between ends at once, and leaves the process to nobody: see above.
            subprocess.run(
                [sys.executable, "-m", __name__, "detach", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=replica_environment(),
                start_new_session=True,
                check=True,
            )
        self.report = ReplicaReport(host=order.host, node=order.node)
        self._socket = ours
        self._lines = ours.makefile("rwb")
        self._lines.write(msgspec.json.encode(order) + b"\n")
        self._lines.flush()
        threading.Thread(target=self._read, name="weft-replica-reports", daemon=True).start()

    def stop(self) -> None:
        try:
            self._socket.sendall(STOP)
        except OSError as error:
            log.debug("The replica has gone: %s", error)
        deadline = time.monotonic() + STOP_S
        while not self.report.error and time.monotonic() < deadline:
            time.sleep(0.05)
        if not self.report.error and self.report.pid:
            os.kill(self.report.pid, signal.SIGKILL)

    def _read(self) -> None:
        error = "Its process ended."
        try:
            for line in self._lines:
                self.report = msgspec.json.decode(line, type=ReplicaReport)
                error = self.report.error or error
        except (OSError, msgspec.MsgspecError) as problem:
            error = f"Its process sent no report: {problem}."
        self.report = msgspec.structs.replace(self.report, port=0, error=error)


def replica_environment() -> dict[str, str]:
    """Return the environment of a replica's process: the node's own, where Python finds the Weft that runs here. Ray
    sets a number of threads for its workers, and Weft has a flag of its own for that."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    package = str(Path(weft.__file__).parents[1])
    rest = environment.get("PYTHONPATH", "")
    return environment | {"PYTHONPATH": os.pathsep.join([package, rest] if rest else [package])}


# The process's own side.


def main() -> None:
    what, number = sys.argv[1:]
    if what == "detach":
        os.set_inheritable(int(number), True)
        subprocess.Popen(
            [sys.executable, "-m", __name__ if __name__ != "__main__" else "weft.cluster.ray_replica", "serve", number],
            pass_fds=[int(number)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return
    asyncio.run(_serve(socket.socket(fileno=int(number))))


async def _serve(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE)
    order = msgspec.json.decode(await reader.readline(), type=_Order)
    config = order.spec.config
    logs.set_up(config.server.log_level, form=config.server.log_format)
    base = ReplicaReport(host=order.host, node=order.node, pid=os.getpid())
    _write(writer, base)
    try:
        tls = tls_context(config.cluster, is_server=True)
        server = await serve_replica(config, None, order.host, 0, key=order.spec.key.encode(), tls=tls)
    except WeftError as error:
        _write(writer, msgspec.structs.replace(base, error=" ".join((error.message, error.hint)).strip()))
        return
    reports = asyncio.create_task(_report_forever(server, base, writer))
    orders = asyncio.create_task(_until_useless(reader, server, order.raylet_pid))
    failed = asyncio.create_task(server.failed.wait())
    await asyncio.wait({orders, failed}, return_when=asyncio.FIRST_COMPLETED)
    reports.cancel()
    orders.cancel()
    if failed.done():
        _write(writer, msgspec.structs.replace(base, error="Its engine died too often and was given up."))
    failed.cancel()
    await server.close()


async def _report_forever(server: ReplicaServer, base: ReplicaReport, writer: asyncio.StreamWriter) -> None:
    while True:
        stats = server.client.stats()
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        _write(
            writer,
            msgspec.structs.replace(
                base,
                port=server.port,
                waiting=stats.waiting,
                running=stats.running,
                open_requests=stats.open_requests,
                kv_usage=usage,
                restarts=stats.restarts,
            ),
        )
        await asyncio.sleep(REPORT_S)


def _write(writer: asyncio.StreamWriter, report: ReplicaReport) -> None:
    if not writer.is_closing():
        writer.write(msgspec.json.encode(report) + b"\n")


async def _until_useless(reader: asyncio.StreamReader, server: ReplicaServer, raylet_pid: int) -> None:
    """Return when the replica should end: it was told to, or the actor has ended and no edge has been connected for a
    while, or the raylet outlives the actor, so that Ray can start another."""
    if await reader.readline() == STOP:
        return
    log.warning("The actor of this replica has ended. The replica serves on while edges are connected.")
    lonely_since = lost_at = time.monotonic()
    while (now := time.monotonic()) - lonely_since < (LEFT_S if _is_alive(raylet_pid) else LONELY_S):
        if now - lost_at > LOST_RAYLET_S and _is_alive(raylet_pid):
            return
        if server.num_edges:
            lonely_since = now
        await asyncio.sleep(REPORT_S)


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def actor_options(spec: ReplicaSpec) -> dict[str, Any]:
    """Return Ray's options for the actor of a replica. Replicas are on as many nodes as can be: a node that is lost
    takes few along."""
    options: dict[str, Any] = {
        "num_cpus": spec.num_cpus,
        "num_gpus": spec.num_gpus,
        "scheduling_strategy": "SPREAD",
    }
    return options | ({"memory": spec.memory_bytes} if spec.memory_bytes else {})


if __name__ == "__main__":
    main()
