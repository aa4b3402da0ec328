"""Loads the configuration. Precedence: flag, then environment (WEFT_MAX_NUM_SEQS), then file, then default."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from weft.errors import ConfigError, shown
from weft.migration import CY_LLM_KEYS, PREFERRED_BACKEND, PYPTO_KEYS, VARIABLES, KeyPath, Refused
from weft.options import Config, Setting, settings
from weft.switches import SHARED_GPU, switched_off

RESERVED_ENV = frozenset({"WEFT_HOME", "WEFT_COMPILE_CACHE", "WEFT_WITHOUT", "WEFT_URL", SHARED_GPU})
"""Variables that are no settings: the folders of pulled models and of compiled kernels, weft/switches.py's, the server
that commands talk to, and the one by which tests let ranks share a GPU."""

MAX_BYTES = 1 << 20
RENAMED_SECTIONS = {"fleet": "model_pool"}
"""Sections that older files have under other names."""
MAX_DEPTH = 4
"""Keys of a file of settings are not looked for deeper."""


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    places: dict[str, str] | None = None,
) -> Config:
    """Load the configuration from flags by field name, environment and file. Raises ConfigError.

    `defaults` are a command's own: they hold where none of the three says otherwise. `places` is filled with where each
    setting that was given comes from.
    """
    known = {name: setting for setting in settings() for name in (setting.name, setting.old_name) if name}
    raw: dict[str, dict[str, Any]] = {}
    places = {} if places is None else places

    def put(name: str, value: Any, place: str) -> None:
        if name not in known:
            raise ConfigError(f"{place}: there is no setting {name!r}.", hint=nearest(name, known))
        raw.setdefault(known[name].section, {})[known[name].name] = value
        places[known[name].name] = place

    for name, value in (defaults or {}).items():
        put(name, value, "default")
    for section, name, value, place in _from_file(file):
        if section and name in known and known[name].section != section:
            raise ConfigError(f"{place}: {name} is in [{section}].", hint=f"It belongs in [{known[name].section}].")
        put(name, value, place)
    environment = os.environ if env is None else env
    switched_off(environment)
    for name, value, place in _of_old_variables(environment, known):
        put(name, value, place)
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
    """Yield section, name, value and place of every setting in a file; the section is empty where the file is another
    system's. In JSON and YAML null stands for what is not given."""
    if file is None:
        return
    located = read_located(file, ".toml")
    if not isinstance(located.value, dict | None):
        raise ConfigError(f"{file}: not a table of sections.", hint="`weft config init` writes one.")
    tables = {str(section): table for section, table in (located.value or {}).items()}
    sections = get_type_hints(Config)
    if kind := _other_system(tables, sections):
        for path, name, value in _foreign_settings(located, tables, kind):
            yield "", name, value, f"{located.place(*path)}, {'.'.join(path)}"
        return
    for named, table in tables.items():
        section = RENAMED_SECTIONS.get(named, named)
        if section not in sections or not isinstance(table, dict | None):
            hint = _OF_MODELS_FILE if section in (PREFERRED_BACKEND, "models") else nearest(section, sections)
            raise ConfigError(f"{located.place(named)}: there is no section [{named}].", hint=hint)
        for name, value in (table or {}).items():
            if value is not None:
                yield section, str(name), value, f"{located.place(named, str(name))}, [{named}] {name}"


_OF_MODELS_FILE = "Models are listed in a file of their own (--models-file); the engine is [backend] engine."


def _other_system(tables: dict[str, Any], sections: Collection[str]) -> str:
    """Return which system's configuration a file is, if it is not Weft's."""
    if tables.keys() & {PREFERRED_BACKEND, "models"} and tables.keys().isdisjoint(sections):
        return "CY-LLM"
    model = tables.get("model")
    names_a_model = isinstance(model, dict) and bool(model.keys() & {"model_id", "model_dir"})
    is_pypto = names_a_model or tables.keys() - {"model"}
    return "PyPTO" if tables.keys() <= {path[0] for path in PYPTO_KEYS} and is_pypto else ""


def _foreign_settings(located: Located, tables: dict[str, Any], kind: str) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield key, name and value of the settings in another system's file. Raises ConfigError for what is refused."""
    keys: dict[KeyPath, Any] = {}
    known = CY_LLM_KEYS if kind == "CY-LLM" else PYPTO_KEYS
    for section, table in tables.items():
        if kind == "PyPTO" and isinstance(table, dict):
            keys |= {(section, str(key)): value for key, value in table.items()}
        else:
            keys[(section,)] = table
    mistakes = []
    for path, value in keys.items():
        meaning = known.get(path)
        place = f"{located.place(*path)}: {'.'.join(path)}"
        if meaning is None:
            names = ", ".join(".".join(name) for name in known)
            mistakes.append(f"{place}: a configuration of {kind} has no such key. It has {names}.")
        elif isinstance(meaning, Refused) and value not in (None, meaning.unless):
            mistakes.append(f"{place} ({shown(value)}) is refused. {meaning.instead}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    for path, value in keys.items():
        meaning = known[path]
        if isinstance(meaning, str) and value is not None:
            if path == ("models",):
                value = str(located.file)
            elif (path, value) == (("runtime", "backend"), "cpu"):
                meaning = "device"
            yield path, meaning, value


def _of_old_variables(environment: Mapping[str, str], known: Mapping[str, Setting]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and place of the settings that variables of the CY-LLM Engine give, and Weft's own do not.
    Raises ConfigError for all that are refused or unknown, and for two that contradict each other."""
    mistakes: list[str] = []
    given: dict[str, tuple[Any, str]] = {}
    for variable, text in environment.items():
        meaning = VARIABLES.get(variable)
        if not text or (meaning is None and not variable.startswith("CY_LLM_")):
            continue
        if meaning is None:
            mistakes.append(f"{variable} is no variable of the CY-LLM Engine. {nearest(variable, VARIABLES)}")
        elif isinstance(meaning, Refused):
            if meaning.unless is None or _SWITCH.get(text.lower()) is not meaning.unless:
                mistakes.append(f"{variable} is refused. {meaning.instead}")
        elif not environment.get(known[meaning].env):
            value = [text] if known[meaning].type == list[str] else _parse(known[meaning], text)
            before, others = given.get(meaning, (value, ""))
            if isinstance(value, list) and others:
                value = [*dict.fromkeys(before + value)]
            elif before != value:
                mistakes.append(f"{others} and {variable} contradict each other. Set {known[meaning].env} alone.")
            given[meaning] = value, f"{others}, {variable}" if others else variable
    if mistakes:
        raise ConfigError("\n".join(f"environment: {mistake}" for mistake in mistakes))
    for name, (value, variables) in given.items():
        yield name, value, f"environment variable {variables}"


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse(setting: Setting, text: str) -> Any:
    """Parse a string from the environment as the setting's type; a wrong one is left for the check to report."""
    if setting.type is bool:
        return _SWITCH.get(text.lower(), text)
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
    return f"{shown_value(name, value)} is refused: {str(error).split(' - at ')[0]}."


def shown_value(name: str, value: Any) -> str:
    """Return the value of a setting for an error or a table, without what is secret."""
    return "its value" if name.endswith(("_key", "_password")) else shown(value)


FORMATS = {"toml": (".toml",), "yaml": (".yaml", ".yml"), "json": (".json",)}
"""The formats of a file of settings, and their suffixes."""


def template(form: str) -> str:
    """Return a file with every setting at its default, by section: as a comment with its documentation, or in JSON,
    which has no comments, as a value."""
    if form == "json":
        return json.dumps(msgspec.to_builtins(Config()), indent=2) + "\n"
    lines = ["# The settings of `weft serve`. What is commented out is at its default."]
    for section, options in get_type_hints(Config).items():
        lines += ["", f"# {options.__doc__}", f"[{section}]" if form == "toml" else f"{section}:"]
        for setting in settings(section):
            choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
            value = json.dumps(setting.default)
            line = f"# {setting.name} = {value}" if form == "toml" else f"  # {setting.name}: {value}"
            lines += ["", f"{'' if form == 'toml' else '  '}# {setting.doc}{choices}", line]
    return "\n".join(lines) + "\n"


def differences(config: Config) -> Iterator[tuple[Setting, Any]]:
    """Yield the settings that are not at their default, with their values."""
    for setting in settings():
        value = getattr(getattr(config, setting.section), setting.name)
        if value != setting.default:
            yield setting, value


def nearest(word: str, known: Any) -> str:
    """Return a hint for a name that is not among the known ones."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Possible: {', '.join(sorted({*known}))}."


class Located(Struct, frozen=True):
    """A file's value, and where its keys are."""

    file: Path
    value: Any
    lines: dict[KeyPath, int]

    def place(self, *path: str) -> str:
        """Return file:line of a key, or of the nearest key around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_located(file: Path, otherwise: str = "") -> Located:
    """Read a file and the line of every key. `otherwise` is the suffix to assume where the file's own tells no format.
    Raises ConfigError for one that is unreadable or has a key twice."""
    suffix = file.suffix.lower() if file.suffix.lower() in _PARSERS else otherwise
    if not suffix:
        raise ConfigError(f"{file}: unknown file format.", hint=f"Name it with one of {', '.join(_PARSERS)}.")
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1).decode()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text.") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES >> 20} MiB.")
    return locate(file, text, suffix)


def locate(file: Path, text: str, suffix: str) -> Located:
    """Parse the text of a file, or a text that errors call by the name of one."""
    value, lines = _PARSERS[suffix](file, text)
    return Located(file, value, lines)


class _Lines:
    """The line of every key; a key that is there twice is refused."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.by_path: dict[KeyPath, int] = {}

    def put(self, path: KeyPath, line: int) -> None:
        if path in self.by_path:
            raise ConfigError(f"{self.file}:{line}: duplicate key {path[-1]!r}, first on line {self.by_path[path]}.")
        self.by_path[path] = line


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')


def _json(file: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid JSON: {error.msg}.") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not valid JSON: nested too deep.") from error
    # The text is valid JSON: a string before a colon is a key of the innermost open object.
    lines = _Lines(file)
    path: list[str] = []
    line, counted_to = 1, 0
    string, string_line, key = "", 1, ""
    for token in _JSON_TOKEN.finditer(text):
        line += text.count("\n", counted_to, token.start())
        counted_to = token.start()
        match token[0]:
            case "{" | "[":
                # Items of a list are told apart by where they begin.
                path.append(key or str(token.start()))
                key = ""
            case "}" | "]":
                path.pop()
            case ":":
                key = json.loads(string)
                lines.put((*path[1:], key), string_line)
            case ",":
                key = ""
            case _:
                string, string_line = token[0], line
    return value, lines.by_path


def _toml(file: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        value = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        at = re.search(r"line (\d+)", str(error))
        raise ConfigError(f"{file}:{at[1] if at else 1}: not valid TOML: {error}.") from error
    # The text is valid TOML: the fewest lines that are valid by themselves are one statement.
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    statement, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        try:
            said = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        paths = list(_paths(said))
        if statement.lstrip().startswith("["):
            table = paths[-1]
            lines |= {path: first for path in paths if path not in lines}
        else:
            lines |= {(*table, *path): first for path in paths}
        statement, first = "", number + 1
    return value, lines


def _paths(value: Any) -> list[KeyPath]:
    """Return the path of every key in a value, outer keys first."""
    if isinstance(value, list):
        return [path for item in value for path in _paths(item)]
    if not isinstance(value, dict):
        return []
    return [path for key, inner in value.items() for path in ((key,), *((key, *rest) for rest in _paths(inner)))]


def _yaml(file: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{file}: reading YAML needs PyYAML, which is not installed.",
            hint="Run `pip install 'weft-serve[yaml]'`, or write the file as TOML or JSON.",
        ) from error
    lines = _Lines(file)

    def walk(node: Any, path: KeyPath) -> None:
        # Deeper keys are never looked up, and aliases could make the walk endless.
        if isinstance(node, yaml.MappingNode) and len(path) < MAX_DEPTH:
            for key, value in node.value:
                inner = (*path, str(key.value))
                lines.put(inner, key.start_mark.line + 1)
                walk(value, inner)

    try:
        walk(yaml.compose(text, yaml.SafeLoader), ())
        return yaml.safe_load(text), lines.by_path
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{file}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {str(error) or type(error).__name__}.") from error


_PARSERS: dict[str, Callable[[Path, str], tuple[Any, dict[KeyPath, int]]]] = {
    ".json": _json,
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
}
