"""The benchmark counts messages and tokens as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from weft.bench.rpc import RpcWork, run_rpc
from weft.config import load


def test_messages_and_tokens_are_counted_and_joining_loses_no_text(tiny_model: Path) -> None:
    work = RpcWork(requests=6, concurrency=2, output_tokens=60)
    config = load({"model": str(tiny_model), "num_blocks": 64, "enable_prefix_caching": False}, env={})
    report = asyncio.run(run_rpc(config, work))
    assert report.same_text
    assert report.alone.tokens == report.joined.tokens <= 360
    # A last message for every answer; a token may end without text, within a character. How many tokens wait for the
    # same message depends on the machine: what is saved is the benchmark's to say.
    for passage in (report.alone, report.joined):
        assert 6 <= passage.messages <= passage.tokens + 6
    assert report.fewer == 1 - report.joined.messages / report.alone.messages
