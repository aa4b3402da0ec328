"""Keep a server busy for an hour, and watch its memory and its files."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Annotated

import typer
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from weft.bench.arrivals import Load, Size
from weft.bench.datasets import DatasetSpec, dialogues
from weft.bench.generator import Generator, Run, run
from weft.bench.grpc_load import GrpcClient, open_channel
from weft.bench.http import Address
from weft.bench.http_load import HttpClient, first_models
from weft.bench.load_commands import end_by, write
from weft.bench.processes import open_files, own_mb, processes_below
from weft.bench.progress_line import progress
from weft.bench.report import Judged, environment
from weft.bench.scripts.subject import Duration, Engine, MaxTokens, Model, Output, command, main, subject
from weft.errors import Unavailable

SAMPLE_S = 5.0
MAX_MB_A_MINUTE = 1.0
SETTLES = 0.2
"""The share of the time in which caches may still fill; growth is measured behind it."""


class HeldMemory(Struct, frozen=True):
    """The memory that all processes of the server hold at a minute."""

    minute: float
    megabytes: float
    files: int


class StressReport(Struct, frozen=True, kw_only=True):
    duration_s: float
    concurrency: int
    seed: int
    tokens_per_sec: float
    ttft_ms: float
    http: Run
    grpc: Run
    samples: list[HeldMemory]
    mb_per_minute: float
    """The rise of the line through the samples, behind the time in which caches fill."""
    environment: dict[str, object]


def stress(
    duration: Duration = 3600.0,
    concurrency: Annotated[int, typer.Option(min=2, help="Requests at the same time, half of them over gRPC.")] = 8,
    model: Model = "",
    engine: Engine = "",
    input_words: Annotated[str, typer.Option(help="Words of a turn: 32, or 16-64.")] = "8-64",
    max_tokens: MaxTokens = 64,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    max_mb_per_minute: Annotated[float, typer.Option(help="End with 1 where memory grows faster.")] = MAX_MB_A_MINUTE,
    output: Output = None,
) -> None:
    """Keep a server of its own busy over HTTP and gRPC, and watch its memory and its files. The exit code is 1 when a
    request fails, or the memory grows."""
    report = run(_stressed(model, engine, duration, concurrency, Size.parse(input_words), max_tokens, seed))
    table = Table(title=f"{concurrency} requests at once for {duration:g} s", show_header=False, box=None)
    first, last = report.samples[0], report.samples[-1]
    table.add_row("answers", f"{report.http.succeeded:,} over HTTP, {report.grpc.succeeded:,} over gRPC")
    table.add_row("tokens a second", f"{report.tokens_per_sec:,.1f}")
    table.add_row("memory, MB", f"{first.megabytes:,.0f} → {last.megabytes:,.0f}")
    table.add_row("open files", f"{first.files} → {last.files}")
    Console().print(table)
    write(report, output)
    failures = sum(report.http.errors.values()) + sum(report.grpc.errors.values())
    growth = report.mb_per_minute
    end_by(
        [
            Judged(name="failures", measured=failures, bound="0", kept=not failures),
            Judged(
                name="memory, MB a minute",
                measured=growth,
                bound=f"≤ {max_mb_per_minute:g}",
                kept=growth <= max_mb_per_minute,
            ),
        ]
    )


async def _stressed(
    model: str, engine: str, duration: float, concurrency: int, words: Size, max_tokens: int, seed: int
) -> StressReport:
    chance = random.Random(seed)
    dataset = DatasetSpec(name="multi-turn", num_turns=2, input_tokens=words, output_tokens=Size(1, max_tokens))
    async with (
        subject(model=model, engine=engine) as found,
        open_channel(found.grpc_address) as channel,
    ):
        address = Address.parse(found.target.url)
        rpc = GrpcClient(channel, {})
        http = HttpClient(address, (await first_models(address))[0], {})
        for client in (http, rpc):
            [answer, *_] = await client.converse(next(dialogues(dataset, chance)))
            if answer.error:
                raise Unavailable(f"The server does not answer as it should: {answer.reason}")
        watch = Watch()
        half = Load(seconds=duration, connections=concurrency // 2)
        with progress(0, "answers") as advance:
            over_http, over_grpc = await asyncio.gather(
                Generator(http, dialogues(dataset, chance), chance).run(half, lambda: advance("over HTTP")),
                Generator(rpc, dialogues(dataset, chance), chance).run(half, lambda: advance("over gRPC")),
            )
        samples = watch.end()
        await http.close()
    return StressReport(
        duration_s=duration,
        concurrency=concurrency,
        seed=seed,
        tokens_per_sec=over_http.output_tokens_per_s + over_grpc.output_tokens_per_s,
        ttft_ms=over_http.first_token_ms.p50,
        http=over_http,
        grpc=over_grpc,
        samples=samples,
        mb_per_minute=rise([each for each in samples if each.minute >= SETTLES * samples[-1].minute]),
        environment=environment(),
    )


class Watch:
    """Samples of what all processes of the server hold, one every few seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.samples: list[HeldMemory] = []
        self._task = asyncio.create_task(self._watch())

    def end(self) -> list[HeldMemory]:
        self._task.cancel()
        self._add()
        return self.samples

    async def _watch(self) -> None:
        while True:
            self._add()
            await asyncio.sleep(SAMPLE_S)

    def _add(self) -> None:
        processes = list(processes_below(os.getpid()))
        minute = (time.monotonic() - self._began) / 60
        self.samples.append(HeldMemory(minute, sum(map(own_mb, processes)), sum(map(open_files, processes))))


def rise(samples: list[HeldMemory]) -> float:
    """Return the slope of the line through the samples, by least squares; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    mean_x = sum(each.minute for each in samples) / len(samples)
    mean_y = sum(each.megabytes for each in samples) / len(samples)
    spread = sum((each.minute - mean_x) ** 2 for each in samples)
    return sum((each.minute - mean_x) * (each.megabytes - mean_y) for each in samples) / spread if spread else 0.0


app = command(stress)

if __name__ == "__main__":
    main(app)
