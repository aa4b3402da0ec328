"""A thousand streams through three edges, and a replica that dies: `python -m tests.cluster.thousand_streams`.

The edges are real (`weft serve --replica-addresses`), and so are the replicas, whose engines are scripts
(tests/cluster/scripted.py): what every stream must say is known. When all streams have begun, one replica is killed; no
stream gets its last tokens before. Told are the streams that broke, the tokens that were lost or repeated, how even the
requests were spread over replicas, how many moved, and the memory of the edges. It ends with 1 when a stream is not
what it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests import tiny_models
from tests.cluster.raw_streams import StreamedAnswer, completion, connect_stream
from tests.cluster.replicas import PATIENT, Edge, ScriptedReplica, key_file
from tests.cluster.scripted import HOLD, STEP_MS, letters_of
from tests.e2e.tiny_server import NAME, resident_mb
from weft.checkpoint.tokenizer_assets import text_assets
from weft.hub.resolve import resolve
from weft.text.tokenizer import Tokenizer

QUEUES = ("--max-queued-requests", "8192", "--max-queued-tokens", "10000000")


class Outcome(Struct, frozen=True):
    """What came of all streams."""

    broken: int
    """Streams that ended with an error, or without an end."""
    lost: int
    """Tokens that were missing."""
    repeated: int
    """Tokens that came twice, or that should not have come."""
    tokens: int
    seconds: float
    placed: dict[str, int]
    """Requests that were open at each replica when the first died."""
    moved: int
    edge_mb: list[tuple[float, float]]
    """Memory of each edge before the streams, and when all were open."""

    @property
    def is_right(self) -> bool:
        return not (self.broken or self.lost or self.repeated)


def expected_texts(model: Path, prompts: list[str], num_tokens: int) -> list[str]:
    tokenizer = Tokenizer.from_assets(text_assets(resolve(str(model))))
    return ["".join(itertools.islice(letters_of(tokenizer.encode(prompt)), num_tokens)) for prompt in prompts]


def compared(answer: StreamedAnswer, expected: str) -> tuple[int, int, int]:
    """Return whether a stream broke, and the tokens of it that were lost or that were too many."""
    try:
        text = answer.text()
    except AssertionError:
        return 1, 0, 0
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, expected, strict=False)))
    return 0, len(expected) - same, len(text) - same


class Cluster:
    """Edges and replicas, all connected. Streams of `num_tokens` tokens do not end before they are released."""

    def __init__(
        self, stack: ExitStack, model: Path, key: Path, *, num_edges: int, num_replicas: int, num_tokens: int
    ) -> None:
        flags = (*PATIENT, *QUEUES)
        self.num_tokens = num_tokens
        self._released = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "released"
        os.environ[HOLD] = f"{num_tokens * 3 // 4},{self._released}"
        stack.callback(os.environ.pop, HOLD)
        self.replicas = [stack.enter_context(ScriptedReplica(model, key, *flags)) for _ in range(num_replicas)]
        addresses = [one.address for one in self.replicas]
        self.edges = [Edge(model, key, addresses, *flags) for _ in range(num_edges)]
        for edge in self.edges:
            stack.enter_context(edge)
            edge.wait_connected(num_replicas)

    def release(self) -> None:
        self._released.touch()

    def running(self) -> dict[str, int]:
        """Return the requests in the steps of each replica, as the first edge knows."""
        pattern = r'^weft_replica_requests_running{.*replica="([^"]+)".*} (\S+)'
        return {
            name: int(float(value)) for name, value in re.findall(pattern, self.edges[0].get("/metrics").text, re.M)
        }

    def memory(self) -> list[float]:
        return [resident_mb(edge.process.pid) for edge in self.edges]

    def num_moved(self) -> int:
        return sum(int(edge.metric("weft_requests_moved_total")) for edge in self.edges)


async def run(cluster: Cluster, prompts: list[str], expected: list[str]) -> Outcome:
    """Stream all prompts through the edges in turn, and kill a replica when all are in replicas' steps."""
    urls = itertools.cycle([edge.url for edge in cluster.edges])
    clients = [await connect_stream(next(urls)) for _ in prompts]
    before, began = cluster.memory(), time.perf_counter()
    asking = [
        asyncio.create_task(client.ask(completion(NAME, prompt, cluster.num_tokens)))
        for client, prompt in zip(clients, prompts, strict=True)
    ]
    placed: dict[str, int] = {}
    # A stream that has ended by now is broken, and told of as such.
    while sum(placed.values()) < len(prompts) and not any(one.done() for one in asking):
        placed = await asyncio.to_thread(cluster.running)
    during = cluster.memory()
    await asyncio.to_thread(cluster.replicas[0].kill)
    cluster.release()
    answers = await asyncio.gather(*asking)
    seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    broken, lost, repeated = map(sum, zip(*map(compared, answers, expected), strict=True))
    tokens = sum(map(len, expected)) - lost
    moved = await asyncio.to_thread(cluster.num_moved)
    edge_mb = list(zip(before, during, strict=True))
    return Outcome(broken, lost, repeated, tokens, seconds, placed, moved, edge_mb)


def show(outcome: Outcome, num_streams: int) -> None:
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    placed = sorted(outcome.placed.values())
    mean = sum(placed) / len(placed)
    growth = [after - before for before, after in outcome.edge_mb]
    table.add_row("streams", f"{num_streams:,}")
    table.add_row("streams that broke", str(outcome.broken))
    table.add_row("tokens lost, repeated", f"{outcome.lost}, {outcome.repeated}")
    table.add_row("tokens", f"{outcome.tokens:,} in {outcome.seconds:.1f} s")
    table.add_row("streams of a replica", ", ".join(map(str, placed)) + f" (most/mean {placed[-1] / mean:.2f})")
    table.add_row("requests that moved", f"{outcome.moved:,}")
    table.add_row("memory of an edge", f"{max(after for _, after in outcome.edge_mb):.0f} MB with all streams open")
    table.add_row("", f"{1024 * max(growth) * len(growth) / num_streams:.0f} KB more for a stream")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--edges", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--step-ms", default="40,0.1", help="of a scripted engine: a step, and every request in it")
    asked = parser.parse_args()
    os.environ[STEP_MS] = asked.step_ms
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = tiny_models.save_directory("smollm2", folder / "tiny")
        prompts = [f"Stream {number} runs across the warp" for number in range(asked.streams)]
        expected = expected_texts(model, prompts, asked.tokens)
        sizes = {"num_edges": asked.edges, "num_replicas": asked.replicas, "num_tokens": asked.tokens}
        outcome = asyncio.run(run(Cluster(stack, model, key_file(folder), **sizes), prompts, expected))
    show(outcome, asked.streams)
    sys.exit(0 if outcome.is_right else 1)


if __name__ == "__main__":
    main()
