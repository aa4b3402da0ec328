"""A flooded queue, measured: python -m tests.flood [SECONDS].

Clients that ask again as soon as they are answered fill the server and its queue exactly; then ten times as many come,
of which those that are refused ask again after a pause, sooner than they are told to. How long those that are taken
wait must not depend on how many are refused: their p99 stays within twice what it was, in the median of the trials, and
the memory stays flat.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.e2e.server import Server
from tests.e2e.tiny_server import resident_mb
from weft.bench.http import Address, Connection

NUM_SEQS, NUM_QUEUED = 8, 8
TIMES = 10
NUM_TRIALS = 3
PAUSE_S = 0.2
MAX_RATIO, MAX_GROWTH_MB = 2.0, 32.0
BODY = {
    "model": "smollm2", "messages": [{"role": "user", "content": "Tell me about rivers."}], "temperature": 0,
    "max_tokens": 16, "ignore_eos": True,
}  # fmt: skip


class Round(Struct):
    """What a number of clients saw."""

    clients: int
    seconds: list[float] = []
    """How long each answer took."""
    refused: int = 0
    others: int = 0
    """Answers that were neither given nor refused."""

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.seconds, share))


async def ask_on(address: Address, seen: Round, end: float) -> None:
    connection = await Connection.open(address)
    request = address.request("POST", "/v1/chat/completions", json.dumps(BODY).encode())
    while time.monotonic() < end:
        began = time.monotonic()
        status = await connection.ask(request, lambda _: None)
        if status == 200:
            seen.seconds.append(time.monotonic() - began)
        elif status == 429:
            seen.refused += 1
            await asyncio.sleep(PAUSE_S)
        else:
            seen.others += 1
    connection.close()


async def played(address: Address, clients: int, seconds: float) -> Round:
    seen = Round(clients)
    end = time.monotonic() + seconds
    await asyncio.gather(*(ask_on(address, seen, end) for _ in range(clients)))
    return seen


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    console = Console()
    flags = ("--max-num-seqs", str(NUM_SEQS), "--max-queued-requests", str(NUM_QUEUED), "--max-concurrent-per-key", "0")
    rounds, memory = [], []
    with Progress(console=console, transient=True) as progress, Server(*flags) as server:
        task = progress.add_task("Asking", total=1 + 2 * NUM_TRIALS)
        address = Address.parse(server.url)
        for clients in (NUM_SEQS, *NUM_TRIALS * (NUM_SEQS + NUM_QUEUED, TIMES * (NUM_SEQS + NUM_QUEUED))):
            rounds.append(asyncio.run(played(address, clients, seconds)))
            memory.append(resident_mb(server.process.pid))
            progress.advance(task)
    table = Table("clients", "answered", "refused (429)", "other", "p50 s", "p99 s", "api process MB")
    for seen, megabytes in zip(rounds, memory, strict=True):
        figures = (seen.clients, len(seen.seconds), seen.refused, seen.others)
        waits = (seen.percentile(50), seen.percentile(99))
        table.add_row(*map(str, figures), *(f"{wait:.2f}" for wait in waits), f"{megabytes:.0f}")
    console.print(table)
    pairs = zip(rounds[1::2], rounds[2::2], strict=True)
    ratio = float(np.median([flooded.percentile(99) / full.percentile(99) for full, flooded in pairs]))
    growth = memory[-1] - memory[2]
    console.print(f"p99 of those that were taken: {ratio:.2f} times as long; {growth:+.0f} MB.")
    sys.exit(ratio > MAX_RATIO or growth > MAX_GROWTH_MB or any(seen.others for seen in rounds))


if __name__ == "__main__":
    main()
