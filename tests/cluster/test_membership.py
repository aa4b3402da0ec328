"""Addresses of replicas that the operator names."""

from __future__ import annotations

import asyncio

import pytest

from weft.cluster.membership import ReplicaAddress, static_membership
from weft.errors import ConfigError
from weft.options import ClusterOptions


def test_the_table_of_named_addresses() -> None:
    membership = static_membership(ClusterOptions(replica_addresses=["10.0.0.7:9400,host:1", "[fd00::7]:9400"]), b"")
    table = asyncio.run(anext(membership.tables()))  # type: ignore[arg-type]
    assert table.replicas == (
        ReplicaAddress("10.0.0.7:9400", "10.0.0.7", 9400),
        ReplicaAddress("host:1", "host", 1),
        ReplicaAddress("fd00::7:9400", "fd00::7", 9400),
    )


@pytest.mark.parametrize("text", ["host", "host:", ":9400", "host:0", "host:65536", "host:x", "host:²", "a:1,a:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="replica"):
        static_membership(ClusterOptions(replica_addresses=[text]), b"")
