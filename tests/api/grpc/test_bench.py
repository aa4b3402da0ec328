"""The benchmark counts messages and tokens as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.server import Server
from weft.bench import rpc
from weft.bench.arrivals import Size
from weft.bench.datasets import DatasetSpec
from weft.bench.rpc import RpcWork, run_rpc


@asynccontextmanager
async def forked_server(flags: list[str], *, grpc_socket: str) -> AsyncIterator[tuple[str, float]]:
    """As `own_server`, which tests/bench/test_serve.py tries."""
    with await asyncio.to_thread(Server, *flags, "--grpc-socket", grpc_socket) as server:
        yield server.url, 0.0


def test_joining_saves_well_over_half_of_the_messages_and_no_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "own_server", forked_server)
    dataset = DatasetSpec(input_tokens=Size(6, 6), output_tokens=Size(60, 60))
    work = RpcWork(requests=6, concurrencies=(2,), dataset=dataset)
    # On a slow machine fewer tokens come within the usual time than a message holds.
    flags = ("--num-blocks", "64", "--max-model-len", "512", "--grpc-flush-interval-ms", "10000", "--device", "cpu")
    report = asyncio.run(run_rpc([str(tiny_model), *flags], work))
    [figures] = report.figures
    alone, joined = figures.alone, figures.joined
    assert report.num_failures == 0 and report.same_text and figures.same_text
    assert alone.output_tokens == joined.output_tokens <= 360
    # A last message for every answer; a token may end without text, within a character.
    assert 6 <= alone.messages <= alone.output_tokens + 6
    assert joined.messages < 0.4 * joined.output_tokens
    assert figures.fewer == 1 - joined.messages / alone.messages
