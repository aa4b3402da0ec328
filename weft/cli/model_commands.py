"""The commands about models on this machine: pull, models, show and rm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct
from msgspec.structs import asdict

from weft.cli.command_flags import EPILOG, PLAN_FLAGS, JsonFlag, complete_model, configured, console
from weft.options import Config

if TYPE_CHECKING:
    from weft.machine.hardware import Machine
    from weft.machine.planner import Plan

GIB, GB = 2**30, 10**9
CONTEXTS = (2048, 8192, 32768, 131072)
"""The contexts that `weft show` plans, with the model's own."""
PANELS_PER_BYTE = {"Q4_K_M": 1.5, "Q8_0": 1.06}
"""Bytes that the weights of a GGUF file take on a CPU for each byte of the file, by its quantisation."""
BLOCKS_PER_BYTE = {"Q4_K_M": 1.55, "Q8_0": 1.25}
"""The same on a GPU that multiplies numbers of four and eight bits, where embeddings are of two bytes."""
FIRST_WITH_BLOCKS = (8, 0)
"""GPUs of an older compute capability hold the weights of a GGUF file as bfloat16."""
BESIDE_WEIGHTS = 2**30
"""An estimate of what the cache, a step and the libraries take at least."""

MIN_WIDTH_OF_SOURCES = 64
"""Columns of a terminal below which a list of models does not tell where they come from."""

app = typer.Typer()

Name = Annotated[str, typer.Argument(help="A name of `weft models`.", autocompletion=complete_model)]


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="A name of `weft models --all`, or a hub id.", autocompletion=complete_model)
    ] = "smollm2",
    revision: Annotated[str, typer.Option(help="The commit of a hub model; without it the newest.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read all files again and check them.")] = False,
) -> None:
    """Fetch a model, unless it is here already."""
    from weft.hub.resolve import resolve

    files = resolve(name, revision, verify=verify)
    console().print(f"{files.name} is at {files.path}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def rm(
    name: Name,
    revision: Annotated[str, typer.Option(help="Remove this commit of a hub model alone.")] = "",
) -> None:
    """Remove a model from this machine, if Weft pulled it."""
    from weft.cli.chat_client import probe, served_as
    from weft.config import load
    from weft.hub.resolve import remove

    freed = remove(name, revision)
    told = f"{name} is removed: {_size(freed)} are free again."
    server = probe(load().server.port)
    if served_as(name, server.models) is not None:
        told += f"\nThe server at {server.url} still has it in memory, but cannot load it again if its engine fails."
    console().print(told, highlight=False, markup=False, soft_wrap=True)


class ListedModel(Struct, frozen=True, kw_only=True):
    """A line of `weft models`."""

    name: str
    installed: bool = True
    kind: str = "gguf"
    size_bytes: int
    revision: str = ""
    path: str = ""
    source: str = ""
    """The repository of the hub and the file in it, of a model that can be pulled."""
    memory_bytes: int | None = None
    """An estimate of what the model takes on this machine."""
    fits: bool | None = None


@app.command()
def models(
    everything: Annotated[
        bool, typer.Option("--all", help="List the models that can be pulled by a short name as well.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the models on this machine, and with --all those that `weft pull` and `weft run` know by name."""
    from weft.hub.snapshots import list_models

    listed = [
        ListedModel(
            name=model.name,
            kind=model.kind,
            size_bytes=model.size_bytes,
            revision=model.revision,
            path=str(model.path),
        )
        for model in list_models()
    ]
    if everything:
        listed += _pullable({model.name for model in listed})
    if as_json:
        from weft.terminal import write_json

        write_json(listed)
    elif everything:
        _show_pullable(listed)
    elif listed:
        _show_installed(listed)
    else:
        console().print(
            "No models here yet. `weft pull` fetches the default one, `weft models --all` lists more.", highlight=False
        )


def _pullable(installed: set[str]) -> list[ListedModel]:
    from weft.hub.catalog import CATALOGUE
    from weft.hub.hub_api import quantisation_of
    from weft.hub.short_names import TABLE
    from weft.machine.hardware import inspect_machine

    machine = inspect_machine()
    listed = [
        ListedModel(name=model.name, installed=False, size_bytes=model.wheel_bytes, source=model.requirement, fits=True)
        for model in CATALOGUE.values()
        if model.name not in installed
    ]
    for model in TABLE:
        if model.name not in installed:
            needed, free = _memory(machine, model.gigabytes, model.billions, quantisation_of(model.file))
            listed.append(
                ListedModel(
                    name=model.name,
                    installed=False,
                    size_bytes=int(model.gigabytes * GB),
                    source=f"{model.hub_id}/{model.file}",
                    memory_bytes=needed,
                    fits=needed <= free,
                )
            )
    return listed


def _memory(machine: Machine, gigabytes: float, billions: float, quantisation: str) -> tuple[int, int]:
    """Return how many bytes a model would take, by an estimate, and how many are free for it."""
    if devices := machine.devices_of("cuda"):
        device = max(devices, key=lambda device: device.free)
        unpacked = 2 * billions
        held = min(unpacked, gigabytes * BLOCKS_PER_BYTE.get(quantisation.upper(), 2.0))
        return int(GB * (held if device.capability >= FIRST_WITH_BLOCKS else unpacked)) + BESIDE_WEIGHTS, device.free
    scale = PANELS_PER_BYTE.get(quantisation.upper(), 2.0)
    return int(gigabytes * GB * scale) + BESIDE_WEIGHTS, machine.memory.available


def _show_installed(listed: list[ListedModel]) -> None:
    from rich.table import Table

    table = Table("name", "kind", "size", "revision", box=None, pad_edge=False)
    table.add_column("path", overflow="fold")
    for model in listed:
        table.add_row(model.name, model.kind, _size(model.size_bytes), model.revision[:12], model.path)
    console().print(table)


def _show_pullable(listed: list[ListedModel]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("name", min_width=max(len(model.name) for model in listed))
    for name in ("size", "memory", "fits here"):
        table.add_column(name)
    if console().width >= MIN_WIDTH_OF_SOURCES:
        table.add_column("from", overflow="fold")
    for model in listed:
        fits = "installed" if model.installed else "yes" if model.fits else "no"
        memory = f"{model.memory_bytes / GIB:.1f} GiB" if model.memory_bytes else ""
        style = "dim" if model.fits is False else ""
        # The repository alone: with its file the line is too long for most terminals.
        source = model.source.rpartition("/")[0] or model.source or model.path
        cells = (model.name, _size(model.size_bytes), memory, fits, source)
        table.add_row(*cells[: len(table.columns)], style=style)
    console().print(table)
    console().print(
        "\nMemory is an estimate for this machine; `weft plan` reckons it for a model that is here.", highlight=False
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB else f"{num_bytes / 10**6:.0f} MB"


class ContextMemory(Struct, frozen=True, kw_only=True):
    """The memory says what a model takes on this machine with one context."""

    context: int
    weights_bytes: int
    kv_cache_bytes: int
    """The cache of one request that fills the context."""
    total_bytes: int
    """With what a step and the libraries take."""
    fits: bool


class ShownModel(Struct, frozen=True, kw_only=True):
    """The facts that `weft show` tells of a model."""

    name: str
    kind: str
    path: str
    revision: str
    size_bytes: int
    architecture: str
    parameters: int
    geometry: dict[str, Any]
    quantisation: str
    device: str
    engine: str
    dtype: str
    memory: list[ContextMemory]
    sampling: dict[str, float]
    tool_style: str
    reasoning_style: str
    chat_template: str


@app.command(epilog=EPILOG)
@configured("model", "backend", "cache", "scheduler", shown=PLAN_FLAGS, positional_model=True)
def show(
    config: Config,
    with_template: Annotated[bool, typer.Option("--template", help="Show the chat template alone.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a model that is here: its geometry, its chat template, and the memory it takes at several contexts."""
    from weft.terminal import write_json

    model = _shown(config)
    if as_json:
        write_json(model)
    elif with_template:
        typer.echo(model.chat_template)
    else:
        _print_model(model)


def _shown(config: Config) -> ShownModel:
    from weft.backends.preflight import files_here, planned
    from weft.checkpoint.tokenizer_assets import model_facts, text_assets
    from weft.hub.hub_api import quantisation_of
    from weft.machine.model_size import size_of
    from weft.text.parsers.styles import reasoning_style, tool_style

    files = files_here(config)
    size, facts, assets = size_of(files), model_facts(files), text_assets(files)
    plan = planned(config, files)
    own = size.geometry.max_position if size.geometry is not None else 0
    contexts = sorted({context for context in CONTEXTS if context < own} | ({own} if own else set()))
    template = assets.chat_template or ""
    tools = tool_style(_named(config.model.tool_style), template)
    reasoning = reasoning_style(_named(config.model.reasoning_style), template)
    kind = facts.get("general.architecture") if files.kind == "gguf" else facts.get("model_type")
    return ShownModel(
        name=files.name,
        kind=files.kind,
        path=str(files.path),
        revision=files.revision,
        size_bytes=sum(path.stat().st_size for path in files.weight_files),
        architecture=str(kind or "not told"),
        parameters=size.weights.floats + size.weights.packed,
        geometry=asdict(size.geometry) if size.geometry is not None else {},
        quantisation=quantisation_of(files.path.name) if files.kind == "gguf" else "",
        device=plan.device,
        engine=plan.engine,
        dtype=plan.dtype,
        memory=[_at(plan, context) for context in contexts],
        sampling={**files.sampling, **assets.sampling},
        tool_style=tools.name if tools is not None else "none",
        reasoning_style=reasoning.name if reasoning is not None else "none",
        chat_template=template,
    )


def _named(style: str) -> str | None:
    return None if style == "auto" else style


def _at(plan: Plan, context: int) -> ContextMemory:
    memory, cache = plan.memory, plan.kv_per_token * context
    beside = memory.activations + memory.graphs + memory.libraries
    return ContextMemory(
        context=context,
        weights_bytes=plan.weights,
        kv_cache_bytes=cache,
        total_bytes=plan.weights + cache + beside,
        fits=plan.weights + cache <= memory.available,
    )


def _print_model(model: ShownModel) -> None:
    from rich.table import Table
    from rich.text import Text

    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column()
    facts.add_column(overflow="fold")
    rows = {
        "name": model.name,
        "file" if model.kind == "gguf" else "folder": f"{model.path} ({_size(model.size_bytes)})",
        "revision": model.revision,
        "architecture": f"{model.architecture}, {model.parameters / 10**6:,.0f} M parameters",
        "quantisation": model.quantisation,
        **{name.replace("_", " "): f"{value:,}" for name, value in model.geometry.items() if type(value) is int},
        "tied embeddings": "yes" if model.geometry.get("tied_embeddings") else "",
        "sampling": ", ".join(f"{name} {value:g}" for name, value in model.sampling.items()),
        "tool calls": model.tool_style,
        "reasoning": model.reasoning_style,
    }
    for name, value in rows.items():
        if value:
            facts.add_row(name, Text(value))
    console().print(facts, highlight=False)
    title = f"\nmemory by {model.engine} on {model.device} as {model.dtype}, GiB"
    memory = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("context", "weights", "KV cache of one request", "in all", "fits"):
        memory.add_column(column, justify="right")
    for row in model.memory:
        sizes = (f"{size / GIB:.2f}" for size in (row.weights_bytes, row.kv_cache_bytes, row.total_bytes))
        memory.add_row(f"{row.context:,}", *sizes, "yes" if row.fits else "no", style="" if row.fits else "dim")
    console().print(memory, highlight=False)
    if model.chat_template:
        console().print("\nchat template (--template shows it alone)", style="bold")
        lines = model.chat_template.splitlines()
        console().print("\n".join(lines[:12]), markup=False, highlight=False, soft_wrap=True)
        if len(lines) > 12:
            console().print(f"and {len(lines) - 12} more lines", style="dim", highlight=False)
    else:
        console().print("\nIt has no chat template.", highlight=False)
