"""The commands of `weft bench` that put servers under load: serve, and compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from weft.bench.arrivals import Arrival, Load, Size
from weft.bench.compare import ComparedFigure, compare, judged_worse, read_report
from weft.bench.datasets import DatasetName, DatasetSpec
from weft.bench.generator import Cancellations, Slo, run
from weft.bench.html_report import html_report
from weft.bench.progress_line import progress
from weft.bench.report import Judged, Required
from weft.bench.serve import (
    DEFAULT_POINTS,
    Point,
    PointFigures,
    ServeReport,
    ServeWork,
    Target,
    judge,
    own_server,
    run_serve,
)
from weft.errors import ConfigError

_WORK = ServeWork()
_DATASET = DatasetSpec()
DEFAULT_WORK = ",".join(map(str, DEFAULT_POINTS))
CLIENT_AT_ITS_LIMIT = 0.9
"""A client that computes for more than this share of the time may be what was measured."""

LOAD, DATA, ASKING, REPORT = "Load", "Dataset", "Requests", "Report"

Work = Annotated[
    str,
    typer.Option(
        rich_help_panel=LOAD,
        help="Closed loops: connections x requests : prompt tokens : output tokens, several with commas.",
        show_default=DEFAULT_WORK,
    ),
]
Rate = Annotated[
    str,
    typer.Option(
        rich_help_panel=LOAD,
        help="Open loops: requests a second, several with commas; 2-16 rises from 2 to 16 within a run.",
    ),
]
Arrivals = Annotated[Arrival, typer.Option("--arrival", rich_help_panel=LOAD, help="How they come at a rate.")]
Concurrency = Annotated[
    str,
    typer.Option(
        rich_help_panel=LOAD,
        help="Connections of a closed loop, several with commas; with --rate, the most requests that are open.",
    ),
]
Requests = Annotated[
    int, typer.Option(min=1, rich_help_panel=LOAD, help="Requests of a run, with --rate or --concurrency.")
]
Runs = Annotated[int, typer.Option(min=1, rich_help_panel=LOAD, help="Each figure is the median of so many runs.")]
WarmUp = Annotated[int, typer.Option(min=0, rich_help_panel=LOAD, help="Requests before anything is measured.")]
Seed = Annotated[int, typer.Option(rich_help_panel=LOAD, help="Seed of prompts and arrivals.")]
Dataset = Annotated[
    DatasetName,
    typer.Option(
        "--dataset",
        rich_help_panel=DATA,
        help="random: token ids. chat: log-normal lengths. prefix: prompts that share their beginnings. multi-turn: "
        "dialogues. long: 16,000 token ids. images: /v1/images/generations. standard: three fixed prompts.",
    ),
]
DatasetFile = Annotated[
    Path | None,
    typer.Option(rich_help_panel=DATA, exists=True, help="Lines of JSON with prompt or messages, and max_tokens."),
]
InputTokens = Annotated[
    str,
    typer.Option(rich_help_panel=DATA, help="Prompt tokens, or words of a turn: 128, or 64-256.", show_default="128"),
]
OutputTokens = Annotated[
    str, typer.Option(rich_help_panel=DATA, help="Output tokens: 256, or 64-256.", show_default="256")
]
PrefixTokens = Annotated[int, typer.Option(min=1, rich_help_panel=DATA, help="Tokens that a group of prompts shares.")]
PrefixGroups = Annotated[int, typer.Option(min=1, rich_help_panel=DATA, help="Groups of prompts.")]
Turns = Annotated[int, typer.Option(min=1, rich_help_panel=DATA, help="Turns of a conversation.")]
Vocabulary = Annotated[
    int, typer.Option(min=11, rich_help_panel=DATA, help="Prompts are made of token ids below this.")
]
ImageSize = Annotated[str, typer.Option(rich_help_panel=DATA, help="Such as 512x512.", show_default="the model's own")]
ImageSteps = Annotated[int, typer.Option(min=0, rich_help_panel=DATA, help="Denoise steps; 0: the model's own.")]
Temperature = Annotated[float, typer.Option(min=0, rich_help_panel=ASKING, help="0: greedy.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, rich_help_panel=ASKING, help="Nucleus sampling.")]
Logprobs = Annotated[int | None, typer.Option(min=0, rich_help_panel=ASKING, help="Log probabilities of each token.")]
SchemaFile = Annotated[
    Path | None, typer.Option("--schema", exists=True, rich_help_panel=ASKING, help="A JSON schema that answers fit.")
]
Cancel = Annotated[float, typer.Option(min=0, max=1, rich_help_panel=ASKING, help="The share of clients that leave.")]
SloText = Annotated[
    str, typer.Option("--slo", rich_help_panel=ASKING, help="What counts as good, in ms: ttft:200,itl:50,e2e:5000.")
]
Key = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=ASKING, help="The key to show, if the server wants one.")
]
RequiredFirstToken = Annotated[
    float | None,
    typer.Option("--require-first-token-ms", rich_help_panel=REPORT, help="End with 1 unless a first token is sooner."),
]
RequiredSpeed = Annotated[
    float | None,
    typer.Option("--require-tokens-per-s", rich_help_panel=REPORT, help="End with 1 where there are fewer."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", rich_help_panel=REPORT, help="Write the report to this file.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", rich_help_panel=REPORT, help="Write a report with plots, in one file.")
]

Tolerance = Annotated[
    float, typer.Option(min=0, rich_help_panel=REPORT, help="Of a comparison: a difference of this share is none.")
]

LONG_PROMPT = "16000"


def is_url(text: str) -> bool:
    return "://" in text


def points_of(
    *, work: str, rate: str, concurrency: str, requests: int, arrival: Arrival, dataset: DatasetSpec
) -> tuple[Point, ...]:
    """Return the points that the flags mean. Raises ConfigError."""
    if work and (rate or concurrency):
        raise ConfigError("--work says connections and requests itself.", hint="Give it, or --rate and --concurrency.")
    has_usual_sizes = dataset == replace(_DATASET, vocabulary=dataset.vocabulary)
    if not rate and not concurrency:
        if work or has_usual_sizes:
            return tuple(Point.parse(text, dataset) for text in (work or DEFAULT_WORK).split(","))
        concurrency = "1,8,32"
    open_at_most = [_number(text) for text in concurrency.split(",")] if concurrency else [0]
    if not rate:
        loads = [Load(requests=requests, connections=count) for count in open_at_most]
    else:
        ramps = [_ramp(text) for text in rate.split(",")]
        loads = [
            Load(requests=requests, connections=count, rate=begin, rate_at_end=end, arrival=arrival)
            for begin, end in ramps
            for count in open_at_most
        ]
    return tuple(Point(load=load, dataset=dataset) for load in loads)


def _number(text: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise ConfigError(f"{text!r} is not a number of connections.", hint="Write 8, or 1,8,32 to measure each.")
    return int(text)


def _ramp(text: str) -> tuple[float, float]:
    begin, _, end = text.partition("-")
    try:
        rates = float(begin), float(end) if end else 0.0
    except ValueError:
        rates = 0.0, 0.0
    if not rates[0] > 0 or rates[1] < 0:
        raise ConfigError(f"{text!r} is not a rate.", hint="Write 4 for four requests a second, or 2-16 for a ramp.")
    return rates


def options_of(
    *, temperature: float, top_p: float | None, logprobs: int | None, schema: Path | None, chats: bool
) -> dict[str, Any]:
    """Return the fields of sampling and form, as the endpoint of the dataset calls them."""
    options: dict[str, Any] = {"temperature": temperature}
    if top_p is not None:
        options["top_p"] = top_p
    if logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": logprobs} if chats else {"logprobs": logprobs}
    if schema is not None:
        try:
            read = msgspec.json.decode(schema.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{schema} is not valid JSON: {error}.") from error
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": read}}
    return options


def serve(
    context: typer.Context,
    server: Annotated[str, typer.Argument(help="The address of a server, or what `weft serve` takes.")] = "",
    url: Annotated[str, typer.Option(help="A server that runs already, such as http://127.0.0.1:8000.")] = "",
    work: Work = "",
    rate: Rate = "",
    arrival: Arrivals = "poisson",
    concurrency: Concurrency = "",
    requests: Requests = 64,
    runs: Runs = _WORK.runs,
    warm_up: WarmUp = _WORK.warm_up,
    seed: Seed = _WORK.seed,
    dataset: Dataset = _DATASET.name,
    dataset_file: DatasetFile = None,
    input_tokens: InputTokens = "",
    output_tokens: OutputTokens = "",
    prefix_tokens: PrefixTokens = _DATASET.prefix_tokens,
    prefix_groups: PrefixGroups = _DATASET.groups,
    turns: Turns = _DATASET.num_turns,
    vocabulary: Vocabulary = _DATASET.vocabulary,
    image_size: ImageSize = "",
    image_steps: ImageSteps = 0,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    logprobs: Logprobs = None,
    schema: SchemaFile = None,
    cancel: Cancel = 0.0,
    slo: SloText = "",
    key: Key = "",
    model: Annotated[str, typer.Option(rich_help_panel=ASKING, help="A model of the server, if not its first.")] = "",
    against: Annotated[
        str, typer.Option(rich_help_panel=REPORT, help="Another server, measured in turns with the first and compared.")
    ] = "",
    tolerance: Tolerance = 0.02,
    require_first_token_ms: RequiredFirstToken = None,
    require_tokens_per_s: RequiredSpeed = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    if is_url(server):
        server, url = "", server
    elif url and server:
        server, model = "", server
    if url and context.args:
        raise ConfigError(f"{' '.join(context.args)}: a server that runs already takes no settings.")
    drawn = DatasetSpec(
        name=dataset,
        file=str(dataset_file or ""),
        input_tokens=Size.parse(input_tokens or (LONG_PROMPT if dataset == "long" else str(_DATASET.input_tokens))),
        output_tokens=Size.parse(output_tokens or str(_DATASET.output_tokens)),
        prefix_tokens=prefix_tokens,
        groups=prefix_groups,
        num_turns=turns,
        vocabulary=vocabulary,
        image_size=image_size,
        image_steps=image_steps,
    )
    chats = dataset in ("chat", "multi-turn", "standard")
    asked = ServeWork(
        points=points_of(
            work=work, rate=rate, concurrency=concurrency, requests=requests, arrival=arrival, dataset=drawn
        ),
        runs=runs,
        seed=seed,
        warm_up=warm_up,
        options=options_of(temperature=temperature, top_p=top_p, logprobs=logprobs, schema=schema, chats=chats),
        slo=Slo.parse(slo),
        cancellations=Cancellations(cancel),
    )

    async def measure() -> list[ServeReport]:
        others = [Target(url=against, model=model, key=key)] if against else []
        if url:
            return await measured([Target(url=url, model=model, key=key), *others], asked)
        async with own_server([*([server] if server else []), *context.args]) as (own_url, seconds):
            return await measured([Target(url=own_url, key=key, startup_seconds=seconds), *others], asked)

    reports = run(measure())
    verdicts = compare(*reports, in_turns=True, tolerance=tolerance) if against else []
    for report in reports:
        print_report(report)
    write(Comparison(reports=reports, verdicts=verdicts) if against else reports[0], json_file)
    if html_file is not None:
        html_file.write_text(html_report(reports, verdicts), encoding="utf-8")
    if any(report.num_failures for report in reports):
        raise typer.Exit(1)
    end_by_verdicts(verdicts)
    end_by(judge(reports[0], Required(first_token_ms=require_first_token_ms, tokens_per_s=require_tokens_per_s)))


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    reports: list[ServeReport]
    verdicts: list[ComparedFigure]


def compare_command(
    context: typer.Context,
    before: Annotated[str, typer.Argument(help="A report of `weft bench serve --json`, or a server's address.")],
    after: Annotated[str, typer.Argument(help="Another of the same kind.")],
    tolerance: Tolerance = 0.02,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    if is_url(before) and is_url(after):
        files = [*(["--json", str(json_file)] if json_file else []), *(["--html", str(html_file)] if html_file else [])]
        parent = context.parent
        assert parent is not None and isinstance(parent.command, typer.core.TyperGroup)
        command = parent.command.commands["serve"]
        with command.make_context(
            "serve", [before, "--against", after, "--tolerance", str(tolerance), *files, *context.args], parent
        ) as measuring:
            command.invoke(measuring)
        return
    if context.args:
        raise ConfigError(f"{' '.join(context.args)}: what was measured already takes no settings.")
    compare_files(Path(before), Path(after), tolerance, json_file, html_file)


def compare_files(
    before: Path, after: Path, tolerance: float, json_file: Path | None, html_file: Path | None = None
) -> None:
    """Compare two reports that were written; exit with 1 where the second is worse in something."""
    reports = [read_report(before), read_report(after)]
    verdicts = compare(*reports, in_turns=False, tolerance=tolerance)
    write(Comparison(reports=reports, verdicts=verdicts), json_file)
    if html_file is not None:
        html_file.write_text(html_report(reports, verdicts), encoding="utf-8")
    end_by_verdicts(verdicts)


def end_by_verdicts(verdicts: Sequence[ComparedFigure]) -> None:
    """Print what a comparison found; exit with 1 where the second is worse in something."""
    if not verdicts:
        return
    table = Table(caption="ratio: second over first", box=None, padding=(0, 1, 0, 0))
    table.add_column("load", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for heading in ("first", "second", "ratio", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    styles = {"better": "green", "worse": "red", "unknown": "dim"}
    for each in verdicts:
        interval = f"{each.low:.2f}-{each.high:.2f}"
        values = (f"{each.before:,.1f}", f"{each.after:,.1f}", f"{each.ratio:.3f}", interval)
        table.add_row(each.point, each.metric, *values, each.outcome, style=styles.get(each.outcome))
    Console().print(table)
    if judged_worse(verdicts):
        raise typer.Exit(1)


def print_report(report: ServeReport) -> None:
    console = Console()
    console.print(*serve_tables(report), sep="\n")
    if max(once.client_cpu_share for figures in report.figures for once in figures.runs) > CLIENT_AT_ITS_LIMIT:
        console.print("The client was busy all the time in some runs: the server may be faster than this.")
    if report.num_failures:
        print_failures(report)


async def measured(targets: Sequence[Target], work: ServeWork) -> list[ServeReport]:
    """Measure servers with a sign of how far it is."""
    total = len(targets) * work.runs * sum(point.load.requests for point in work.points)
    with progress(total, "warming up") as advance:
        return await run_serve(
            targets, work, lambda point, number: advance(f"{point}, run {number + 1} of {work.runs}")
        )


_Column = tuple[str, str, Callable[[PointFigures], float | None]]
"""A column's heading, the format of its figures, and how to read them."""

_RATES: list[_Column] = [
    ("output\ntok/s", ",.0f", lambda figures: figures.output_tokens_per_s),
    ("spread\n", ".1%", lambda figures: figures.spread),
    ("total\ntok/s", ",.0f", lambda figures: figures.total_tokens_per_s),
    ("req/s\n", ",.2f", lambda figures: figures.requests_per_s),
    ("good\nreq/s", ",.2f", lambda figures: figures.goodput_per_s),
    ("CPU\nµs/tok", ",.0f", lambda figures: figures.server_cpu_us_per_token),
    ("errors\n", "d", lambda figures: figures.num_failures),
]
_LATENCIES: list[_Column] = [
    ("first\np50", ",.1f", lambda figures: figures.first_token_ms.p50),
    ("\np90", ",.1f", lambda figures: figures.first_token_ms.p90),
    ("\np99", ",.1f", lambda figures: figures.first_token_ms.p99),
    ("between\np50", ",.1f", lambda figures: figures.inter_token_ms.p50),
    ("\np90", ",.1f", lambda figures: figures.inter_token_ms.p90),
    ("\np99", ",.1f", lambda figures: figures.inter_token_ms.p99),
    ("\nmax", ",.0f", lambda figures: figures.inter_token_ms.max),
    ("end\np50", ",.0f", lambda figures: figures.e2e_ms.p50),
    ("\np99", ",.0f", lambda figures: figures.e2e_ms.p99),
]


def serve_tables(report: ServeReport) -> list[Table]:
    """Return two tables, each narrow enough for a terminal of 80 columns."""
    started = "" if report.startup_seconds is None else f"ready {report.startup_seconds:.1f} s after its start; "
    rates, latencies = _table(report, _RATES), _table(report, _LATENCIES)
    rates.title = f"{report.model} at {report.url}"
    rates.caption = f"{started}CPU time of the server's own process, not of its engine's"
    latencies.caption = (
        f"ms to the first token, between tokens and to the end; all figures are medians of {report.work.runs} runs"
    )
    return [rates, latencies]


def _table(report: ServeReport, columns: Sequence[_Column]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("load", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for figures in report.figures:
        values = [(of(figures), form) for _, form, of in columns]
        table.add_row(figures.name, *("–" if value is None else format(value, form) for value, form in values))
    return table


def print_failures(report: ServeReport) -> None:
    console = Console(stderr=True)
    for figures in report.figures:
        classes: Counter[str] = Counter()
        for once in figures.runs:
            classes.update(once.errors)
        for name, count in classes.most_common():
            console.print(f"{figures.name}: {count} × {name}", style="red", markup=False, highlight=False)
        for reason in dict.fromkeys(reason for once in figures.runs for reason in once.failures[:3]):
            console.print(f"  {reason}", style="red", markup=False, highlight=False)


def write(report: object, json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def end_by(judged: list[Judged]) -> None:
    """Print the bounds and whether each was kept; exit with 1 where one was not."""
    if not judged:
        return
    table = Table("required of", "bound", box=None, pad_edge=False)
    table.add_column("measured", justify="right")
    table.add_column("")
    for each in judged:
        verdict, style = ("pass", "green") if each.kept else ("FAIL", "red")
        table.add_row(each.name, each.bound, f"{each.measured:,.1f}", verdict, style=style)
    Console().print(table)
    if not all(each.kept for each in judged):
        raise typer.Exit(1)
