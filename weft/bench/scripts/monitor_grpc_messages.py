"""Count the gRPC messages that answers take."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.bench.generator import run
from weft.bench.load_commands import end_by, write
from weft.bench.report import Judged
from weft.bench.scripts.load_test_grpc import measure_grpc, print_grpc
from weft.bench.scripts.subject import Duration, Engine, Grpc, MaxTokens, Model, Output, command, main

MIN_SAVED = 0.5


def monitor(
    duration: Duration = 60.0,
    model: Model = "",
    engine: Engine = "",
    address: Grpc = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at the same time.")] = 1,
    max_tokens: MaxTokens = 128,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    min_saved: Annotated[float, typer.Option(min=0, max=1, help="End with 1 where fewer are saved.")] = MIN_SAVED,
    output: Output = None,
) -> None:
    """Count the messages of answers for a while, against one for each token. The exit code is 1 unless half of them
    are saved."""
    report = run(measure_grpc(model, engine, address, concurrency, duration, "32", max_tokens, seed))
    print_grpc(report)
    write(report, output)
    # A last message for every answer has no text.
    texts, tokens = report.run.messages - report.run.succeeded, report.run.output_tokens
    saved = 1 - texts / tokens if tokens else 0.0
    good = not report.run.errors and saved >= min_saved
    end_by([Judged(name="messages saved, %", measured=100 * saved, bound=f"≥ {100 * min_saved:g} %", kept=good)])


app = command(monitor)

if __name__ == "__main__":
    main(app)
