"""The commands of `weft bench` measure this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from weft import config as configuration
from weft.backends.registry import engines_in_order
from weft.bench import load_commands
from weft.bench.arrivals import Size
from weft.bench.datasets import DatasetSpec
from weft.bench.generator import run
from weft.bench.load_commands import JsonFile, RequiredFirstToken, RequiredSpeed, end_by, write
from weft.bench.mixed import TOGETHER, MixedReport, MixedWork, ModeReport, StepsReport, Verdict, run_mixed
from weft.bench.mixed import num_runs as num_mixed_runs
from weft.bench.offline import OfflineReport, OfflineWork, num_runs, run_offline
from weft.bench.offline import judge as judge_offline
from weft.bench.progress_line import progress
from weft.bench.report import Required
from weft.bench.router_simulation import ARRIVALS as ROUTER_ARRIVALS
from weft.bench.router_simulation import POLICIES as ROUTER_POLICIES
from weft.bench.router_simulation import WORKLOADS as ROUTER_WORKLOADS
from weft.bench.router_simulation import RouterReport, RouterReports, RouterWork, simulate
from weft.errors import ConfigError
from weft.machine.devices import accelerator
from weft.options import Config

if TYPE_CHECKING:
    from weft.bench.rpc import RpcReport

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, add_completion=False)

_WORK = OfflineWork()
_MIXED = MixedWork()
_ROUTER = RouterWork()

Model = Annotated[str | None, typer.Argument(help="What `weft serve` takes.", show_default="smollm2")]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML, YAML or JSON file with settings.")]
EngineName = Annotated[str | None, typer.Option(help="One of `weft engines`.", show_default="native")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", show_default="auto")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.", show_default="auto")]


def _settings(config: Path | None, *, prefix_cache: bool, **flags: str | None) -> Config:
    """Make the configuration as `weft serve` does, from the flags that were given, the environment and the file.

    A benchmark's own defaults: the native engine, and no prefix cache but where it measures with one, or elsewhere.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    defaults: dict[str, Any] = {"engine": "native"}
    settings = configuration.load(given, file=config, defaults=defaults)
    if prefix_cache or all(spec.needs_url for spec in engines_in_order(settings.backend.engine, settings.model.device)):
        return settings
    return configuration.load(given, file=config, defaults=defaults | {"enable_prefix_caching": False})


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
    model: Model = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests that decode together.")] = "1,8,32",
    prompt_lengths: Annotated[str, typer.Option(help="Prompt tokens before a first token.")] = "128,512",
    requests: Annotated[int, typer.Option(min=1, help="Requests of the throughput line.")] = _WORK.requests,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = _WORK.input_tokens,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each.")] = _WORK.output_tokens,
    runs: Annotated[int, typer.Option(min=1, help="Each figure is the median of so many runs, or more.")] = _WORK.runs,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = _WORK.seed,
    adapters: Annotated[
        int, typer.Option(min=0, help="Random LoRA adapters that further decode lines share out over the batch.")
    ] = _WORK.adapters,
    adapter_rank: Annotated[int, typer.Option(min=1, max=64, help="Their rank.")] = _WORK.adapter_rank,
    config: ConfigFile = None,
    engine: EngineName = None,
    device: Device = None,
    dtype: Dtype = None,
    require_first_token_ms: RequiredFirstToken = None,
    require_tokens_per_s: RequiredSpeed = None,
    json_file: JsonFile = None,
) -> None:
    """Measure decode speed, time to the first token and throughput of one engine, without a server.

    What is required holds for every line of its kind: --require-first-token-ms for each prompt length,
    --require-tokens-per-s for decoding at each batch size.
    """
    # Prompts are random, and found only where one is sent twice.
    settings = _settings(config, prefix_cache=True, model=model, engine=engine, device=device, dtype=dtype)
    work = OfflineWork(
        batch_sizes=_numbers(batch_sizes),
        prompt_lengths=_numbers(prompt_lengths),
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        runs=runs,
        seed=seed,
        adapters=adapters,
        adapter_rank=adapter_rank,
    )
    with progress(num_runs(work), "loading") as advance:
        report = run(run_offline(settings, work, advance))
    Console().print(_offline_table(report))
    write(report, json_file)
    required = Required(first_token_ms=require_first_token_ms, tokens_per_s=require_tokens_per_s)
    end_by(judge_offline(report, required))


app.command(
    "serve",
    help="Throughput and latency of a server under load, over HTTP: any server that speaks OpenAI's interface.\n\n"
    "Without an address it starts `weft serve` itself, on a free port, and reports how long that took; settings of "
    "`weft serve` may follow the model.\n\n"
    "A server that is ready is warmed up, and Weft has time to finish compiling, before anything is measured. Tokens "
    "are those of the server's own usage. The exit code is 1 when a request failed, or a load misses what is required: "
    "of the first token, the median; of tokens a second, those of all its connections.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(load_commands.serve)
app.command(
    "compare",
    help="Compare two reports of `weft bench serve --json`, or two servers, which are then measured in turns with the "
    "same requests; options of `weft bench serve` may follow their addresses.\n\n"
    "Each figure's ratio has a confidence interval, of 95 % over the runs. The exit code is 1 where the second is "
    "worse.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(load_commands.compare_command)


@app.command(
    help="Measure how many gRPC messages and bytes answers take, with their chunks joined and without, under real "
    "streams. It starts `weft serve` twice, whose settings may follow the model. A server that runs is put under load "
    "by `weft bench serve grpc://HOST:PORT`.\n\n"
    "The exit code is 1 where an answer fails, or, on a CPU, a text differs.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def rpc(
    context: typer.Context,
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Answers to ask for at each concurrency.")] = 8,
    concurrency: Annotated[str, typer.Option(help="Streams at the same time, several with commas.")] = "1,8,32,100",
    input_tokens: Annotated[str, typer.Option(help="Words of a prompt: 32, or 16-64.")] = "32",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer at most: 128, or 64-256.")] = "128",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    json_file: JsonFile = None,
) -> None:
    from weft.bench.rpc import RpcWork, num_requests, run_rpc  # gRPC's packages, which the other commands do without

    dataset = DatasetSpec(input_tokens=Size.parse(input_tokens), output_tokens=Size.parse(output_tokens))
    work = RpcWork(requests=requests, concurrencies=_numbers(concurrency), dataset=dataset, seed=seed)
    with progress(num_requests(work), "starting") as advance:
        report = run(run_rpc([*([model] if model else []), *context.args], work, advance))
    Console().print(_rpc_table(report))
    write(report, json_file)
    # On a GPU the company of a row may change its last bits.
    if report.num_failures or (accelerator() == "cpu" and not report.same_text):
        raise typer.Exit(1)


@app.command(
    help="Chats and images at once in one engine, against each kind alone and against engines without step scheduling: "
    "`one after the other` runs the images after the chats, one at a time; `blocking` among them, with all requests "
    "waiting for a whole image, or for all that are there (`batched`).\n\n"
    "Every text and every image is compared with what the same request gives alone. The exit code is 1 when one "
    "differs on a CPU, where none may."
)
def mixed(
    model: Model = None,
    chats: Annotated[int, typer.Option(min=0, help="Chats; 0: images alone.")] = _MIXED.chats,
    images: Annotated[int, typer.Option(min=0, help="Images; 0: chats alone.")] = _MIXED.images,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of a chat.")] = _MIXED.input_tokens,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a chat.")] = _MIXED.max_tokens,
    steps: Annotated[
        str | None, typer.Option(help="Denoise steps of an image, if not the model's own; several: 15,50,100.")
    ] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Its guidance scale, if not the model's own.")] = None,
    stagger: Annotated[float, typer.Option(min=0, help="Seconds between the arrivals of two images.")] = 0,
    runs: Annotated[int, typer.Option(min=1, help="Each figure is the median of so many runs.")] = _MIXED.runs,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts, and of the first image.")] = _MIXED.seed,
    config: ConfigFile = None,
    image_model: Annotated[str | None, typer.Option(help="auto, or the directory of an image model.")] = None,
    load_format: Annotated[str | None, typer.Option(help="auto or dummy.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    json_file: JsonFile = None,
) -> None:
    settings = _settings(
        config, prefix_cache=False, model=model, image_model=image_model, load_format=load_format, device=device,
        dtype=dtype,
    )  # fmt: skip
    chosen = settings.backend.engine
    if any(spec.name != "native" for spec in engines_in_order(chosen, settings.model.device)):
        raise ConfigError(
            f"weft bench mixed cannot measure the engine {chosen}: only native draws.",
            hint="Unset WEFT_ENGINE and CY_LLM_ENGINE, or the engine of the --config file.",
        )
    work = MixedWork(
        chats=chats,
        images=images,
        input_tokens=input_tokens,
        max_tokens=max_tokens,
        guidance=guidance,
        stagger_s=stagger,
        runs=runs,
        seed=seed,
    )
    numbers = _numbers(steps) if steps is not None else ()
    works = [replace(work, steps=number) for number in numbers] or [work]
    with progress(num_mixed_runs(works), "loading") as advance:
        reports = run(run_mixed(settings, works, advance))
    console = Console()
    for report in reports:
        console.print(*_mixed_tables(report), sep="\n")
        if report.verdict is not None:
            console.print(_verdict_table(report.verdict, work))
    if len(reports) > 1:
        console.print(_steps_table(reports))
    write(StepsReport(steps=list(numbers), reports=reports) if len(reports) > 1 else reports[0], json_file)
    if any(report.device == "cpu" and not report.all_as_alone for report in reports):
        raise typer.Exit(1)


@app.command(
    help="Simulate a cluster: which share of prompts is found cached, and how long requests wait, under the router of "
    "Weft, round robin, power of two choices and a cache-aware tree of past prompts."
)
def router(
    workloads: Annotated[str, typer.Option(help=f"Some of {','.join(ROUTER_WORKLOADS)}.")] = _ROUTER.workload,
    arrivals: Annotated[str, typer.Option(help="poisson, bursty or both: poisson,bursty.")] = _ROUTER.arrivals,
    loads: Annotated[str, typer.Option(help="Per cent of what power of two choices can serve.")] = "90",
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = _ROUTER.replicas,
    requests: Annotated[int, typer.Option(min=1000, help="Requests of each run.")] = _ROUTER.requests,
    edges: Annotated[int, typer.Option(min=1, help="Edges, which know their own requests only.")] = _ROUTER.edges,
    seed: Annotated[int, typer.Option(help="Seed of requests, arrivals and choices.")] = _ROUTER.seed,
    json_file: JsonFile = None,
) -> None:
    works = [
        replace(_ROUTER, workload=workload, arrivals=arrival, load=load / 100, replicas=replicas, requests=requests,
                edges=edges, seed=seed)
        for workload in _some_of(workloads, ROUTER_WORKLOADS)
        for arrival in _some_of(arrivals, ROUTER_ARRIVALS)
        for load in _numbers(loads)
    ]  # fmt: skip
    with progress(len(works) * len(ROUTER_POLICIES) * requests, "finding the rate of arrivals") as advance:
        reports = [simulate(work, advance) for work in works]
    Console().print(*map(_router_table, reports), sep="\n")
    write(RouterReports(reports=reports), json_file)


def _some_of(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return names


def _router_table(report: RouterReport) -> Table:
    work = report.work
    table = Table(
        title=f"{work.workload}, {work.arrivals}, {work.load:.0%}: {work.replicas:,} replicas, "
        f"{work.requests:,} requests, {report.requests_per_s:,.0f}/s",
        caption="ms in the queue and to the first token; the busiest replica's prefill over the mean; µs of CPU time",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("rule", no_wrap=True)
    for heading in ("cached", "queue\np50", "queue\np99", "first\np50", "first\np99", "busiest", "µs\np50", "µs\nmean"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figures in report.figures:
        table.add_row(
            figures.policy, f"{figures.hit_rate:.1%}", f"{figures.queue_p50_ms:,.1f}", f"{figures.queue_p99_ms:,.0f}",
            f"{figures.ttft_p50_ms:,.1f}", f"{figures.ttft_p99_ms:,.0f}", f"{figures.imbalance:.2f}",
            f"{figures.decision_p50_us:.1f}", f"{figures.decision_mean_us:.1f}",
        )  # fmt: skip
    return table


def _rpc_table(report: RpcReport) -> Table:
    table = Table(
        title=f"gRPC, {' '.join(report.flags) or 'default model'}",
        caption="messages of answers with every chunk by itself, and joined; first text: how much later where joined",
        box=None,
        pad_edge=False,
    )
    for name in ("streams", "tokens", "tok/s", "alone", "joined", "fewer", "a token", "bytes", "first text", "text"):
        table.add_column(name, justify="right")
    for figures in report.figures:
        joined = figures.joined
        table.add_row(
            str(figures.concurrency), f"{joined.output_tokens:,}", f"{joined.output_tokens_per_s:,.0f}",
            f"{figures.alone.messages:,}", f"{joined.messages:,}", f"{figures.fewer:.0%}", f"{figures.per_token:.2f}",
            f"-{figures.fewer_bytes:.0%}", f"{figures.first_text_ms:+.0f} ms",
            "same" if figures.same_text else "DIFFERENT",
        )  # fmt: skip
    return table


def _offline_table(report: OfflineReport) -> Table:
    table = Table(
        title=f"{report.model}, {report.engine}, {report.dtype}, {report.device}",
        caption=f"start {report.startup_seconds:.1f} s, engine's peak memory {report.engine_peak_mib:.0f} MiB",
    )
    table.add_column("measured")
    table.add_column("median", justify="right")
    table.add_column("unit")
    table.add_column("spread", justify="right")
    for figure in report.figures:
        table.add_row(figure.name, f"{figure.value:,.1f}", figure.unit, f"{figure.spread:.1%}")
    return table


_Column = tuple[str, str, Callable[[ModeReport], float | None]]
"""A column's heading, the format of its figures, and how to read them."""

_CHAT_COLUMNS: list[_Column] = [
    ("output\ntok/s", ",.1f", lambda mode: mode.median.output_tokens_per_s),
    ("decode\ntok/s", ",.1f", lambda mode: mode.median.decode_tokens_per_s),
    ("first\np50", ",.0f", lambda mode: mode.median.first_token_p50_ms),
    ("between\np50", ",.1f", lambda mode: mode.median.inter_token_p50_ms),
    ("between\np95", ",.1f", lambda mode: mode.median.inter_token_p95_ms),
    ("between\nmax", ",.1f", lambda mode: mode.median.inter_token_max_ms),
    ("texts\nas alone", "d", lambda mode: mode.same_texts),
]
_IMAGE_COLUMNS: list[_Column] = [
    ("total\ns", ",.2f", lambda mode: mode.median.seconds),
    ("spread", ".1%", lambda mode: mode.spread),
    ("images\n/s", ",.2f", lambda mode: mode.median.images_per_s),
    ("image\np50", ",.2f", lambda mode: mode.median.image_p50_s),
    ("image\nmax", ",.2f", lambda mode: mode.median.image_max_s),
    ("images\nas alone", "d", lambda mode: mode.same_images),
]


def _mixed_tables(report: MixedReport) -> list[Table]:
    """Return two tables, each narrow enough for a terminal of 80 columns."""
    work = report.work
    beside = f" and {report.image_model}" if report.image_model else ""
    chats = _modes_table(report.modes, _CHAT_COLUMNS)
    steps = f" of {work.steps} steps" if work.steps is not None else ""
    chats.title = (
        f"{work.chats} chats, {work.images} images{steps}: {report.model}{beside}, {report.dtype}, {report.device}"
    )
    chats.caption = "ms to the first token and between tokens\ndecode: while all chats decode, and images, if any"
    images = _modes_table(report.modes, _IMAGE_COLUMNS)
    images.caption = f"s to an image; all figures are medians of {work.runs} runs"
    return [chats, images]


def _modes_table(modes: Sequence[ModeReport], columns: Sequence[_Column]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for mode in modes:
        values = [(figure(mode), form) for _, form, figure in columns]
        table.add_row(mode.name, *("–" if value is None else format(value, form) for value, form in values))
    return table


def _steps_table(reports: Sequence[MixedReport]) -> Table:
    """Return one line for each number of denoise steps: chats and images together, over other modes."""
    table = Table(
        title="together, by denoise steps", box=None, padding=(0, 1, 0, 0),
        caption="p95: between tokens, over text only; the last: their total, over together",
    )  # fmt: skip
    for heading in ("steps", "total\ns", "images\n/s", "p95", "decode\nkept", "blocking", "blocking,\nbatched"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        median = next((mode.median for mode in report.modes if mode.name == TOGETHER.name), None)
        verdict = report.verdict
        if median is None or verdict is None:
            continue
        figures = (
            (median.seconds, ".2f"), (median.images_per_s, ",.2f"), (verdict.inter_token_p95_ratio, ".2f"),
            (verdict.decode_kept, ".0%"), (verdict.times_as_long["blocking"], ".2f"),
            (verdict.times_as_long["blocking, batched"], ".2f"),
        )  # fmt: skip
        shown = ("–" if value is None else format(value, form) for value, form in figures)
        table.add_row(str(report.work.steps), *shown)
    return table


def _verdict_table(verdict: Verdict, work: MixedWork) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("texts as alone", f"{verdict.same_texts} of {work.chats}")
    table.add_row("images as alone", f"{verdict.same_images} of {work.images}")
    if verdict.inter_token_p95_ratio is not None:
        table.add_row("between tokens, p95, over text only", f"{verdict.inter_token_p95_ratio:.2f}")
    if verdict.decode_kept is not None:
        table.add_row("decode throughput kept while images are under way", f"{verdict.decode_kept:.0%}")
    for name, ratio in verdict.times_as_long.items():
        table.add_row(f"total of {name}, over together", f"{ratio:.2f}")
    return table
