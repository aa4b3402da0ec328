"""Membership tells an edge which replicas there are, by tables of their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal, Protocol

from msgspec import Struct

from weft.errors import ConfigError
from weft.options import ClusterOptions

ReplicaState = Literal["starting", "ready", "draining", "dead"]
"""An edge connects to replicas that are ready or draining, and sends new requests to ready ones alone."""

MAX_REPLICAS = 10_000
"""Replicas that an edge takes from its flags: each is a connection."""


class ReplicaAddress(Struct, frozen=True):
    """One replica, and where edges reach it."""

    id: str
    host: str
    port: int
    node: str = ""
    """The machine that it is on, as its manager calls it; empty: unknown."""
    state: ReplicaState = "ready"


class ReplicaTable(Struct, frozen=True):
    """The table of all replicas at one moment. A later one has a higher version."""

    version: int
    replicas: tuple[ReplicaAddress, ...]


class Membership(Protocol):
    """The source of an edge's tables."""

    key: bytes
    """The key of the replicas of the newest table."""

    def tables(self) -> AsyncIterator[ReplicaTable]:
        """Yield the table as it is now, and another whenever it changes. Where the source is gone, nothing comes any
        more, and edges go on with the last one."""

    async def close(self) -> None: ...


class StaticMembership:
    """The replicas that the operator named: a table that does not change."""

    def __init__(self, addresses: list[str], key: bytes) -> None:
        self.key = key
        self._table = ReplicaTable(1, tuple(map(address_of, addresses)))
        if len({replica.id for replica in self._table.replicas}) < len(addresses):
            raise ConfigError("--replica-addresses names a replica twice.", hint="Name each host:port once.")
        if len(addresses) > MAX_REPLICAS:
            raise ConfigError(
                f"--replica-addresses names {len(addresses)} replicas; at most {MAX_REPLICAS} can be used."
            )

    async def tables(self) -> AsyncIterator[ReplicaTable]:
        yield self._table
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


def address_of(text: str) -> ReplicaAddress:
    """Return the replica at host:port, or at [address]:port of IPv6. Raises ConfigError."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{text!r:.200} is no address of a replica.", hint="As in 10.0.0.7:9400 or [fd00::7]:9400.")
    return ReplicaAddress(f"{host}:{int(port)}", host, int(port))


def static_membership(options: ClusterOptions, key: bytes) -> StaticMembership:
    """Return the membership of --replica-addresses, which may be repeated or hold several with commas between."""
    return StaticMembership([one for text in options.replica_addresses for one in text.split(",") if one.strip()], key)
