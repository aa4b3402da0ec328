"""Measure the time to the first token of one request at a time."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.bench.generator import run
from weft.bench.load_commands import end_by, print_report, write
from weft.bench.report import Required
from weft.bench.scripts.benchmark_token_speed import measure_alone
from weft.bench.scripts.subject import Engine, Model, Output, Runs, Url, command, main
from weft.bench.serve import judge

MAX_TTFT_MS = 200.0
ANSWER_TOKENS = 8


def ttft(
    model: Model = "",
    engine: Engine = "",
    url: Url = "",
    prompt: Annotated[str, typer.Option(help="A prompt of one's own.", show_default="the standard prompts")] = "",
    runs: Runs = 5,
    seed: Annotated[int, typer.Option(help="Kept in the report.")] = 0,
    max_ttft_ms: Annotated[float, typer.Option(help="End with 1 unless the median is below this.")] = MAX_TTFT_MS,
    output: Output = None,
) -> None:
    """Measure the time to the first token, one request at a time. The exit code is 1 unless the median of it is below
    200 ms."""
    report = run(measure_alone(model, engine, url, prompt, ANSWER_TOKENS, runs, seed))
    print_report(report)
    write(report, output)
    if report.num_failures:
        raise typer.Exit(1)
    end_by(judge(report, Required(first_token_ms=max_ttft_ms)))


app = command(ttft)

if __name__ == "__main__":
    main(app)
