"""The command line. Every command imports what it needs when it runs: `weft --help` loads no engine."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from msgspec.structs import replace

from weft import __version__
from weft.config import FORMATS, differences, load, shown_value, template
from weft.errors import ConfigError, Unavailable, WeftError
from weft.live_commands import add_live_commands
from weft.options import Config, Setting, settings

if TYPE_CHECKING:
    from rich.console import Console

    from weft.backends.configured_models import ModelsFromFile
    from weft.backends.contract import Engine

EPILOG = "Every setting is also an environment variable (WEFT_MAX_NUM_SEQS) and a line of the --config file."

SECTIONS = get_type_hints(Config)

app = typer.Typer(
    name="weft",
    help="Weft: one serving engine for generative models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Run a command; an error meant for the user is a line or two, and never a traceback."""
    try:
        app()
    except WeftError as error:
        _show_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _show_error(error: WeftError) -> None:
    console = _console(stderr=True)
    console.print(error.message, style="red", markup=False, highlight=False, soft_wrap=True)
    if error.hint:
        console.print(error.hint, markup=False, highlight=False, soft_wrap=True)


def configured(
    *sections: str, positional_model: bool = False, with_sampling: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting of the sections, and the configuration as its first argument.

    Only flags that the user gave reach the configuration: the rest is for environment, file and defaults to say.
    `with_sampling` adds those of SAMPLING, which the command gets as `sampling`.
    """
    chosen = list(settings(*sections))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        def run(*, config_file: Path | None, **values: Any) -> None:
            flags = {setting.name: values.pop(setting.name) for setting in chosen}
            if positional_model and (named := values.pop("named_model")) is not None:
                if flags["model"] not in (None, named):
                    raise ConfigError(f"The model is {named!r} and --model is {flags['model']!r}.", hint="Give one.")
                flags["model"] = named
            if with_sampling:
                values["sampling"] = _sampling({name: values.pop(name) for name in SAMPLING})
            given = {name: value for name, value in flags.items() if value is not None}
            command(load(given, file=config_file), **values)

        first = [_model_argument()] if positional_model else []
        if with_sampling:
            own = [*(each for each in own if each.name != "sampling"), *_sampling_flags()]
        parameters = [*first, *own, _config_file(), *map(_flag, chosen)]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=option)


def _flag(setting: Setting) -> inspect.Parameter:
    switch = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
    default = str(setting.default).lower() if setting.type is bool else str(setting.default)
    about = SECTIONS[setting.section].__doc__
    option = typer.Option(
        None,
        switch if setting.type is bool else setting.flag,
        *([f"--{setting.old_name.replace('_', '-')}"] if setting.old_name else []),
        help=setting.doc,
        metavar="|".join(setting.choices) or None,
        show_default=default or False,
        rich_help_panel=f"{setting.section.capitalize()}: {about[0].lower()}{about[1:].rstrip('.')}",
    )
    return _parameter(setting.name, setting.type | None, option)


def _config_file() -> inspect.Parameter:
    option = typer.Option(None, "--config", help="A TOML, YAML or JSON file with sections as below.", metavar="FILE")
    return _parameter("config_file", Path | None, option)


def _model_argument() -> inspect.Parameter:
    argument = typer.Argument(None, help="The same as --model.", metavar="MODEL", show_default=False)
    return _parameter("named_model", str | None, argument)


SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "Longest answer, in tokens; else up to the context's end."),
    "temperature": (float, "0 always takes the likeliest token; else the model's own, as for the next four."),
    "top_p": (float, "Choose among the likeliest tokens that have this share together."),
    "top_k": (int, "Choose among so many tokens; 0: all."),
    "min_p": (float, "Leave out tokens less likely than this share of the likeliest."),
    "repetition_penalty": (float, "Above 1: tokens that were there become less likely."),
    "seed": (int, "The same seed gives the same answer."),
    "stop": (list[str], "End the answer at this text; may be repeated."),
}
"""The sampling parameters that commands have flags for, with their types and their help."""


def _sampling_flags() -> list[inspect.Parameter]:
    return [_parameter(name, kind | None, typer.Option(None, help=help)) for name, (kind, help) in SAMPLING.items()]


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that were given to a command. Raises InvalidRequest for one that no model could
    honour, before one is loaded."""
    from weft.types import SamplingParams

    chosen: dict[str, Any] = {
        name: tuple(value) if name == "stop" else value for name, value in given.items() if value is not None
    }
    SamplingParams(**chosen).check()
    return chosen


@app.command(epilog=EPILOG)
@configured(positional_model=True)
def serve(config: Config) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it; or, with --models-file, several by their names."""
    from weft.backends.registry import expect_engine
    from weft.checkpoint.model_files import home

    if not config.server.data_dir:
        data_dir = str(home() / "data" / str(config.server.port))
        config = replace(config, server=replace(config.server, data_dir=data_dir))
    if not config.fleet.models_file:
        expect_engine(config)
        from weft.api.server import serve

        serve(lambda: _start(config), config)
        return
    from weft.api.server import serve_models
    from weft.backends.configured_models import ModelsFromFile

    roster = ModelsFromFile(config)
    if config.fleet.check_models:
        _check_models(roster)
    else:
        serve_models(roster, config)


@app.command(epilog=EPILOG)
@configured("model", "backend", "cache", "scheduler", "engine", with_sampling=True)
def generate(
    config: Config,
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from standard input.")],
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="Continue the text itself, or answer it as a chat.")
    ] = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Answer one prompt on standard output."""
    from weft.backends.registry import expect_engine

    expect_engine(config)
    from weft import logs, terminal
    from weft.backends.blocking import BlockingEngine

    text = sys.stdin.read() if prompt == "-" else prompt
    logs.set_up("warning")
    with BlockingEngine(lambda: _start(config)) as local:
        terminal.generate(local, text, sampling, raw=raw)


@app.command(epilog=EPILOG)
@configured("model", "backend", "cache", "scheduler", "engine", positional_model=True, with_sampling=True)
def chat(
    config: Config,
    system: Annotated[str, typer.Option(help="The system message before the conversation.")] = "",
    *,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model."""
    from weft.backends.registry import expect_engine

    expect_engine(config)
    from weft import logs, terminal
    from weft.backends.blocking import BlockingEngine

    logs.set_up("warning")
    with BlockingEngine(lambda: _start(config)) as local:
        terminal.converse(local, sampling, _console(), system=system, read_line=input)


@app.command(epilog=EPILOG)
@configured("model", "cache", "scheduler", "engine")
def image(
    config: Config,
    prompt: Annotated[str, typer.Argument(help='What the image shows, as in "a red circle on a blue background".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="The PNG file to write.")] = Path("image.png"),
    steps: Annotated[
        int | None, typer.Option(help="More take longer and give finer images; else the model's own.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same image; else any.")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="How closely the prompt is followed; 1 takes half the time.")
    ] = None,
    negative: Annotated[str, typer.Option(help="What the image is steered away from.")] = "",
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
            await terminal.write_image(engine, options, output, _console(stderr=True))
        finally:
            await engine.close()

    asyncio.run(generate_image())


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name from the catalogue, or a hub id.")] = "smollm2",
    revision: Annotated[str, typer.Option(help="The commit of a hub model; without it the newest.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read all files again and check them.")] = False,
) -> None:
    """Fetch a model, unless it is here already."""
    from weft.hub.resolve import resolve

    files = resolve(name, revision, verify=verify)
    _console().print(f"{files.name} is at {files.path}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def models() -> None:
    """List the models on this machine."""
    from rich.table import Table

    from weft.hub.snapshots import list_models

    found = list_models()
    if not found:
        _console().print("No models here yet. `weft pull` fetches the default one.", highlight=False)
        return
    table = Table("name", "kind", "size", "revision", box=None, pad_edge=False)
    table.add_column("path", overflow="fold")
    for model in found:
        table.add_row(
            model.name, model.kind, f"{model.size_bytes / 2**20:,.0f} MiB", model.revision[:12], str(model.path)
        )
    _console().print(table)


@app.command()
def engines() -> None:
    """List the engines, which of them can be used on this machine, and which is taken when none is named."""
    from rich.table import Table

    from weft.backends import EngineFactory, list_engines

    table = Table("name", "platform", "available", box=None, pad_edge=False)
    table.add_column("what it is", overflow="fold")
    for engine in list_engines():
        yes = "with --engine-url" if engine.needs_url else "yes"
        available = yes if engine.available else f"no: {engine.why_not}"
        table.add_row(engine.name, engine.platform, available, engine.about, style="" if engine.available else "dim")
    _console().print(table)
    try:
        taken = EngineFactory.auto_detect()
    except Unavailable as error:
        taken = f"none. {error}"
    _console().print(f"\nWithout --engine: {taken}", markup=False, highlight=False, soft_wrap=True)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure this machine."""
    from weft.bench.commands import app as bench_app

    bench_app(args=context.args, prog_name="weft bench")


@app.command(epilog=EPILOG)
@configured("model", "backend", "cache", "scheduler", positional_model=True)
def plan(
    config: Config,
    memory_gib: Annotated[
        float, typer.Option(help="Plan for a device with so much memory, not for this machine's.", min=0)
    ] = 0,
) -> None:
    """Show what a model would take of the memory and what fits, without loading it.

    weft plan smollm2

    weft plan org/model --device cuda --memory-gib 80 --max-model-len 32768

    It ends with 1 where the model does not fit as asked.
    """
    from weft.backends.preflight import files_here, planned
    from weft.machine.planner import plan_table

    files = files_here(config)
    made = planned(config, files, memory_gib)
    if made.engine == "native":
        from weft.model.loader import open_model

        # Raises ModelError for a model that Weft's own engine does not compute.
        with open_model(files):
            pass
    _console().print(plan_table(made), soft_wrap=True)
    if made.problem is not None:
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
@configured("model", "backend", "cache", "scheduler", positional_model=True)
def doctor(config: Config) -> None:
    """Show what Weft finds on this machine, and what a model that is here would take of its memory.

    Nothing is fetched or loaded. Without MODEL it is the one that a server would have.
    """
    from rich.table import Table

    from weft.backends.preflight import Finding, files_here, findings, planned
    from weft.checkpoint.model_files import home
    from weft.hub.snapshots import list_models
    from weft.machine.planner import plan_table

    names = ", ".join(model.name for model in list_models())
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in (
        Finding("weft", __version__),
        *findings(),
        Finding("home", f"{home()} (WEFT_HOME moves it)"),
        Finding("models", names or "none; `weft pull` fetches the default one", good=bool(names)),
    ):
        table.add_row(finding.name, finding.value, style="" if finding.good else "yellow")
    _console().print(table)
    _console().print()
    try:
        _console().print(plan_table(planned(config, files_here(config))), soft_wrap=True)
    except WeftError as error:
        _console().print(f"There is no plan for a model: {error}", markup=False, highlight=False, soft_wrap=True)


config_app = typer.Typer(help="Write or check a file of settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")


@config_app.command("init")
def init_config(
    path: Annotated[Path | None, typer.Argument(help="The file to write.", show_default="weft.toml")] = None,
    form: Annotated[
        str, typer.Option("--format", help="Without it, by the end of PATH.", metavar="|".join(FORMATS))
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
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
        raise ConfigError(f"{path} is there already.", hint="--force overwrites it.") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from error
    written = "JSON has no comments: every setting is written with its default." if by_name == "json" else ""
    typer.echo(f"{path} is written. {written}".rstrip())


@config_app.command("check")
def check_config(path: Annotated[Path, typer.Argument(help="What --config would be given.")]) -> None:
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
        if config.fleet.models_file:
            ModelsFromFile(config)
        else:
            chosen_engines(config)
    except WeftError as error:
        _show_error(error)
        raise typer.Exit(1) from error
    table = Table("section", "setting", box=None, pad_edge=False)
    for column in ("value", "default", "from"):
        table.add_column(column, overflow="fold")
    for setting, value in differences(config):
        table.add_row(
            setting.section,
            setting.name,
            shown_value(setting.name, value),
            shown_value(setting.name, setting.default),
            places[setting.name],
        )
    console = _console()
    console.print(table if table.row_count else "Every setting is at its default.", markup=False, soft_wrap=True)


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


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)
