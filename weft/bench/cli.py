"""`weft bench`: measure this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from weft import config as configuration
from weft.bench.offline import OfflineReport, OfflineWork, num_runs, run_offline

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, add_completion=False)

_WORK = OfflineWork()


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,8,32") from error
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: every number must be at least 1")
    return numbers


@app.callback()
def bench() -> None:
    """Measure this machine."""


@app.command()
def offline(
    model: Annotated[str, typer.Argument(help="What `weft serve` takes.")] = "smollm2",
    batch_sizes: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,8,32",
    prompt_lengths: Annotated[str, typer.Option(help="Prompt tokens before a first token.")] = "128,512",
    requests: Annotated[int, typer.Option(min=1, help="Requests of the throughput line.")] = _WORK.requests,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = _WORK.input_tokens,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each.")] = _WORK.output_tokens,
    runs: Annotated[int, typer.Option(min=1, help="Each figure is the median of so many runs.")] = _WORK.runs,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = _WORK.seed,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Decode speed, time to the first token and throughput of one engine, without a server."""
    settings = configuration.load(
        {"model": model, "device": device, "dtype": dtype, "enable_prefix_caching": False}, file=config
    )
    work = OfflineWork(
        batch_sizes=_numbers(batch_sizes),
        prompt_lengths=_numbers(prompt_lengths),
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        runs=runs,
        seed=seed,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=num_runs(work))
        report = asyncio.run(
            run_offline(settings, work, lambda name: progress.update(task, advance=1, description=name))
        )
    Console().print(_table(report))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _table(report: OfflineReport) -> Table:
    table = Table(
        title=f"{report.model}, {report.dtype}, {report.device}",
        caption=f"start {report.startup_seconds:.1f} s, engine's peak memory {report.engine_peak_mib:.0f} MiB",
    )
    table.add_column("measured")
    table.add_column("median", justify="right")
    table.add_column("unit")
    table.add_column("spread", justify="right")
    for figure in report.figures:
        table.add_row(figure.name, f"{figure.value:,.1f}", figure.unit, f"{figure.spread:.1%}")
    return table
