"""The benchmark counts messages and tokens as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from weft.bench.rpc import RpcWork, run_rpc
from weft.config import load


def test_joining_saves_well_over_half_of_the_messages_and_no_text(tiny_model: Path) -> None:
    work = RpcWork(requests=6, concurrency=2, output_tokens=60)
    # On a slow machine fewer tokens come within the usual time than a message holds.
    flags = {"num_blocks": 64, "enable_prefix_caching": False, "grpc_flush_interval_ms": 10_000}
    report = asyncio.run(run_rpc(load({"model": str(tiny_model), **flags}, env={}), work))
    assert report.same_text
    assert report.alone.tokens == report.joined.tokens <= 360
    # A last message for every answer; a token may end without text, within a character.
    assert 6 <= report.alone.messages <= report.alone.tokens + 6
    assert report.joined.messages < 0.4 * report.joined.tokens
    assert report.fewer == 1 - report.joined.messages / report.alone.messages
