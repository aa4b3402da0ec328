"""What an edge costs beside direct serving: `python -m tests.cluster.edge_overhead MODEL`.

A server with an engine of its own, and an edge with one replica, answer the same requests in turns, at 1 and at many
connections; the other of the two is stopped (SIGSTOP) meanwhile, so that only one has the machine. It prints tokens a
second and the time to the first token of both, the medians over the turns, and how they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests.cluster.replicas import Edge, Replica, key_file
from tests.e2e.server import Server
from tests.e2e.tiny_server import NAME
from tests.processes import descendants

PATIENT = ("--heartbeat-timeout-s", "3600")


class Figures(Struct, frozen=True):
    tokens_per_s: float
    first_token_ms: float
    """The median over requests."""


@contextmanager
def running(process: int, others: list[int]) -> Iterator[None]:
    """Stop other processes and all below them meanwhile."""
    stopped = [pid for other in others for pid in (other, *descendants(other))]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


async def _one(client: httpx.AsyncClient, number: int, num_tokens: int) -> tuple[int, float]:
    body = {
        "model": NAME,
        "prompt": f"{number}: The weft runs across the warp, over and under, and",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                if '"usage":{' in line:
                    tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return tokens, first


async def measure(url: str, connections: int, requests: int, num_tokens: int) -> Figures:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=3600) as client:
        began = time.perf_counter()
        done = []
        free = asyncio.Semaphore(connections)

        async def ask(number: int) -> None:
            async with free:
                done.append(await _one(client, number, num_tokens))

        await asyncio.gather(*map(ask, range(requests)))
        seconds = time.perf_counter() - began
    return Figures(sum(tokens for tokens, _ in done) / seconds, 1000 * statistics.median(first for _, first in done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=0, help="of a turn; 0: twice the connections, 8 or more")
    asked = parser.parse_args()
    table = Table("connections", "", "tokens/s", "first token, ms")
    with (
        tempfile.TemporaryDirectory() as folder,
        Server("--model", str(asked.model), "--served-model-name", NAME, *PATIENT) as direct,
        Replica(asked.model, key_file(Path(folder)), *PATIENT, threads=0) as replica,
        Edge(asked.model, key_file(Path(folder)), [replica.address], *PATIENT) as edge,
    ):
        there = {"direct": (direct, [direct.process.pid]), "edge": (edge, [edge.process.pid, replica.process.pid])}
        for connections in asked.connections:
            requests = asked.requests or max(8, 2 * connections)
            turns: dict[str, list[Figures]] = {"direct": [], "edge": []}
            for _ in range(asked.turns + 1):
                for name, other in (("direct", "edge"), ("edge", "direct")):
                    server = there[name][0]
                    with running(server.process.pid, there[other][1]):
                        figures = asyncio.run(measure(server.url, connections, requests, asked.tokens))
                    turns[name].append(figures)
            # The first turn warms up.
            medians = {
                name: [statistics.median(getattr(one, field) for one in of[1:]) for field in Figures.__struct_fields__]
                for name, of in turns.items()
            }
            for name, (tokens, first) in medians.items():
                table.add_row(str(connections), name, f"{tokens:.1f}", f"{first:.2f}")
            fewer = 100 * (1 - medians["edge"][0] / medians["direct"][0])
            later = medians["edge"][1] - medians["direct"][1]
            table.add_row(str(connections), "the edge costs", f"{fewer:.1f} %", f"{later:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
