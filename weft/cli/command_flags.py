"""The flags of commands: every setting of the configuration, and the sampling parameters.

A command's --help shows the flags that people use; --help-all shows every one that it takes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from weft.config import load
from weft.errors import ConfigError
from weft.options import Config, Setting, settings

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = (
    "--help-all shows every flag. Each setting is also an environment variable (WEFT_MAX_NUM_SEQS) and a line of the "
    "--config file."
)

SECTIONS = get_type_hints(Config)

PANELS = {"grpc": "gRPC", "fleet": "Models"}
"""The titles of sections in --help, where they are not the section's name."""

SERVE_FLAGS = (
    *("served_model_name", "device", "dtype", "max_model_len", "image_model", "adapter"),
    *("engine", "quantization", "kv_cache_memory_mb", "gpu_memory_utilization", "max_num_seqs", "speculative"),
    *("host", "port", "api_key", "api_key_file", "ssl_certfile", "ssl_keyfile", "models_file", "log_level"),
)
"""The settings that `weft serve --help` shows."""

ENGINE_SECTIONS = ("model", "backend", "cache", "scheduler", "engine")
"""The sections of a command that loads a model for itself."""

LOCAL_FLAGS = ("device", "dtype", "max_model_len", "threads", "engine")
"""The settings that --help shows for a command that loads a model for itself."""

PLAN_FLAGS = (
    *("device", "dtype", "max_model_len", "engine", "quantization", "tensor_parallel_size"),
    *("kv_cache_memory_mb", "gpu_memory_utilization", "max_num_seqs"),
)


JsonFlag = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]


def console(*, stderr: bool = False) -> Console:
    """Return a console. Where it is no terminal, or NO_COLOR is set, nothing is coloured."""
    from rich.console import Console

    return Console(stderr=stderr)


def configured(
    *sections: str,
    shown: Collection[str],
    positional_model: bool = False,
    with_sampling: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting of the sections, and the configuration as its first argument.

    Only flags that the user gave reach the configuration: the rest is for environment, file and defaults to say. --help
    shows the settings in `shown`. `with_sampling` adds those of SAMPLING, which the command gets as `sampling`. A
    command with a parameter `given` gets the names of the settings that flags, environment or file say.
    """
    chosen = list(settings(*sections))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        wants_given = any(each.name == "given" for each in own)

        def run(*, config_file: Path | None, help_all: bool = False, **values: Any) -> None:
            flags = {setting.name: values.pop(setting.name) for setting in chosen}
            if positional_model and (named := values.pop("named_model")) is not None:
                if flags["model"] not in (None, named):
                    raise ConfigError(f"The model is {named!r} and --model is {flags['model']!r}.", hint="Give one.")
                flags["model"] = named
            if with_sampling:
                values["sampling"] = _sampling({name: values.pop(name) for name in SAMPLING})
            places: dict[str, str] = {}
            flags = {name: value for name, value in flags.items() if value is not None}
            config = load(flags, file=config_file, places=places)
            if wants_given:
                values["given"] = frozenset(places)
            command(config, **values)

        first = [_model_argument()] if positional_model else []
        own = [each for each in own if each.name not in ("sampling", "given")]
        if with_sampling:
            own += _sampling_flags()
        flags = [_flag(setting, hidden=setting.name not in shown) for setting in chosen]
        parameters = [*first, *own, _config_file(), _help_all(), *flags]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=option)


def _flag(setting: Setting, *, hidden: bool) -> inspect.Parameter:
    switch = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
    default = str(setting.default).lower() if setting.type is bool else str(setting.default)
    about = SECTIONS[setting.section].__doc__
    title = PANELS.get(setting.section, setting.section.capitalize())
    option = typer.Option(
        None,
        switch if setting.type is bool else setting.flag,
        *([f"--{setting.old_name.replace('_', '-')}"] if setting.old_name else []),
        help=setting.doc,
        metavar="|".join(setting.choices) or ("TEXT" if setting.type == list[str] else None),
        show_default=default if setting.default not in ("", []) else False,
        rich_help_panel=f"{title}: {about[0].lower()}{about[1:].rstrip('.')}",
        hidden=hidden,
    )
    return _parameter(setting.name, setting.type | None, option)


def _config_file() -> inspect.Parameter:
    option = typer.Option(None, "--config", help="A TOML, YAML or JSON file of settings.", metavar="FILE")
    return _parameter("config_file", Path | None, option)


def _help_all() -> inspect.Parameter:
    option = typer.Option(False, "--help-all", is_eager=True, callback=_show_all, help="Show every flag.")
    return _parameter("help_all", bool, option)


def _show_all(context: typer.Context, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    for parameter in context.command.params:
        parameter.hidden = False  # type: ignore[attr-defined]
    typer.echo(context.get_help())
    raise typer.Exit


def _model_argument() -> inspect.Parameter:
    argument = typer.Argument(
        None,
        help="A name of `weft models --all`, a GGUF file, a Hugging Face directory or a hub id; the same as --model.",
        metavar="MODEL",
        show_default="smollm2",
        autocompletion=complete_model,
    )
    return _parameter("named_model", str | None, argument)


def complete_model(incomplete: str) -> Iterable[str]:
    """Return the names of models that begin so, for a shell's completion."""
    from weft.hub.catalog import CATALOGUE
    from weft.hub.short_names import SHORT_NAMES
    from weft.hub.snapshots import list_models

    names = {*CATALOGUE, *SHORT_NAMES, *(model.name for model in list_models())}
    before = os.environ.get(BEFORE_COLON, "")
    return sorted(name.removeprefix(before) for name in names if name.startswith(before + incomplete))


BEFORE_COLON = "_WEFT_COMPLETE_BEFORE_COLON"


def join_completed_words() -> None:
    """Take the beginning of a model's name out of the words that bash completes: it takes words apart at colons, and
    puts what it is told in the place of the part behind them."""
    words = os.environ.get("COMP_WORDS", "").split("\n")[: int(os.environ.get("COMP_CWORD") or 0) + 1]
    begun = "" if words[-1:] == [":"] else words.pop()
    if words[-1:] == [":"] and len(words) > 2:
        os.environ[BEFORE_COLON] = f"{words[-2]}:"
        words[-2:] = [begun]
        os.environ.update(COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))


SAMPLING: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "Longest answer, in tokens; without it up to the context's end."),
    "temperature": (float, "0 always takes the likeliest token. Without it and the next four: the model's own."),
    "top_p": (float, "Sample from the likeliest tokens whose probabilities add up to this."),
    "top_k": (int, "Sample from so many tokens; 0: all."),
    "min_p": (float, "Leave out tokens less likely than this share of the likeliest."),
    "repetition_penalty": (float, "Above 1: tokens that were there become less likely."),
    "seed": (int, "The same seed gives the same answer."),
    "stop": (list[str], "End the answer at this text; may be repeated."),
}
"""The sampling parameters that commands have flags for, with their types and their help."""


def _sampling_flags() -> list[inspect.Parameter]:
    return [
        _parameter(name, kind | None, typer.Option(None, help=help, rich_help_panel="Sampling"))
        for name, (kind, help) in SAMPLING.items()
    ]


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that were given to a command. Raises InvalidRequest for one that no model could
    honour, before one is loaded."""
    chosen: dict[str, Any] = {
        name: tuple(value) if name == "stop" else value for name, value in given.items() if value is not None
    }
    check_sampling(chosen)
    return chosen


def check_sampling(chosen: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for parameters that no model could honour."""
    from weft.types import SamplingParams

    SamplingParams(**chosen).check()
