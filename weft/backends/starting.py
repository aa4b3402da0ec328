"""Starting an engine of the table, or of several in order the first that starts."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from msgspec.structs import replace

from weft.backends.adapted import start_adapted
from weft.backends.base import BaseEngine
from weft.backends.loading import Start
from weft.backends.registry import EngineSpec, Refuse, obstacle
from weft.config import Config
from weft.errors import ConfigError, OutOfMemory, Unavailable
from weft.hub.memory import as_out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")
Load = Callable[[Start, Config], Awaitable[T]]
"""What is done with an engine's start, once it is known which."""


def class_of(spec: EngineSpec) -> type[BaseEngine] | None:
    """Of an engine that keeps the contract for callers that wait, and nothing else. Raises ConfigError."""
    target = _imported(spec, spec.start)
    return target if isinstance(target, type) and issubclass(target, BaseEngine) else None


def refusal_of(spec: EngineSpec) -> Refuse:
    """What raises for settings and files that an engine cannot honour."""
    return cast(Refuse, _imported(spec, spec.refuse))


def _imported(spec: EngineSpec, target: object) -> object:
    """What a line of the table names."""
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
    engine_class = class_of(spec)
    if engine_class is not None:
        return partial(start_adapted, engine_class)
    target = _imported(spec, spec.start)
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
            log.warning("The engine %s is used; before it were tried: %s.", spec.name, "; ".join(failed))
        return engine, specs[number:]
    kind = OutOfMemory if shortages and all(shortages) else Unavailable
    raise kind(f"No engine could be started: {'; '.join(failed)}.")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
