"""The messages of a cluster on Ray: what edges ask for, and what they are told. All of them are JSON on their way."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from weft.cluster.membership import ReplicaTable
from weft.options import Config, ServerOptions


class ReplicaSpec(Struct, frozen=True, kw_only=True):
    """Everything that a replica needs to know. It goes through Ray as JSON."""

    config: Config
    key: str
    """The key of the cluster, by which edges and replicas know each other."""
    host: str = ""
    """The address where it listens; empty: that of its node."""
    num_cpus: float = 1
    num_gpus: int = 0
    """GPUs of one replica, one for each of its ranks: Ray finds them on one node."""
    memory_bytes: int = 0
    """Main memory that is reserved for it; 0: none is."""

    @property
    def asked(self) -> dict[str, float]:
        """The resources of one replica, by Ray's names."""
        asked = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus), "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in asked.items() if amount}


class ClusterSpec(Struct, frozen=True, kw_only=True):
    """A cluster as an edge wants it."""

    replica: ReplicaSpec
    min_replicas: int = 1
    replicas: int = 1
    """Replicas to begin with."""
    max_replicas: int = 1
    drain_timeout_s: float = 30.0

    @property
    def digest(self) -> str:
        """The digest of what edges of one cluster must agree on: all but how they log."""
        agreed = msgspec.structs.replace(self.replica.config, server=ServerOptions())
        return hashlib.sha256(msgspec.json.encode(agreed)).hexdigest()


class Joined(Struct, frozen=True):
    """The answer to an edge that joins: the key, or why it may not."""

    key: str = ""
    refusal: str = ""


class Published(Struct, frozen=True):
    """A table, and what keeps replicas from starting, if anything does."""

    table: ReplicaTable
    problem: str = ""
    unplaceable: bool = False
    """True when no node that there is could ever hold a replica."""


class MemberStatus(Struct, frozen=True, kw_only=True):
    """One line of `weft cluster status`."""

    id: str
    state: str
    node: str
    address: str
    running: int
    waiting: int
    open_requests: int
    kv_usage: float
    engine_restarts: int
    pid: int
    """The process that serves."""
    actor_pid: int


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """A cluster, as `weft cluster status` shows it."""

    name: str
    model: str
    version: int
    target: int
    min_replicas: int
    max_replicas: int
    edges: int
    problem: str
    pid: int
    """The process of the controller."""
    replicas: list[MemberStatus]


class Join(Struct, frozen=True):
    """The edge's first and only message."""

    cluster: str
    address: str
    spec: ClusterSpec


class Connected(Struct, frozen=True, tag=True):
    """The agent has joined the cluster."""

    key: str
    local: bool
    """True when the agent has started Ray itself: no other node will come."""


class TableChanged(Struct, frozen=True, tag=True):
    table: ReplicaTable
    problem: str = ""
    unplaceable: bool = False


class AgentRefused(Struct, frozen=True, tag=True):
    """The agent cannot go on. `kind` is the name of one of Weft's errors."""

    kind: str
    message: str
    hint: str = ""


FromAgent = Connected | TableChanged | AgentRefused
