"""What a user of the default model feels on this machine: seconds to the first answer, memory, and waits for others.

    python -m tests.e2e.serve_figures --rounds 3

In each round a server is started and asked for one answer. Then a stream runs while a prompt of 6,000 tokens is
computed, and a request for one token comes behind that. Figures are the medians, those of the waits the worst.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from pathlib import Path

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests.e2e.server import Server
from tests.waiting import until

PROMPT = 6000
HEAD_START = 20
"""Tokens of the stream before the long prompt is sent."""
VOCABULARY = 40_000


class Felt(Struct, frozen=True):
    """The figures of one round, seconds and MiB."""

    first_answer: float
    memory: float
    largest_gap: float
    one_token: float
    whole_prompt: float


def proportional_mib(pids: list[int]) -> float:
    """Return the memory of processes; what several of them share is counted once."""
    rollups = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(found[1]) for text in rollups if (found := re.search(r"^Pss:\s+(\d+) kB", text, re.M))) / 1024


def body(num_tokens: int, seed: int, max_tokens: int) -> dict[str, object]:
    tokens = random.Random(seed).choices(range(100, VOCABULARY), k=num_tokens)
    return {"model": "smollm2", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def waits(url: str) -> tuple[float, float, float]:
    """Return the stream's largest gap, and the times of the one-token request and of the long prompt."""
    arrivals: list[float] = []
    began = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def stream() -> None:
            asked = body(16, 1, 1500) | {"stream": True}
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        arrivals.append(time.perf_counter())
                        if len(arrivals) == HEAD_START:
                            began.set()

        async def one(num_tokens: int, seed: int) -> float:
            asked = time.perf_counter()
            (await client.post("/v1/completions", json=body(num_tokens, seed, 1))).raise_for_status()
            return time.perf_counter() - asked

        streaming = asyncio.create_task(stream())
        await began.wait()
        first = len(arrivals)
        long = asyncio.create_task(one(PROMPT, 2))
        # Steps with a part of the long prompt are under way.
        await until(lambda: len(arrivals) > first + 2)
        shorts = []
        while not long.done():
            shorts.append(await one(8, 3 + len(shorts)))
        whole = await long
        gaps = [after - before for before, after in zip(arrivals[first - 1 :], arrivals[first:], strict=False)]
        streaming.cancel()
        return max(gaps), max(shorts), whole


def measure(flags: list[str]) -> Felt:
    began = time.perf_counter()
    with Server(*flags) as server:
        asked = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=300).raise_for_status()
        first_answer = time.perf_counter() - began
        memory = proportional_mib([server.process.pid, *server.children()])
        return Felt(first_answer, memory, *asyncio.run(waits(server.url)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments, flags = parser.parse_known_args()
    rounds = [measure(flags) for _ in range(arguments.rounds)]
    table = Table("default model on this CPU", "figure", "all rounds")
    for name, of, field, places in (
        ("start to the first answer, s", statistics.median, "first_answer", 2),
        ("memory of all processes after it, MiB", statistics.median, "memory", 0),
        (f"largest gap of a stream beside {PROMPT:,} tokens, s", max, "largest_gap", 3),
        (f"one token asked for behind {PROMPT:,}, worst, s", max, "one_token", 3),
        (f"the {PROMPT:,} tokens themselves, s", statistics.median, "whole_prompt", 1),
    ):
        values = [getattr(one, field) for one in rounds]
        table.add_row(name, f"{of(values):,.{places}f}", ", ".join(f"{value:,.{places}f}" for value in values))
    Console().print(table)


if __name__ == "__main__":
    main()
