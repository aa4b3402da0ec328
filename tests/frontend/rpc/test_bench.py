"""The benchmark counts messages and tokens as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from weft.bench.rpc import RpcWork, run_rpc
from weft.config import load


def test_joining_saves_well_over_half_of_the_messages_and_no_text(tiny_model: Path) -> None:
    work = RpcWork(requests=6, concurrency=2, output_tokens=60)
    config = load({"model": str(tiny_model), "num_blocks": 64, "enable_prefix_caching": False}, env={})
    report = asyncio.run(run_rpc(config, work))
    assert report.same_text
    assert report.alone.tokens == report.joined.tokens <= 360
    # A last message for every answer; a token may end without text, within a character.
    assert report.alone.messages <= report.alone.tokens + 6
    assert report.fewer > 0.6
    assert report.fewer == 1 - report.joined.messages / report.alone.messages
