"""Reads the registry file: models by the names that clients use, each with its own settings.

Every entry becomes a whole `Config`: the server's, with the entry's settings over it. The keys of the CY-LLM Engine's
registry are understood as well (OLD_KEYS).
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from weft.checkpoint.adapter_files import DEFAULT_ADAPTER, adapter_settings
from weft.checkpoint.model_files import SOURCES
from weft.config import Located, locate, nearest, read_located, refusal
from weft.errors import ConfigError, shown
from weft.hub.hub_api import HUB_ID
from weft.migration import PREFERRED_BACKEND, KeyPath
from weft.options import BackendOptions, Config, LoadMode, ModelEntry, Setting, settings

log = logging.getLogger(__name__)

SECTIONS = ("model", "backend", "cache", "scheduler", "engine")
"""Sections that a model may set for itself; the others, and the model's name, are the server's."""
KNOWN = {setting.name: setting for setting in settings(*SECTIONS) if setting.name != "served_model_name"}
OF_SERVER = {setting.name for setting in settings()} - KNOWN.keys()
OWN_KEYS: dict[str, Any] = {
    "path": str,
    "adapter": str,
    "adapters": dict[str, str],
    "load_mode": LoadMode,
    "preload": bool,
    "model_source": Literal[*SOURCES, "local"],
    "use_4bit": bool,
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
SEVERAL_ENGINES = ("auto", "hybrid", "nvidia", "cuda", "ascend", "npu")
"""Names that stand for engines in an order, with vLLM's among them."""
POLL_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")


class ModelRegistry:
    """The entries of a file, which is read again when it changes."""

    def __init__(
        self,
        file: Path | str,
        config: Config,
        *,
        engines: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`file` may be the JSON text itself. `engines` are the names that an entry's engine may have; with none, they
        are not checked here.

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
        if isinstance(self._file, str):
            return None
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def models_source(models_file: str) -> Path | str:
    """Return what --models-file names: a file, or the JSON text that it is itself."""
    return models_file if models_file.lstrip().startswith("{") else Path(models_file).expanduser()


def read_registry(file: Path | str, config: Config, *, engines: Collection[str] = ()) -> dict[str, ModelEntry]:
    """Return the entries by name. Raises ConfigError that names every mistake, each with its line."""
    located = read_located(file) if isinstance(file, Path) else locate(Path("--models-file"), file, ".json")
    notes = _Notes(located)
    config = _with_preferred_backend(notes, config, engines)
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


def _with_preferred_backend(notes: _Notes, config: Config, engines: Collection[str]) -> Config:
    """Return the server's configuration with the engine that a CY-LLM configuration prefers for models that name none,
    unless the server was told one."""
    top = notes.located.value
    if not isinstance(top, dict) or "models" not in top or top.get(PREFERRED_BACKEND) is None:
        return config
    preferred = top[PREFERRED_BACKEND]
    if not isinstance(preferred, str) or (engines and preferred not in engines):
        notes.wrong((PREFERRED_BACKEND,), f"there is no engine {shown(preferred)}.", nearest(str(preferred), engines))
    elif config.backend.engine == BackendOptions().engine:
        return replace(config, backend=replace(config.backend, engine=preferred))
    return config


def _tables(notes: _Notes) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield the entries of a file: under `models`, or the whole of it."""
    top = notes.located.value
    path: KeyPath = ()
    if isinstance(top, dict) and "models" in top:
        for key in top.keys() - {"models", PREFERRED_BACKEND}:
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
        may_be_vllm = any(name in SEVERAL_ENGINES or "vllm" in name for name in names)
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
