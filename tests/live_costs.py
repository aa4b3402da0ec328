"""What the live view costs a server under load: python -m tests.live_costs.

The same streams run all the time. Windows without watchers, with one and with four take turns, so that what else the
machine does falls on all of them. Told is the CPU time of the api process and of the engine for each token generated.
With --streams 0 nothing else runs, and told is the share of a core that watching takes of each process.
With --alone: the same of the api process without HTTP, at its largest, the least of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
import timeit
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests import tiny_models
from tests.api.http import COMPLETIONS, PROMPT
from tests.api.scripted_engine import ScriptedEngine, forever
from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import until
from weft.api.app import admission_app
from weft.config import load
from weft.scheduler.block_pool import BlockPool
from weft.serving.admission import Admission
from weft.serving.live import MAX_BLOCKS_READ, MAX_ENDED_KEPT, MAX_OPEN_SHOWN, READ_S, LiveView
from weft.types import ControlMessage, Output

WATCHERS = (0, 1, 4, 8)


class Window(Struct, frozen=True):
    """What was used in a window of time."""

    seconds: float
    tokens: float
    api_s: float
    engine_s: float

    @property
    def per_token_us(self) -> float:
        return 1e6 * (self.api_s + self.engine_s) / self.tokens


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, of all its threads that live."""
    stats = [task / "schedstat" for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


async def stream_forever(client: httpx.AsyncClient, number: int) -> None:
    body = {"model": NAME, "prompt": f"{number} the cat", "max_tokens": 200, "ignore_eos": True, "stream": True}
    while True:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_raw():
                pass


@contextlib.asynccontextmanager
async def watched(client: httpx.AsyncClient, count: int) -> AsyncIterator[None]:
    """Watch so often, from the first snapshot on."""
    begun = [asyncio.Event() for _ in range(count)]

    async def watch(first: asyncio.Event) -> None:
        async with client.stream("GET", "/live") as response:
            async for _ in response.aiter_raw():
                first.set()

    tasks = [asyncio.create_task(watch(first)) for first in begun]
    try:
        for first in begun:
            await first.wait()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(server: TinyServer, *, streams: int, seconds: float, rounds: int) -> dict[int, list[Window]]:
    """Measure every number of watchers once a round."""
    found: dict[int, list[Window]] = {count: [] for count in WATCHERS}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
        loads = [asyncio.create_task(stream_forever(client, number)) for number in range(streams)]

        async def read() -> tuple[float, float, float, float]:
            text = (await client.get("/metrics")).text
            line = next(line for line in text.splitlines() if line.startswith("weft_generation_tokens_total"))
            pids = (server.process.pid, server.engine_pid())
            return (time.monotonic(), float(line.rpartition(" ")[2]), *map(cpu_seconds, pids))  # type: ignore[return-value]

        async with watched(client, 0):
            await asyncio.sleep(seconds / 4)  # the streams begin
        for _ in range(rounds):
            for count, windows in found.items():
                async with watched(client, count):
                    before = await read()
                    await asyncio.sleep(seconds)
                    after = await read()
                windows.append(Window(*(now - then for now, then in zip(after, before, strict=True))))
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    return found


def idle_table(found: dict[int, list[Window]]) -> Table:
    table = Table("watchers", "api process", "engine", box=None, pad_edge=False)
    for count, windows in found.items():
        api = statistics.median(window.api_s / window.seconds for window in windows)
        engine = statistics.median(window.engine_s / window.seconds for window in windows)
        table.add_row(str(count), f"{api:.3%} of a core", f"{engine:.3%} of a core")
    return table


def table_of(found: dict[int, list[Window]]) -> Table:
    """Show the medians of the windows, and how much more the server computes for a token than in the window without
    watchers just before."""
    table = Table("watchers", box=None, pad_edge=False)
    for name in ("tokens/s", "api µs/token", "engine µs/token", "both", "more"):
        table.add_column(name, justify="right")
    for count, windows in found.items():
        pairs = zip(windows, found[0], strict=True)
        table.add_row(
            str(count),
            f"{statistics.median(window.tokens / window.seconds for window in windows):.0f}",
            f"{statistics.median(1e6 * window.api_s / window.tokens for window in windows):.1f}",
            f"{statistics.median(1e6 * window.engine_s / window.tokens for window in windows):.1f}",
            f"{statistics.median(window.per_token_us for window in windows):.1f}",
            f"{statistics.median(now.per_token_us / base.per_token_us for now, base in pairs) - 1:+.2%}",
        )
    return table


class Waiting(ScriptedEngine):
    """An engine whose cache has sixty thousand blocks, as that of a large GPU, and whose requests do not end."""

    def __init__(self) -> None:
        super().__init__([Output(text="a", token_ids=[1], queue_seconds=0.1), forever])
        self.pool = BlockPool(60_000)
        self.pool.allocate(30_000)
        self._read: dict[ControlMessage, str] = {}

    async def control(self, message: ControlMessage) -> str:
        """Answer what was counted before: a real engine counts in another process."""
        if message not in self._read:
            self._read[message] = await super().control(message)
        return self._read[message]


def has_map(view: LiveView) -> bool:
    """Return whether every cell of the first model's map was read."""
    blocks = None if view._latest is None else view._latest.models[0].blocks
    return blocks is not None and blocks.cached_cells is not None


async def api_share(num_watchers: int, seconds: float) -> float:
    """Return the share of a core that watching takes of the api process, while as many requests are open and have
    ended as it shows."""
    engine = Waiting()
    admission = Admission(load(env={}))
    admission.open(engine)
    transport = httpx.ASGITransport(admission_app(admission))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        asked = [asyncio.create_task(client.post(COMPLETIONS, json=PROMPT)) for _ in range(MAX_OPEN_SHOWN)]
        await until(lambda: len(engine.open) == MAX_OPEN_SHOWN)
        timeline = admission.contexts()[0].timeline()
        assert timeline is not None
        for _ in range(MAX_ENDED_KEPT):
            admission._ended.add(timeline)

        async def watch() -> None:
            async for _ in admission.live.watch(""):
                pass

        watching = [asyncio.create_task(watch()) for _ in range(num_watchers)]
        if watching:
            await until(lambda: has_map(admission.live), "the whole map was read once")
        before = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        cpu_s, passed_s = time.process_time() - before[0], time.monotonic() - before[1]
        for task in (*asked, *watching):
            task.cancel()
        await asyncio.gather(*asked, *watching, return_exceptions=True)
    return cpu_s / passed_s


def engine_share() -> float:
    """Return the share of a core that an engine needs to read the largest part of its map, as often as it is read."""
    pool = Waiting().pool
    cells = MAX_BLOCKS_READ // 59
    best = min(timeit.repeat(lambda: msgspec.json.encode(pool.cells(0, cells, 59)), number=20, repeat=20)) / 20
    return best / READ_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--alone", action="store_true", help="measure what watching takes by itself, without a server")
    options = parser.parse_args()
    if options.alone:
        table = Table("watchers", "api process", "engine", box=None, pad_edge=False)
        engine = engine_share()
        for count in WATCHERS:
            share = min(asyncio.run(api_share(count, options.seconds)) for _ in range(options.rounds))
            table.add_row(str(count), f"{share:.3%} of a core", f"{engine if count else 0:.3%} of a core")
        Console().print(table)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.save_directory("smollm2", Path(folder) / "tiny")
        with TinyServer(model, "--data-dir", folder, "--threads", "1", is_fork=False) as server:
            found = asyncio.run(
                measure(server, streams=options.streams, seconds=options.seconds, rounds=options.rounds)
            )
    Console().print(table_of(found) if options.streams else idle_table(found))


if __name__ == "__main__":
    main()
