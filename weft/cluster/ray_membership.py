"""The tables of a cluster on Ray, for an edge: it reads them from the agent, a process of its own, and starts another
agent when that has died. Meanwhile edges go on with the last table.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

import weft.errors
from weft.checkpoint.model_files import ModelFiles
from weft.cluster.membership import ReplicaTable
from weft.cluster.ray_messages import (
    AgentRefused,
    ClusterSpec,
    Connected,
    FromAgent,
    Join,
    ReplicaSpec,
    TableChanged,
)
from weft.cluster.replica_link import read_key
from weft.engine.client import engine_config
from weft.engine.process import names_a_secret
from weft.errors import ConfigError, Unavailable, WeftError
from weft.options import ClusterOptions, Config

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
CLOSE_S = 20.0
MAX_LINE = 1 << 24


async def open_ray_membership(config: Config, files: ModelFiles) -> RayMembership:
    """Join the cluster on Ray, wait until one of its replicas is ready, and return where tables come from. Raises what
    keeps replicas from starting."""
    membership = RayMembership(config, files)
    try:
        await membership.start(config.engine.start_timeout_s)
    except BaseException:
        await membership.close()
        raise
    return membership


def check_counts(options: ClusterOptions) -> tuple[int, int, int]:
    """Return how many replicas there should be: at least, to begin with, and at most. Raises ConfigError."""
    asked = options.replicas or options.min_replicas or 1
    least, most = options.min_replicas or asked, options.max_replicas or asked
    begin = options.replicas or least
    if not least <= begin <= most:
        raise ConfigError(
            f"--min-replicas {least}, --replicas {begin} and --max-replicas {most} do not go together.",
            hint="The number to begin with is between the other two.",
        )
    return least, begin, most


def cluster_spec(config: Config, files: ModelFiles) -> ClusterSpec:
    """Return what an edge asks of its cluster. The settings of a replica are those of an engine, and the files of TLS,
    which are at the same place on every node."""
    options = config.cluster
    least, begin, most = check_counts(options)
    tls = ClusterOptions(
        cluster_tls_cert=options.cluster_tls_cert,
        cluster_tls_key=options.cluster_tls_key,
        cluster_tls_ca=options.cluster_tls_ca,
    )
    is_on_gpu = config.model.device == "cuda"
    path = Path(config.model.model).expanduser()
    model = replace(config.model, model=str(path.absolute())) if path.exists() else config.model
    engine = engine_config(replace(config, model=model, backend=replace(config.backend, engine="native"), cluster=tls))
    return ClusterSpec(
        replica=ReplicaSpec(
            config=replace(
                engine, cluster=tls, server=replace(engine.server, otlp_endpoint=config.server.otlp_endpoint)
            ),
            key=read_key(options).decode() if options.cluster_key_file else "",
            num_cpus=max(1, config.model.threads),
            num_gpus=config.backend.tensor_parallel_size if is_on_gpu else 0,
            memory_bytes=0 if is_on_gpu else sum(file.stat().st_size for file in files.weight_files),
        ),
        min_replicas=least,
        replicas=begin,
        max_replicas=most,
        drain_timeout_s=config.server.drain_timeout_s,
    )


class RayMembership:
    def __init__(self, config: Config, files: ModelFiles) -> None:
        self._join = Join(config.cluster.cluster_name, config.cluster.ray_address, cluster_spec(config, files))
        self.key = self._joined_key = b""
        self._table: ReplicaTable | None = None
        self._changed = asyncio.Event()
        self._agent: _Agent | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Start the agent, and wait for a replica that is ready."""
        problem = ""
        try:
            async with asyncio.timeout(timeout_s):
                self._agent = await _Agent.launch(self._join)
                connected = await self._agent.read()
                if not isinstance(connected, Connected):
                    raise Unavailable("The Ray agent did not join the cluster.")
                self._joined_key = connected.key.encode()
                while self._table is None:
                    message = await self._agent.read()
                    self._take(message)
                    if isinstance(message, Connected):
                        continue  # the controller was started again
                    if message.problem and message.problem != problem:
                        log.warning("Replicas do not start: %s", message.problem)
                    problem = message.problem
                    if message.unplaceable and connected.local:
                        raise ConfigError(problem, hint="Ask for less (--threads, --tensor-parallel-size, --device).")
        except TimeoutError:
            raise Unavailable(
                f"No replica was ready after {timeout_s:.0f} s. {problem}".rstrip(),
                hint="`weft cluster status` tells more; --start-timeout-s gives it longer.",
            ) from None
        self._keeping = asyncio.create_task(self._keep(), name="weft-ray-membership")

    async def tables(self) -> AsyncIterator[ReplicaTable]:
        """Yield the newest table, whenever there is another."""
        known = -1
        while True:
            changed = self._changed
            if self._table is not None and self._table.version > known:
                known = self._table.version
                yield self._table
            else:
                await changed.wait()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._agent is not None:
            await self._agent.close()

    def _take(self, message: Connected | TableChanged) -> None:
        """Take in a table. One without a replica to use tells nothing that edges do not see, and may be that of a new
        cluster in the place of one that is lost, whose replicas serve on until the new ones are ready. Its key may be
        another, and is used with its first table."""
        if isinstance(message, Connected):
            self._joined_key = message.key.encode()
        elif any(replica.state in ("ready", "draining") for replica in message.table.replicas):
            self.key, self._table = self._joined_key, message.table
            self._changed.set()
            self._changed = asyncio.Event()

    async def _keep(self) -> None:
        """Read tables for ever, from one agent after another."""
        pause = FIRST_RETRY_S
        while True:
            try:
                if self._agent is None:
                    self._agent = await _Agent.launch(self._join)
                while True:
                    message = await self._agent.read()
                    self._take(message)
                    if isinstance(message, TableChanged):
                        pause = FIRST_RETRY_S
            except (WeftError, OSError) as error:
                log.error("Ray is lost: %s The edge goes on with the replicas that it knows.", error)
            if self._agent is not None:
                agent, self._agent = self._agent, None
                await agent.close()
            await asyncio.sleep(pause)
            pause = min(LAST_RETRY_S, 2 * pause)


class _Agent:
    """The edge's side of one agent process."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def launch(cls, join: Join) -> _Agent:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft.cluster.ray_agent", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=agent_environment(),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
        writer.write(msgspec.json.encode(join) + b"\n")
        return cls(process, reader, writer)

    async def read(self) -> Connected | TableChanged:
        """Wait for the next message. Raises the agent's error, and Unavailable when it is gone."""
        line = await self._reader.readline()
        if not line:
            raise Unavailable("The Ray agent ended.")
        message: FromAgent = msgspec.json.decode(line, type=FromAgent)
        if isinstance(message, AgentRefused):
            kind = getattr(weft.errors, message.kind, Unavailable)
            raise kind(message.message, hint=message.hint)
        return message

    async def close(self) -> None:
        """Let the agent leave the cluster, and end it."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def agent_environment() -> dict[str, str]:
    """Return the environment of the agent, and of a Ray that it starts: without this server's keys, and with the Weft
    that runs here."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("RAY_") or not names_a_secret(name)}
    package = str(Path(weft.__file__).parents[1])
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (package, kept.get("PYTHONPATH", ""))))}
