"""The process that speaks to Ray for an edge: `python -m weft.cluster.ray_agent FD`.

Ray ends a driver's process when it loses the head or the local raylet, so Ray never lives in the edge's own. The two
have a socket pair, and JSON lines on it: the edge says once what it wants (`Join`), and reads tables. When the socket
closes, the agent leaves the cluster and ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
import sys
import time
import uuid
from typing import Any

import msgspec
from msgspec.structs import replace

from weft.cluster.ray_messages import (
    AgentRefused,
    ClusterSpec,
    Connected,
    FromAgent,
    Join,
    Joined,
    Published,
    TableChanged,
)
from weft.errors import ConfigError, Unavailable, WeftError

log = logging.getLogger(__name__)

CONNECT_S = 10.0
CALL_S = 30.0
RETRY_S = 0.5
OBJECT_STORE_BYTES = 80 << 20
"""The object store of a local Ray: tokens do not go through it."""
INSTALL = "pip install 'weft-serve[ray]'"


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    code = asyncio.run(_serve(sock))
    # Without waiting for Ray's threads, which may wait for a head that is gone.
    sys.stderr.flush()
    os._exit(code)


async def _serve(sock: socket.socket) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=1 << 24)
    line = await reader.readline()
    if not line:
        return 0
    try:
        await _follow(msgspec.json.decode(line, type=Join), reader, writer)
    except WeftError as error:
        _tell(writer, AgentRefused(type(error).__name__, error.message, error.hint))
        await writer.drain()
        return 1
    return 0


async def _follow(join: Join, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # In the main thread: Ray sets signal handlers. Nothing else is to be done before.
    local = connect(join.address)
    import ray
    from ray.exceptions import RayActorError, RayError

    edge = uuid.uuid4().hex[:12]
    left = asyncio.create_task(reader.read(1))
    first_loss = last_loss = -math.inf
    while not left.done():
        try:
            await _read_tables(join, edge, left, writer, local=local)
        except RayActorError as error:
            now = time.monotonic()
            first_loss, last_loss = now if now - last_loss > CALL_S else first_loss, now
            if now - first_loss > CALL_S:
                raise Unavailable(f"The controller is lost: {_short(error)}.") from error
            await asyncio.sleep(RETRY_S)  # Ray starts it again
        except (RayError, TimeoutError) as error:
            raise Unavailable(f"Ray is lost: {_short(error)}.") from error
    if local:
        await asyncio.to_thread(ray.shutdown)


async def _read_tables(
    join: Join, edge: str, left: asyncio.Task[bytes], writer: asyncio.StreamWriter, *, local: bool
) -> None:
    """Join the cluster, and pass its tables on until the edge has left."""
    host = "127.0.0.1" if local else ""
    spec = replace(join.spec, replica=replace(join.spec.replica, host=host))
    controller = await asyncio.to_thread(_controller, join.cluster, spec)
    told = await asyncio.wait_for(_called(controller.join.remote(edge, msgspec.json.encode(join.spec))), CALL_S)
    joined = msgspec.json.decode(told, type=Joined)
    if joined.refusal:
        raise ConfigError(
            f"The cluster {join.cluster} is there already, and {joined.refusal}.",
            hint="Give this one another --cluster-name, or start it as the others were.",
        )
    _tell(writer, Connected(joined.key, local))
    known = 0
    while not left.done():
        polled = asyncio.ensure_future(_called(controller.next_table.remote(edge, known)))
        await asyncio.wait({polled, left}, timeout=CALL_S, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            break
        if not polled.done():
            raise Unavailable("The controller of the cluster does not answer.")
        published = msgspec.json.decode(polled.result(), type=Published)
        known = published.table.version
        _tell(writer, TableChanged(published.table, published.problem, published.unplaceable))
    leaving = controller.end.remote() if local else controller.leave.remote(edge)
    await asyncio.wait_for(_called(leaving), CALL_S)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _tell(writer: asyncio.StreamWriter, message: FromAgent) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")


async def _called(answer: Any) -> bytes:
    told: bytes = await answer
    return told


def _controller(cluster: str, spec: ClusterSpec) -> Any:
    """Find the controller of a cluster, or make it, with a key where there is none."""
    import ray

    from weft.cluster.ray_controller import ControllerActor, controller_options

    replica = spec.replica
    if replica.config.model.device == "auto" and ray.cluster_resources().get("GPU"):  # type: ignore[no-untyped-call]
        replica = replace(replica, num_gpus=replica.config.backend.tensor_parallel_size, memory_bytes=0)
    spec = replace(spec, replica=replace(replica, key=replica.key or secrets.token_hex(32)))
    return ray.remote(ControllerActor).options(**controller_options(cluster)).remote(cluster, msgspec.json.encode(spec))


def connect(address: str, *, may_start: bool = True) -> bool:
    """Connect this process to Ray: at the address, at RAY_ADDRESS, or at this machine's own, which is started where
    there is none. Return whether it was started. Raises ConfigError and Unavailable."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Replicas need Ray, which is not installed.", hint=f"{INSTALL} installs it.") from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    if "://" in address:
        raise ConfigError(
            f"--ray-address {address}: it is the address of a Ray client.",
            hint="Give the address of the head, as in 10.0.0.1:6379, on a machine that has joined with `ray start`.",
        )
    options: dict[str, Any] = {
        "namespace": "weft",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    if address != "auto":
        _check_listens(address)
    try:
        ray.init(address=address, **options)
        return False
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address != "auto" or not isinstance(error, ConnectionError):
            raise Unavailable(
                f"Ray at {address} cannot be joined: {' '.join(str(error).split())[:300]}",
                hint="`ray status` there tells how it is; `ray start --address HEAD:PORT` joins this machine.",
            ) from error
    if not may_start:
        raise Unavailable("No Ray cluster was found on this machine.", hint="--ray-address names one.")
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **options,
    )
    return True


def _check_listens(address: str) -> None:
    """Raise ConfigError where nothing listens at an address: Ray would try for a long time."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No Ray cluster answers at --ray-address {address}: {error}.",
            hint="It is the address of the head, as in 10.0.0.1:6379; `ray start --head` starts one.",
        ) from error


if __name__ == "__main__":
    main()
