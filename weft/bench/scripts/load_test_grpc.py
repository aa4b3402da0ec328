"""Put a server under the load of many gRPC streams for a while."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import Annotated

import typer
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from weft.bench.arrivals import Load, Size
from weft.bench.datasets import DatasetSpec, dialogues
from weft.bench.generator import Generator, Run, run
from weft.bench.grpc_load import GrpcClient, open_channel
from weft.bench.load_commands import end_by, write
from weft.bench.progress_line import progress
from weft.bench.report import Judged, environment
from weft.bench.scripts.subject import Duration, Engine, Grpc, MaxTokens, Model, Output, command, main, subject
from weft.errors import Unavailable

GOAL_REQUESTS_PER_S = 100.0


class GrpcLoadReport(Struct, frozen=True, kw_only=True):
    concurrency: int
    duration_s: float
    seed: int
    tokens_per_sec: float
    ttft_ms: float
    run: Run
    environment: dict[str, object]


def load_test(
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at the same time.")] = 100,
    duration: Duration = 60.0,
    model: Model = "",
    engine: Engine = "",
    address: Grpc = "",
    input_words: Annotated[str, typer.Option(help="Words of a prompt: 32, or 16-64.")] = "16",
    max_tokens: MaxTokens = 16,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    min_requests_per_s: Annotated[float, typer.Option(help="End with 1 below this.")] = GOAL_REQUESTS_PER_S,
    output: Output = None,
) -> None:
    """Keep many gRPC streams busy for a while. The exit code is 1 when one fails, or fewer than 100 requests a second
    are answered."""
    report = run(measure_grpc(model, engine, address, concurrency, duration, input_words, max_tokens, seed))
    print_grpc(report)
    write(report, output)
    kept = not report.run.errors
    failures = sum(report.run.errors.values())
    speed = report.run.requests_per_s
    end_by(
        [
            Judged(name=f"{concurrency} connections, failures", measured=failures, bound="0", kept=kept),
            Judged(
                name="requests a second",
                measured=speed,
                bound=f"≥ {min_requests_per_s:g}",
                kept=speed >= min_requests_per_s,
            ),
        ]
    )


async def measure_grpc(
    model: str, engine: str, address: str, concurrency: int, duration: float, words: str, max_tokens: int, seed: int
) -> GrpcLoadReport:
    dataset = DatasetSpec(input_tokens=Size.parse(words), output_tokens=Size(max_tokens, max_tokens))
    chance = random.Random(seed)
    async with (
        subject(model=model, engine=engine, url="", grpc_address=address) as found,
        AsyncExitStack() as stack,
    ):
        channel, *others = [
            await stack.enter_async_context(open_channel(found.grpc_address)) for _ in range(concurrency)
        ]
        generator = Generator(GrpcClient(channel, {}, others=others), dialogues(dataset, chance), chance)
        warmed_up = await generator.run(Load(requests=2, connections=1))
        if warmed_up.failures:
            raise Unavailable(f"The server does not answer as it should: {warmed_up.failures[0]}")
        with progress(0, "answers") as advance:
            measured = await generator.run(Load(seconds=duration, connections=concurrency), lambda: advance("answers"))
    return GrpcLoadReport(
        concurrency=concurrency,
        duration_s=duration,
        seed=seed,
        tokens_per_sec=measured.output_tokens_per_s,
        ttft_ms=measured.first_token_ms.p50,
        run=measured,
        environment=environment(),
    )


def print_grpc(report: GrpcLoadReport) -> None:
    measured = report.run
    table = Table(title=f"{report.concurrency} gRPC connections, {report.duration_s:g} s", show_header=False, box=None)
    table.add_row("answers", f"{measured.succeeded:,} ({measured.requests_per_s:,.1f} a second)")
    table.add_row("failures", ", ".join(f"{count} × {name}" for name, count in measured.errors.items()) or "none")
    table.add_row("tokens", f"{measured.output_tokens:,} ({measured.output_tokens_per_s:,.1f} a second)")
    table.add_row("messages", f"{measured.messages:,}, {measured.received_bytes:,} bytes")
    for name, times in (("first text", measured.first_token_ms), ("whole answer", measured.e2e_ms)):
        table.add_row(
            f"{name}, ms", f"p50 {times.p50:,.0f}, p90 {times.p90:,.0f}, p99 {times.p99:,.0f}, max {times.max:,.0f}"
        )
    Console().print(table)


app = command(load_test)

if __name__ == "__main__":
    main(app)
