"""Measure tokens a second and the time to the first token, one request at a time, with the standard prompts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from weft.bench.arrivals import Load, Size
from weft.bench.datasets import DatasetSpec, standard_prompts
from weft.bench.generator import run
from weft.bench.load_commands import end_by, measured, print_report, write
from weft.bench.report import Judged, Required
from weft.bench.scripts.subject import Engine, MaxTokens, Model, Output, Runs, Url, command, main, subject
from weft.bench.serve import Point, ServeReport, ServeWork, judge

FAILS_BELOW = 40.0
"""Tokens a second, as the source's regression suite has it; its goal is 50."""
MAX_STD_DEV = 10.0
"""In per cent, as the source's baseline asks for."""


def token_speed(
    model: Model = "",
    engine: Engine = "",
    url: Url = "",
    prompt: Annotated[str, typer.Option(help="A prompt of one's own.", show_default="the standard prompts")] = "",
    max_tokens: MaxTokens = 256,
    runs: Runs = 3,
    no_warmup: Annotated[bool, typer.Option("--no-warmup", help="Measure from the first request on.")] = False,
    seed: Annotated[int, typer.Option(help="Kept in the report.")] = 0,
    min_tokens_per_s: Annotated[float, typer.Option(help="End with 1 below this.")] = FAILS_BELOW,
    max_std_dev: Annotated[
        float, typer.Option(help="End with 1 where the runs' standard deviation is above this, in % of their median.")
    ] = MAX_STD_DEV,
    output: Output = None,
) -> None:
    """Measure tokens a second and the time to the first token, one request at a time. Tokens are the server's own
    count. The exit code is 1 below 40 tokens a second; the goal is 50."""
    report = run(measure_alone(model, engine, url, prompt, max_tokens, runs, seed, warm_up=0 if no_warmup else 2))
    print_report(report)
    write(report, output)
    if report.num_failures:
        raise typer.Exit(1)
    deviation = 100 * report.std_dev / report.tokens_per_sec
    steady = Judged(
        name="standard deviation", measured=deviation, bound=f"≤ {max_std_dev:g} %", kept=deviation <= max_std_dev
    )
    end_by([*judge(report, Required(tokens_per_s=min_tokens_per_s)), steady])


async def measure_alone(
    model: str, engine: str, url: str, prompt: str, max_tokens: int, runs: int, seed: int, *, warm_up: int = 2
) -> ServeReport:
    """Measure one request at a time."""
    dataset = DatasetSpec(name="standard", output_tokens=Size(max_tokens, max_tokens))
    num_prompts = len(standard_prompts())
    with tempfile.TemporaryDirectory() as folder:
        if prompt:
            file = Path(folder) / "prompt.jsonl"
            messages = [{"role": "user", "content": prompt}]
            file.write_text(json.dumps({"messages": messages, "max_tokens": max_tokens}), encoding="utf-8")
            dataset, num_prompts = DatasetSpec(file=str(file)), 1
        point = Point(load=Load(connections=1, requests=num_prompts), dataset=dataset)
        work = ServeWork(points=(point,), runs=runs, seed=seed, warm_up=warm_up)
        async with subject(model=model, engine=engine, url=url) as found:
            [report] = await measured([found.target], work)
    return report


app = command(token_speed)

if __name__ == "__main__":
    main(app)
