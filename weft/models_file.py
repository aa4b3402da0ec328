"""Reads the registry file: models by the names that clients use, each with its own settings.

Every entry becomes a whole `Config`: the server's, with the entry's settings over it. The keys of the CY-LLM Engine's
registry are understood as well (OLD_KEYS).
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from weft.checkpoint.adapter_files import DEFAULT_ADAPTER, adapter_settings
from weft.checkpoint.model_files import SOURCES
from weft.config import nearest, refusal
from weft.errors import ConfigError
from weft.hub.hub_api import HUB_ID
from weft.options import Config, LoadMode, ModelEntry, Setting, settings

MAX_BYTES = 1 << 20
MAX_DEPTH = 4
KeyPath = tuple[str, ...]


class Located(Struct, frozen=True):
    file: Path
    value: Any
    lines: dict[KeyPath, int]

    def place(self, *path: str) -> str:
        """Return file:line of a key, or of the nearest key around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_located(file: Path) -> Located:
    """Read a file and the line of every key. Raises ConfigError for one that is unreadable or has a key twice."""
    parse = _PARSERS.get(file.suffix.lower())
    if parse is None:
        raise ConfigError(f"{file}: the suffix does not tell the format.", hint=f"Known: {', '.join(_PARSERS)}.")
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1).decode()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text.") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES >> 20} MiB.")
    value, lines = parse(file, text)
    return Located(file, value, lines)


class _Lines:
    """The line of every key; a key that is there twice is refused."""

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
            hint="Run `pip install 'weft[yaml]'`, or write the file as TOML or JSON.",
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


log = logging.getLogger(__name__)

SECTIONS = ("model", "backend", "cache", "scheduler", "engine")
"""Sections that a model may set for itself; the others, and the model's name, are the server's."""
KNOWN = {setting.name: setting for setting in settings(*SECTIONS) if setting.name != "served_model_name"}
OF_SERVER = {setting.name for setting in settings()} - KNOWN.keys()
ONE_VALUE = {"kv_cache_dtype": "auto"}
"""Keys that are accepted with one value only: the one that describes what happens anyway."""
OWN_KEYS: dict[str, Any] = {
    "path": str,
    "adapter": str,
    "adapters": dict[str, str],
    "load_mode": LoadMode,
    "preload": bool,
    "model_source": Literal[*SOURCES, "local"],
    "use_4bit": bool,
    **{key: Literal[value] for key, value in ONE_VALUE.items()},
}
OLD_KEYS = {"model_path": "path", "model": "path", "adapter_path": "adapter"}
"""Keys of the CY-LLM Engine that have another name here."""
MEANINGLESS = (
    "enable_prompt_cache",
    "prompt_cache_ttl",
    "interactive_quantization",
    "skip_validation",
    "use_safetensors",
)
"""Keys of the CY-LLM Engine without an effect here: answers are not kept, no question is asked while a model loads,
files are always checked, and only safetensors and GGUF are read. One warning names them all. `load_model` knows them
too (compat/keywords)."""
FOUR_BIT = "bitsandbytes"
POLL_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")


class ModelRegistry:
    """The entries of a file, which is read again when it changes."""

    def __init__(
        self,
        file: Path,
        config: Config,
        *,
        engines: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines` are the names that an entry's engine may have; with none, they are not checked here.

        Raises ConfigError that names every mistake in the file."""
        self._file = file
        self._config = config
        self._engines = engines
        self._clock = clock
        self._next_look = 0.0
        self._seen = self._state()
        self.entries: Mapping[str, ModelEntry] = read_registry(file, config, engines=engines)

    def refresh(self) -> bool:
        """Reload a file that has changed, and return whether it did. A broken file is logged and changes nothing. The
        file is looked at once a second at most."""
        if self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + POLL_SECONDS
        if self._state() == self._seen:
            return False
        try:
            self.reload()
        except ConfigError as error:
            log.error("the models stay as they were: %s", error)
            return False
        return True

    def reload(self) -> None:
        """Read the file now. Raises ConfigError that names every mistake; the entries stay as they were then."""
        self._seen = self._state()
        self.entries = read_registry(self._file, self._config, engines=self._engines)
        log.info("the models were read again: %s", ", ".join(self.entries))

    def _state(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def read_registry(file: Path, config: Config, *, engines: Collection[str] = ()) -> dict[str, ModelEntry]:
    """Return the entries by name. Raises ConfigError that names every mistake, each with its line."""
    notes = _Notes(read_located(file))
    entries = {path[-1]: _Entry(notes, path, config, engines).read(table) for path, table in _tables(notes)}
    notes.report()
    return entries


class _Notes:
    """The mistakes and warnings about a file, reported all at once."""

    def __init__(self, located: Located) -> None:
        self.located = located
        self.mistakes: list[str] = []
        self.meaningless: list[str] = []
        self.outdated: list[str] = []

    def wrong(self, path: KeyPath, problem: str, hint: str = "") -> None:
        self.mistakes.append(f"{self.located.place(*path)}: {problem} {hint}".strip())

    def report(self) -> None:
        """Raise ConfigError for mistakes, and log warnings."""
        if len(self.mistakes) == 1:
            raise ConfigError(self.mistakes[0])
        if self.mistakes:
            file = self.located.file
            raise ConfigError("\n".join([f"{file}: {len(self.mistakes)} mistakes:", *self.mistakes]))
        if self.meaningless:
            log.warning("keys without an effect here are ignored: %s", ", ".join(self.meaningless))
        for text in self.outdated:
            log.warning("%s", text)


def _tables(notes: _Notes) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield the entries of a file: under `models`, or the whole of it."""
    top = notes.located.value
    path: KeyPath = ()
    if isinstance(top, dict) and "models" in top:
        for key in top.keys() - {"models"}:
            notes.wrong((str(key),), f"there is no key {key!r} beside models.")
        top, path = top["models"], ("models",)
    if not isinstance(top, dict) or not top:
        notes.wrong(path, "models must be a table: the settings of each by its name.")
        return
    for name, table in top.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            notes.wrong((*path, str(name)), f"{name!r} cannot be the name of a model: letters, digits and ._:/@+- can.")
        elif not isinstance(table, dict):
            notes.wrong((*path, name), f"{name} must be a table of settings.")
        else:
            yield (*path, name), table


class _Entry:
    """The reader of one entry."""

    def __init__(self, notes: _Notes, path: KeyPath, base: Config, engines: Collection[str]) -> None:
        self._notes = notes
        self._path = path
        self._base = base
        self._engines = engines
        self._given: dict[str, str] = {}
        """The key that was written, by the key that it means."""
        self._own: dict[str, Any] = {}
        self._settings: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}

    def read(self, table: dict[str, Any]) -> ModelEntry:
        for key, value in table.items():
            # In JSON and YAML null stands for a key that is not given.
            if value is not None:
                self._take(str(key), value)
        self._settle_quantization()
        self._check_engine()
        adapters = self._adapters()
        return ModelEntry(
            name=self._path[-1],
            config=self._config(adapters),
            adapters=adapters,
            load_mode=self._own.get("load_mode", "check_and_load"),
            preload=self._own.get("preload", False),
            place=self._notes.located.place(*self._path),
        )

    def _wrong(self, key: str, problem: str, hint: str = "") -> None:
        self._notes.wrong((*self._path, self._given.get(key, key)), problem, hint)

    def _take(self, written: str, value: Any) -> None:
        key = OLD_KEYS.get(written, written)
        if key in self._given:
            self._wrong(written, f"{written} means the same as {self._given[key]}.", "Give one of them.")
            return
        self._given[key] = written
        if key in MEANINGLESS:
            self._notes.meaningless.append(f"{self._notes.located.place(*self._path, written)} {written}")
        elif key in OWN_KEYS:
            self._take_own(key, value)
        elif key in KNOWN:
            self._take_setting(KNOWN[key], "" if (key, value) == ("quantization", "none") else value)
        elif key in OF_SERVER:
            self._wrong(key, f"{key} is the server's, and cannot be set for one model.")
        else:
            known = (*KNOWN, *OWN_KEYS, *OLD_KEYS, *MEANINGLESS)
            self._wrong(key, f"there is no key {key!r}.", nearest(key, known))

    def _take_own(self, key: str, value: Any) -> None:
        try:
            self._own[key] = msgspec.convert(value, OWN_KEYS[key])
        except msgspec.ValidationError as error:
            choices = [choice for choice in get_args(OWN_KEYS[key]) if isinstance(choice, str)]
            self._wrong(
                key,
                f"{self._given[key]}: {refusal(key, value, error)}",
                nearest(str(value), choices) if choices else "",
            )

    def _take_setting(self, setting: Setting, value: Any) -> None:
        try:
            converted = msgspec.convert({setting.name: value}, get_type_hints(Config)[setting.section])
        except msgspec.ValidationError as error:
            hint = nearest(str(value), setting.choices) if setting.choices else ""
            self._wrong(setting.name, f"{setting.name}: {refusal(setting.name, value, error)}", hint)
        else:
            self._settings[setting.section][setting.name] = getattr(converted, setting.name)

    def _settle_quantization(self) -> None:
        if "use_4bit" not in self._own:
            return
        place = self._notes.located.place(*self._path, "use_4bit")
        self._notes.outdated.append(f"{place}: use_4bit is outdated: write quantization = bitsandbytes.")
        if self._own["use_4bit"]:
            method = self._settings["backend"].setdefault("quantization", FOUR_BIT)
            if method != FOUR_BIT:
                self._wrong("use_4bit", f"use_4bit means {FOUR_BIT}, and quantization is {method!r}.")

    def _check_engine(self) -> None:
        backend = self._settings["backend"]
        names = [name.strip() for name in backend.get("engine", self._base.backend.engine).split(",")]
        for name in names if self._engines and "engine" in backend else ():
            if name != "auto" and name not in self._engines:
                self._wrong("engine", f"there is no engine {name!r}.", nearest(name, self._engines))
        may_be_vllm = any(name in ("auto", "hybrid") or "vllm" in name for name in names)
        if backend.get("trust_remote_code") and not may_be_vllm:
            self._wrong("trust_remote_code", "only vLLM ever runs code that comes with a model.")

    def _config(self, adapters: dict[str, str]) -> Config:
        """Return the server's configuration with the entry's settings over it."""
        own: dict[str, dict[str, Any]] = {
            "model": {
                "model": self._model(),
                "served_model_name": self._path[-1],
                "revision": "",
                "adapter": adapter_settings(adapters),
            },
            "backend": {"trust_remote_code": False},
        }
        sections = {
            section: replace(getattr(self._base, section), **own.get(section, {}) | values)
            for section, values in self._settings.items()
        }
        return replace(self._base, **sections)

    def _adapters(self) -> dict[str, str]:
        """Return the adapters' directories by name."""
        adapters: dict[str, str] = {}
        if "adapter" in self._own:
            adapters[DEFAULT_ADAPTER] = self._folder(self._own["adapter"], "adapter")
        for name, path in self._own.get("adapters", {}).items():
            adapters[name] = self._folder(path, "adapters", name)
        return adapters

    def _folder(self, path: str, key: str, *keys: str) -> str:
        found = self._beside_file(path)
        if not self._is_remote() and not Path(found).expanduser().is_dir():
            self._notes.wrong((*self._path, self._given[key], *keys), f"{found}: there is no such directory.")
        return found

    def _model(self) -> str:
        """Return the model as --model takes it."""
        source = self._own.get("model_source")
        path: str = self._own.get("path", "")
        if not path:
            if "path" not in self._given and not self._is_remote():
                self._notes.wrong(self._path, f"{self._path[-1]} has no path.", "A file, a directory or a hub id.")
            return self._path[-1]
        if source in SOURCES:
            if not HUB_ID.fullmatch(path):
                self._wrong("path", f"{path!r} is no model of {source}: its models are named org/name.")
            return f"{source}:{path}"
        found = self._beside_file(path)
        is_path = source == "local" or path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf")
        if is_path and not self._is_remote() and not Path(found).expanduser().exists():
            self._wrong("path", f"{found}: there is no such file or directory.")
        return found

    def _is_remote(self) -> bool:
        """Return whether the model runs on a remote server, so that it need not be named here."""
        return bool(self._settings["backend"].get("engine_url", self._base.backend.engine_url))

    def _beside_file(self, path: str) -> str:
        """Resolve a path that begins with a dot against the folder of the registry file."""
        return os.path.normpath(self._notes.located.file.absolute().parent / path) if path.startswith(".") else path
