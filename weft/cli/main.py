"""The command line. Every command imports what it needs when it runs: `weft --help` loads no engine."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from weft import __version__
from weft.cli import chat_commands, cluster_commands, model_commands
from weft.cli.command_flags import (
    ENGINE_SECTIONS,
    EPILOG,
    LOCAL_FLAGS,
    PLAN_FLAGS,
    SERVE_FLAGS,
    JsonFlag,
    configured,
    console,
    join_completed_words,
)
from weft.cli.live_commands import add_live_commands
from weft.config import FORMATS, differences, load, shown_value, template
from weft.errors import ConfigError, Unavailable, WeftError
from weft.options import Config

if TYPE_CHECKING:
    from weft.backends.configured_models import ModelsFromFile
    from weft.backends.contract import Engine

app = typer.Typer(
    name="weft",
    help="Weft: one serving engine for generative models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Run a command; an error meant for the user is a line or two, and never a traceback."""
    try:
        expect_engine_early(sys.argv[1:])
        if os.environ.get("_WEFT_COMPLETE") == "complete_bash":
            join_completed_words()
        app()
    except WeftError as error:
        _show_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


CHOOSE_ENGINE = (
    "--engine", "--device", "--models-file", "--config", "--adapter", "--enable-lora", "--trust-remote-code", "--help",
    "--replica", "--min-replicas", "--max-replicas",
)  # fmt: skip
"""Flags with which other engines than the default one, or none, may be started."""


def expect_engine_early(words: list[str]) -> None:
    """Let what engines are forked from be started before flags are parsed, where these are sure to leave the choice of
    the engine as it is: the parser's imports take a fifth of a second."""
    if words[:1] != ["serve"] or any(word.startswith(CHOOSE_ENGINE) for word in words):
        return
    from weft.backends.registry import expect_engine

    with suppress(ConfigError):  # it is told when flags are parsed
        config = load()
        if not config.model_pool.models_file:
            expect_engine(config)


def _show_error(error: WeftError) -> None:
    shown = console(stderr=True)
    shown.print(error.message, style="red", markup=False, highlight=False, soft_wrap=True)
    if error.hint:
        shown.print(error.hint, markup=False, highlight=False, soft_wrap=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def weft(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show which Weft this is.")
    ] = False,
) -> None:
    """Weft: one serving engine for generative models."""


@app.command(epilog=EPILOG)
@configured(shown=SERVE_FLAGS, positional_model=True)
def serve(config: Config) -> None:
    """Serve a model over HTTP and gRPC, for OpenAI's and Anthropic's clients; or several (--models-file)."""
    from weft.backends.registry import expect_engine
    from weft.checkpoint.model_files import home

    if not config.server.data_dir:
        data_dir = str(home() / "data" / str(config.server.port))
        config = replace(config, server=replace(config.server, data_dir=data_dir))
    if not config.model_pool.models_file:
        expect_engine(config)
        from weft.api.server import serve

        serve(lambda: _start(config), config)
        return
    from weft.api.server import serve_models
    from weft.backends.configured_models import ModelsFromFile

    roster = ModelsFromFile(config)
    if config.model_pool.check_models:
        _check_models(roster)
    else:
        serve_models(roster, config)


app.registered_commands += chat_commands.app.registered_commands


@app.command(epilog=EPILOG)
@configured(*ENGINE_SECTIONS, "cluster", shown=(*LOCAL_FLAGS, "cluster_key_file"), positional_model=True)
def replica(
    config: Config,
    host: Annotated[str, typer.Option(help="Address to listen on; edges must know --cluster-key-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 9400,
    otlp_endpoint: Annotated[
        str, typer.Option(help="Send spans of requests that edges trace to this URL, by OTLP over HTTP.")
    ] = "",
) -> None:
    """Serve one replica of a model to edges (`weft serve --replica-addresses`), which know its key.

    weft replica smollm2 --host 10.0.0.7 --cluster-key-file cluster.key

    SIGTERM lets its requests end, for 30 s at most, and takes no new ones.
    """
    from weft import logs
    from weft.cluster.replica_link import read_key, tls_context
    from weft.cluster.replica_server import run, run_replica

    logs.set_up(config.server.log_level, form=config.server.log_format)
    key, tls = read_key(config.cluster), tls_context(config.cluster, is_server=True)
    if otlp_endpoint:
        config = replace(config, server=replace(config.server, otlp_endpoint=otlp_endpoint))
    code = run(run_replica(config, host, port, key=key, tls=tls, say=typer.echo))
    raise typer.Exit(code)


@app.command(epilog=EPILOG)
@configured(*ENGINE_SECTIONS, shown=("model", *LOCAL_FLAGS), with_sampling=True)
def generate(
    config: Config,
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from standard input.", metavar="PROMPT")],
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Continue the text itself, or answer it as a chat.")
    ] = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Answer one prompt on standard output.

    What is piped in is the text that the prompt is about.

    weft generate "Name three rivers."

    cat report.txt | weft generate "Summarise this in two sentences."
    """
    from weft.backends.registry import expect_engine

    expect_engine(config)
    from weft import logs, terminal
    from weft.backends.blocking import BlockingEngine

    text = terminal.with_context("" if prompt == "-" else prompt, terminal.read_stdin())
    if not text:
        raise ConfigError("The prompt is empty.", hint='As in: weft generate "Name three rivers."')
    logs.set_up("warning")
    with BlockingEngine(lambda: _start(config)) as local:
        terminal.generate(local, text, sampling, raw=raw)


@app.command(epilog=EPILOG)
@configured("model", "cache", "scheduler", "engine", shown=("model", "image_model", "device", "threads"))
def image(
    config: Config,
    prompt: Annotated[
        str, typer.Argument(help='What the image shows, as in "a red circle on a blue background".', metavar="PROMPT")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The PNG file to write.")] = Path("image.png"),
    steps: Annotated[
        int | None,
        typer.Option(help="Denoise steps: more are slower and finer; without it the model's own."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same image.")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="How closely the prompt is followed; 1 takes half the time.")
    ] = None,
    negative: Annotated[str, typer.Option(help="What the image should not show.")] = "",
    sampler: Annotated[
        str, typer.Option(help="The sampler: heun is finer than euler, and slower.", metavar="euler|heun")
    ] = "euler",
    size: Annotated[str, typer.Option(help="Width and height, as in 32x32; auto: as the model has it.")] = "auto",
) -> None:
    """Generate an image from the prompt, and write it to a PNG file.

    weft image "a red circle on a blue background" -o circle.png

    weft image "the letter K in green" --seed 7 --steps 50 -o k.png

    The last line shows the seed: the same prompt, seed and settings give the same image again.
    """
    import asyncio

    from msgspec.structs import replace

    from weft import logs, terminal
    from weft.serving.image_request import ImageOptions, sampler_named, sides

    terminal.check_image_file(output)
    width, height = sides(size)
    options = ImageOptions(
        prompt=prompt,
        negative_prompt=negative,
        width=width,
        height=height,
        steps=steps,
        guidance_scale=guidance,
        seed=seed,
        sampler=sampler_named(sampler),
    )
    logs.set_up("warning")

    # Only Weft's own engine generates images.
    native = replace(config, backend=replace(config.backend, engine="native"))

    async def generate_image() -> None:
        engine = await _start(native)
        try:
            await terminal.write_image(engine, options, output, console(stderr=True))
        finally:
            await engine.close()

    asyncio.run(generate_image())


app.registered_commands += model_commands.app.registered_commands


@app.command()
def engines(as_json: JsonFlag = False) -> None:
    """List the engines, and which of them can be used on this machine."""
    from rich.table import Table

    from weft.backends import EngineFactory, list_engines

    try:
        taken = EngineFactory.auto_detect()
    except Unavailable as error:
        taken = f"none. {error}"
    if as_json:
        from weft.terminal import write_json

        write_json({"engines": list_engines(), "default": taken})
        return
    table = Table("name", "platform", "available", box=None, pad_edge=False)
    table.add_column("what it is", overflow="fold")
    for engine in list_engines():
        yes = "with --engine-url" if engine.needs_url else "yes"
        available = yes if engine.available else f"no: {engine.why_not}"
        table.add_row(engine.name, engine.platform, available, engine.about, style="" if engine.available else "dim")
    console().print(table)
    console().print(f"\nWithout --engine: {taken}", markup=False, highlight=False, soft_wrap=True)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure a server or this machine."""
    from weft.bench.commands import app as bench_app

    bench_app(args=context.args, prog_name="weft bench")


@app.command(epilog=EPILOG)
@configured("model", "backend", "cache", "scheduler", shown=PLAN_FLAGS, positional_model=True)
def plan(
    config: Config,
    memory_gib: Annotated[
        float, typer.Option(help="Plan for a device with so much memory instead of this machine's.", min=0)
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Show what a model takes of the memory and what fits, without loading it.

    weft plan smollm2

    weft plan org/model --device cuda --memory-gib 80 --max-model-len 32768

    It ends with 1 where the model does not fit as asked.
    """
    from weft.backends.preflight import files_here, import_torch, planned
    from weft.machine.planner import plan_fields, plan_table

    files = files_here(config)
    made = planned(config, files, memory_gib)
    if made.engine == "native":
        import_torch()
        from weft.model.loader import open_model

        # Raises ModelError for a model that Weft's own engine does not compute.
        with open_model(files):
            pass
    if as_json:
        from weft.terminal import write_json

        write_json(plan_fields(made))
    else:
        console().print(plan_table(made), soft_wrap=True)
    if made.problem is not None:
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
@configured("model", "backend", "cache", "scheduler", shown=PLAN_FLAGS, positional_model=True)
def doctor(config: Config, as_json: JsonFlag = False) -> None:
    """Show what Weft finds on this machine: cores, memory, GPUs, packages, engines, and whether a model fits.

    Nothing is fetched or loaded. Without MODEL it is the default one.
    """
    from rich.table import Table

    from weft.backends.preflight import Finding, files_here, findings, planned
    from weft.checkpoint.model_files import home
    from weft.hub.snapshots import list_models
    from weft.machine.planner import plan_fields, plan_table

    names = ", ".join(model.name for model in list_models())
    found = [
        Finding("weft", __version__),
        *findings(),
        Finding("home", f"{home()} (WEFT_HOME moves it)"),
        Finding("models", names or "none; `weft pull` fetches the default one", good=bool(names)),
    ]
    plan, problem = None, ""
    try:
        plan = planned(config, files_here(config))
    except WeftError as error:
        problem = str(error)
    if as_json:
        from weft.terminal import write_json

        write_json({"findings": found, "plan": plan_fields(plan) if plan is not None else None, "problem": problem})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in found:
        table.add_row(finding.name, finding.value, style="" if finding.good else "yellow")
    console().print(table)
    console().print()
    if plan is not None:
        console().print(plan_table(plan), soft_wrap=True)
    else:
        console().print(f"No model can be planned: {problem}", markup=False, highlight=False, soft_wrap=True)


app.add_typer(cluster_commands.app, name="cluster")

config_app = typer.Typer(help="Write or check a file of settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")


@config_app.command("init")
def init_config(
    path: Annotated[Path | None, typer.Argument(help="The file to write.", show_default="weft.toml")] = None,
    form: Annotated[
        str, typer.Option("--format", help="The format; without it, by the suffix of PATH.", metavar="|".join(FORMATS))
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a file with every setting, its documentation and its default.

    All are commented out, by section. JSON has no comments: there every setting is written with its default.
    """
    if form and form not in FORMATS:
        raise ConfigError(f"There is no format {form!r}.", hint=f"Possible: {', '.join(FORMATS)}.")
    path = path or Path(f"weft.{form or 'toml'}")
    by_name = next((name for name, suffixes in FORMATS.items() if path.suffix.lower() in suffixes), "toml")
    if form not in ("", by_name):
        raise ConfigError(f"{path} would be read as {by_name}, and --format is {form}.", hint="Give PATH its suffix.")
    try:
        with path.open("w" if force else "x") as file:
            file.write(template(by_name))
    except FileExistsError as error:
        raise ConfigError(f"{path} exists.", hint="--force overwrites it.") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from error
    written = "JSON has no comments: every setting is written with its default." if by_name == "json" else ""
    typer.echo(f"{path} is written. {written}".rstrip())


@config_app.command("check")
def check_config(
    path: Annotated[Path, typer.Argument(help="What --config would be given.")], as_json: JsonFlag = False
) -> None:
    """Check a file as `weft serve --config` reads it, with the environment, and show what differs from the defaults.

    Keys, certificates and the models file that it names are read too; no model is looked for or loaded.
    It ends with 1 where a server would not start with it.
    """
    from rich.table import Table

    from weft.api.server import check_server
    from weft.backends.configured_models import ModelsFromFile
    from weft.backends.starting import chosen_engines

    places: dict[str, str] = {}
    try:
        config = load(file=path, places=places)
        check_server(config)
        if config.model_pool.models_file:
            ModelsFromFile(config)
        else:
            chosen_engines(config)
    except WeftError as error:
        _show_error(error)
        raise typer.Exit(1) from error
    changed = [
        {
            "section": setting.section,
            "setting": setting.name,
            "value": shown_value(setting.name, value),
            "default": shown_value(setting.name, setting.default),
            "from": places[setting.name],
        }
        for setting, value in differences(config)
    ]
    if as_json:
        from weft.terminal import write_json

        write_json(changed)
        return
    table = Table("section", "setting", box=None, pad_edge=False)
    for column in ("value", "default", "from"):
        table.add_column(column, overflow="fold")
    for row in changed:
        table.add_row(*row.values())
    console().print(table if table.row_count else "Every setting is at its default.", markup=False, soft_wrap=True)


add_live_commands(app)


@app.command()
def version() -> None:
    """Show which Weft this is."""
    typer.echo(f"weft {__version__}")


def _check_models(roster: ModelsFromFile) -> None:
    """Check all models of the file; exit with 1 when one has a fault."""
    import asyncio

    from weft import logs

    logs.set_up("warning")
    checked = asyncio.run(roster.check())
    for model in checked:
        typer.echo(f"{model.place}: {model.name}: {model.fault or 'ok'}")
    if any(model.fault for model in checked):
        raise typer.Exit(1)


async def _start(config: Config) -> Engine:
    from weft.backends import start_engine

    return await start_engine(config)
