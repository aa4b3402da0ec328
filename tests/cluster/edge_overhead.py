"""What an edge costs beside direct serving: `python -m tests.cluster.edge_overhead`, in about three minutes.

A server with an engine of its own, and an edge with one replica, answer the same requests in turns: at 1 connection
with the default model, or another that is named; at 256 connections with a scripted engine (tests/cluster/scripted.py),
which steps as a GPU would, in 8 ms and 0.05 ms for every request. 256 streams of a real model on a few cores would tell
of the cores alone. Told are the medians over rounds of tokens a second, the time to the first token over all requests
but each connection's first, and the CPU time that the api process (an edge's or a server's) and the replica's server
take for a token. What the edge costs is the median of the rounds' own differences.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests import tiny_models
from tests.cluster.raw_streams import StreamedAnswer, completion, connect_stream
from tests.cluster.replicas import Edge, Replica, ScriptedReplica, ScriptedServer, key_file
from tests.cluster.scripted import STEP_MS
from tests.e2e.server import Server
from tests.e2e.tiny_server import NAME
from tests.live_costs import cpu_seconds

PATIENT = ("--heartbeat-timeout-s", "3600", "--max-queued-requests", "4096")
MAX_ROUNDS = 40


class Load(Struct, frozen=True):
    """What every connection asks for in a round: so many requests, one after the other, of `tokens` tokens or up to
    `spread` more, so that the requests of many connections do not begin together."""

    connections: int
    requests: int
    tokens: int
    spread: int = 0


class Measured(Struct, frozen=True):
    """One way to serve in one round."""

    tokens_per_s: float
    first_ms: list[float]
    cpu_us: list[float]
    """CPU time for a token: of the process that clients talk to, and of the replica's where there is one."""


class Way(Struct, frozen=True):
    """One way to serve: where, and by which processes."""

    url: str
    pids: list[int]


async def measure(way: Way, load: Load, number: int) -> Measured:
    clients = await asyncio.gather(*(connect_stream(way.url) for _ in range(load.connections)))
    used, began = [cpu_seconds(pid) for pid in way.pids], time.perf_counter()

    async def ask(index: int) -> list[StreamedAnswer]:
        tokens = load.tokens + (index * 37) % load.spread if load.spread else load.tokens
        prompts = [f"{number}.{index}.{i}: The weft runs across the warp, and" for i in range(load.requests)]
        return [await clients[index].ask(completion(NAME, prompt, tokens)) for prompt in prompts]

    answers = await asyncio.gather(*map(ask, range(load.connections)))
    seconds = time.perf_counter() - began
    used = [cpu_seconds(pid) - before for pid, before in zip(way.pids, used, strict=True)]
    for client in clients:
        client.close()
    num_tokens = sum(answer.num_tokens for each in answers for answer in each)
    firsts = [1000 * answer.first_s for each in answers for answer in each[1:]]
    return Measured(num_tokens / seconds, firsts, [1e6 * each / num_tokens for each in used])


def rounds(direct: Way, edge: Way, load: Load, seconds: float) -> list[tuple[Measured, Measured]]:
    """Measure both by turns for so many seconds, each first in every second round. The first round warms up."""
    found: list[tuple[Measured, Measured]] = []
    deadline = time.monotonic() + seconds
    for number in range(MAX_ROUNDS):
        ways = [direct, edge] if number % 2 else [edge, direct]
        measured = [asyncio.run(measure(way, load, number)) for way in ways]
        found.append((measured[0], measured[1]) if number % 2 else (measured[1], measured[0]))
        if time.monotonic() > deadline and len(found) > 1:
            break
    return found[1:]


def add_rows(table: Table, engine: str, load: Load, found: list[tuple[Measured, Measured]]) -> None:
    firsts: list[list[float]] = []
    for index, name in enumerate(("direct", "edge")):
        ours = [pair[index] for pair in found]
        quantiles = statistics.quantiles([ms for one in ours for ms in one.first_ms], n=10)
        firsts.append([quantiles[4], quantiles[8]])
        cpu = [f"{statistics.median(each):.1f}" for each in zip(*(one.cpu_us for one in ours), strict=True)]
        speed = statistics.median(one.tokens_per_s for one in ours)
        table.add_row(str(load.connections), engine, name, f"{speed:.1f}", *(f"{ms:.2f}" for ms in firsts[-1]), *cpu)
    ratio = statistics.median(edge.tokens_per_s / direct.tokens_per_s for direct, edge in found)
    more = [f"{edge - direct:+.2f}" for direct, edge in zip(*firsts, strict=True)]
    cpu_us = statistics.median(sum(edge.cpu_us) - sum(direct.cpu_us) for direct, edge in found)
    rows = f"{len(found)} rounds"
    table.add_row(str(load.connections), rows, "difference", f"{100 * (ratio - 1):+.1f} %", *more, f"{cpu_us:+.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="for 1 connection; - leaves it out")
    parser.add_argument("--connections", type=int, default=256, help="of the scripted engine")
    parser.add_argument("--seconds", type=float, default=65, help="that each of the two is measured for")
    parser.add_argument("--step-ms", default="8,0.05", help="of the scripted engine: a step, and every request in it")
    asked = parser.parse_args()
    os.environ[STEP_MS] = asked.step_ms
    table = Table(
        "connections", "engine", "served", "tokens/s", "first token\np50, ms", "p90, ms",
        "CPU µs/token\nserver or edge", "replica", box=None, pad_edge=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        key = key_file(folder)
        if asked.model != "-":
            add_rows(table, asked.model, *_measured(stack, asked, Load(1, 4, 32), Server, Replica, asked.model, key))
            stack.close()
        tiny = str(tiny_models.save_directory("smollm2", folder / "tiny"))
        load = Load(asked.connections, 3, 32, 64)
        add_rows(table, "scripted", *_measured(stack, asked, load, ScriptedServer, ScriptedReplica, tiny, key))
        stack.close()
    Console(width=120).print(table)


def _measured(
    stack: ExitStack,
    asked: argparse.Namespace,
    load: Load,
    server: type[Server],
    of: type[Replica],
    model: str,
    key: Path,
) -> tuple[Load, list[tuple[Measured, Measured]]]:
    """Start both ways to serve a model, and measure them."""
    data = ("--data-dir", str(key.parent / "data"))
    direct = stack.enter_context(server("--model", model, "--served-model-name", NAME, *PATIENT, *data))
    replica = stack.enter_context(of(Path(model), key, *PATIENT, threads=0))
    edge = stack.enter_context(Edge(Path(model), key, [replica.address], *PATIENT, *data))
    ways = Way(direct.url, [direct.process.pid]), Way(edge.url, [edge.process.pid, replica.process.pid])
    return load, rounds(*ways, load, asked.seconds)


if __name__ == "__main__":
    main()
