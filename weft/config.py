"""Loads the configuration. Precedence: flag, then environment (WEFT_MAX_NUM_SEQS), then file, then default."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from weft.errors import ConfigError
from weft.options import Config, Setting, settings
from weft.switches import switched_off

ENV_ALIASES = {
    "CY_LLM_ENGINE": "engine",
    "CY_LLM_DEFAULT_ADAPTER": "adapter",
    "CY_LLM_MODEL_REGISTRY_PATH": "models_file",
}
"""Variables of the CY-LLM Engine that are honoured; Weft's own (WEFT_ENGINE) wins."""

RESERVED_ENV = frozenset({"WEFT_HOME", "WEFT_COMPILE_CACHE", "WEFT_WITHOUT"})
"""Variables that are no settings: the folders of pulled models and of compiled kernels, and weft/switches.py's."""


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Load the configuration from flags by field name, environment and file. Raises ConfigError.

    `defaults` are a command's own: they hold where none of the three says otherwise.
    """
    known = {setting.name: setting for setting in settings()}
    raw: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}

    def put(name: str, value: Any, place: str) -> None:
        if name not in known:
            raise ConfigError(f"{place}: there is no setting {name!r}.", hint=nearest(name, known))
        raw.setdefault(known[name].section, {})[name] = value
        places[name] = place

    for name, value in (defaults or {}).items():
        put(name, value, "default")
    for section, name, value, place in _from_file(file):
        if name in known and known[name].section != section:
            raise ConfigError(f"{place}: {name} is in [{section}].", hint=f"It belongs in [{known[name].section}].")
        put(name, value, place)
    environment = os.environ if env is None else env
    switched_off(environment)
    for variable, name in ENV_ALIASES.items():
        if environment.get(variable):
            put(name, _parse(known[name], environment[variable]), f"environment variable {variable}")
    for variable, text in environment.items():
        if variable.startswith("WEFT_") and variable not in RESERVED_ENV:
            name = variable.removeprefix("WEFT_").lower()
            if name not in known:
                raise ConfigError(
                    f"environment: there is no setting {variable!r}.",
                    hint=nearest(variable, [setting.env for setting in known.values()]),
                )
            put(name, _parse(known[name], text), f"environment variable {variable}")
    for name, value in (flags or {}).items():
        put(name, value, f"flag --{name.replace('_', '-')}")
    return _convert(raw, places)


def _from_file(file: Path | None) -> Iterator[tuple[str, str, Any, str]]:
    if file is None:
        return
    try:
        tables = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}.") from error
    sections = get_type_hints(Config)
    for section, table in tables.items():
        if section not in sections or not isinstance(table, dict):
            raise ConfigError(f"{file}: there is no section [{section}].", hint=nearest(section, sections))
        for name, value in table.items():
            yield section, name, value, f"{file}, [{section}] {name}"


def _parse(setting: Setting, text: str) -> Any:
    """Parse a string from the environment as the setting's type; a wrong one is left for the check to report."""
    if setting.type is bool:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(text.lower(), text)
    if setting.type == list[str]:
        return text.split(",")
    try:
        return setting.type(text)
    except ValueError:
        return text


def _convert(raw: dict[str, dict[str, Any]], places: dict[str, str]) -> Config:
    for section, values in raw.items():
        options = get_type_hints(Config)[section]
        for name, value in values.items():
            try:
                msgspec.convert({name: value}, options)
            except msgspec.ValidationError as error:
                setting = next(s for s in settings(section) if s.name == name)
                hint = nearest(str(value), setting.choices) if setting.choices else ""
                raise ConfigError(f"{places[name]}: {refusal(name, value, error)}", hint=hint) from error
    return msgspec.convert(raw, Config)


def refusal(name: str, value: Any, error: msgspec.ValidationError) -> str:
    """Return why the value of a setting is refused. A secret is not repeated, however wrong it is."""
    shown = "its value" if name.endswith(("_key", "_password")) else repr(value)
    return f"{shown} is refused: {str(error).split(' - at ')[0]}."


def nearest(word: str, known: Any) -> str:
    """Return a hint for a name that is not among the known ones."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Possible: {', '.join(sorted({*known}))}."
