"""Starting an engine of the table, or of several in order the first that starts."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from weft.backends.contract import Engine
from weft.backends.registry import EngineSpec, Refuse, configured_engines, obstacle
from weft.backends.safe_loading import Start
from weft.config import differences
from weft.errors import ConfigError, OutOfMemory, Unavailable
from weft.machine.memory import as_out_of_memory
from weft.options import Config, Setting, settings

log = logging.getLogger(__name__)

T = TypeVar("T")
Load = Callable[[Start, Config], Awaitable[T]]
"""Loads an engine by its start, once it is known which."""


_STARTS_OF_CLASSES: list[tuple[type, Callable[[Any, Config], Awaitable[Engine]]]] = []


def register_class(base: type, start: Callable[[Any, Config], Awaitable[Engine]]) -> None:
    """Let the engine table name classes of `base`, which `start` makes engines of."""
    _STARTS_OF_CLASSES.append((base, start))


def class_named(spec: EngineSpec) -> type | None:
    """Return the class that a line of the table names; None: it names something else. Raises ConfigError."""
    target = _imported(spec, spec.start)
    return target if isinstance(target, type) else None


def refusal_of(spec: EngineSpec) -> Refuse:
    """Return the function that raises for settings and files that an engine cannot honour."""
    return cast(Refuse, _imported(spec, spec.refuse))


def _imported(spec: EngineSpec, target: object) -> object:
    """Return the object that an entry of the table names."""
    if isinstance(target, str):
        module, _, name = target.partition(":")
        try:
            target = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise ConfigError(
                f"The engine {spec.name} cannot be imported from {target}: {_told(error)}.",
                hint=spec.install and f"Try: {spec.install}",
            ) from error
    return target


def _start_of(spec: EngineSpec) -> Start:
    target = _imported(spec, spec.start)
    if isinstance(target, type):
        for base, start in _STARTS_OF_CLASSES:
            if issubclass(target, base):
                return partial(start, target)
    if not inspect.iscoroutinefunction(target):
        raise ConfigError(
            f"The engine {spec.name} is named as {spec.start!r}, which is neither a coroutine function from Config to "
            "Engine nor a class of BaseEngine."
        )
    return target


async def start_one(spec: EngineSpec, config: Config, load: Load[T]) -> T:
    """Start this engine and no other. It finds its own name in the configuration."""
    if why := obstacle(spec, config):
        raise ConfigError(f"The engine {spec.name} cannot be used: {why}.")
    return await _start(spec, config, load)


async def _start(spec: EngineSpec, config: Config, load: Load[T]) -> T:
    return await load(_start_of(spec), replace(config, backend=replace(config.backend, engine=spec.name)))


async def start_first(specs: Sequence[EngineSpec], config: Config, load: Load[T]) -> tuple[T, Sequence[EngineSpec]]:
    """The first of these engines that starts, and those that were not tried. One warning tells of all before it.

    Raises, with every reason, when none starts: OutOfMemory where all that were tried were short of memory, or else
    Unavailable. Of one engine alone it raises what kept it.
    """
    if len(specs) == 1:
        return await start_one(specs[0], config, load), ()
    failed: list[str] = []
    shortages: list[bool] = []
    for number, spec in enumerate(specs, 1):
        if why := obstacle(spec, config):
            failed.append(f"{spec.name}: {why}")
            continue
        try:
            engine = await _start(spec, config, load)
        except Exception as error:  # noqa: BLE001 - told with the others, whatever it is
            failed.append(f"{spec.name}: {_told(error)}")
            shortages.append(as_out_of_memory(error) is not None)
            log.info("The engine %s did not start: %s", spec.name, _told(error))
            continue
        if failed:
            log.warning("The engine %s is used; others did not start: %s.", spec.name, "; ".join(failed))
        return engine, specs[number:]
    kind = OutOfMemory if shortages and all(shortages) else Unavailable
    raise kind(f"No engine could be started: {'; '.join(failed)}.")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


HELD_HERE = {
    "revision", "load_format", "image_model", "device", "dtype", "threads", "quantization", "tensor_parallel_size",
    *(setting.name for setting in settings("cache", "scheduler")),
}  # fmt: skip


def chosen_engines(config: Config) -> tuple[EngineSpec, ...]:
    """Return the engines of a configuration, in order. Raises ConfigError for a setting that none can honour: where
    one of several holds the model here, it is for that one."""
    specs = configured_engines(config)
    if config.backend.engine_url and not any(spec.needs_url for spec in specs):
        raise ConfigError(
            f"--engine-url is set, and the engine {', '.join(spec.name for spec in specs)} takes no URL.",
            hint="Add --engine remote, or remove --engine-url.",
        )
    if are_elsewhere(specs):
        for setting, value in _held_here(config):
            # No image model is what there is.
            if (setting.name, value) != ("image_model", "none"):
                raise ConfigError(
                    f"The engine {specs[0].name} does not support {setting.flag} ({value}).",
                    hint="Set it on the server at --engine-url, or remove it.",
                )
    return specs


def are_elsewhere(specs: Sequence[EngineSpec]) -> bool:
    return all(spec.needs_url for spec in specs)


def without_servers_own(config: Config, server: Config) -> Config:
    """Return the configuration without the server's settings for models on its machine: they do not concern a remote
    one."""
    for setting, value in _held_here(config):
        section = getattr(config, setting.section)
        if value == getattr(getattr(server, setting.section), setting.name):
            config = replace(config, **{setting.section: replace(section, **{setting.name: setting.default})})
    return config


def _held_here(config: Config) -> Iterator[tuple[Setting, object]]:
    """Return those of these settings that are set."""
    return ((setting, value) for setting, value in differences(config) if setting.name in HELD_HERE)
