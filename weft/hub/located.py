"""Reading a JSON, YAML or TOML file so that every key's line is known."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from weft.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 4
KeyPath = tuple[str, ...]


class Located(Struct, frozen=True):
    file: Path
    value: Any
    lines: dict[KeyPath, int]

    def place(self, *path: str) -> str:
        """file:line of a key, or of the nearest around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_located(file: Path) -> Located:
    """Raises ConfigError for a file that cannot be read or parsed, or that has a key twice."""
    parse = _PARSERS.get(file.suffix.lower())
    if parse is None:
        raise ConfigError(f"{file}: what kind of file it is is told by its end.", hint=f"{', '.join(_PARSERS)}.")
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1).decode()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: this is no text.") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{file}: this is larger than such a file can be.")
    value, lines = parse(file, text)
    return Located(file, value, lines)


class _Lines:
    """The line of every key, and of none a second one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.by_path: dict[KeyPath, int] = {}

    def put(self, path: KeyPath, line: int) -> None:
        if path in self.by_path:
            raise ConfigError(f"{self.file}:{line}: {path[-1]!r} is there twice: first in line {self.by_path[path]}.")
        self.by_path[path] = line


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')


def _json(file: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid JSON: {error.msg}.") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not valid JSON: nested too deep.") from error
    # That it is valid is known: a string before a colon is a key, and what is open tells whose.
    lines = _Lines(file)
    path: list[str] = []
    line, counted_to = 1, 0
    string, string_line, key = "", 1, ""
    for token in _JSON_TOKEN.finditer(text):
        line += text.count("\n", counted_to, token.start())
        counted_to = token.start()
        match token[0]:
            case "{" | "[":
                # What stands in a list is told apart by where it begins.
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
        told = re.search(r"line (\d+)", str(error))
        raise ConfigError(f"{file}:{told[1] if told else 1}: not valid TOML: {error}.") from error
    # That it is valid is known: the fewest lines that are valid by themselves are one statement.
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
    """Every key in a value, those outside first."""
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
            hint="Run `pip install 'weft[yaml]'`, or write the file as TOML or JSON.",
        ) from error
    lines = _Lines(file)

    def walk(node: Any, path: KeyPath) -> None:
        # Deeper there are no keys that anybody asks for, and aliases could make it endless.
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
