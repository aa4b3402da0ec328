"""Engines by name, for callers that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft import config as configuration
from weft.backends import registry
from weft.backends.registry import EngineSpec, Platform, engines_in_order, why_unavailable
from weft.backends.starting import class_named
from weft.compat.base_engine import BaseEngine
from weft.compat.hosted import HostedEngine
from weft.errors import Unavailable


class EngineFactory:
    @staticmethod
    def create(engine_type: str = "auto", **settings: Any) -> BaseEngine:
        """An engine without a model: `load_model` is next. Names as in `--engine`; auto asks the environment first
        (WEFT_ENGINE), then the machine. `settings` are those of `weft serve`."""
        specs = engines_in_order(engine_type)
        if (
            len(specs) == 1
            and (engine_class := class_named(specs[0])) is not None
            and issubclass(engine_class, BaseEngine)
        ):
            return engine_class(**settings)
        return HostedEngine(engine_type, **settings)

    @staticmethod
    def register(
        engine_type: str,
        start: str | Callable[..., Any],
        *,
        platform: Platform = "any",
        about: str = "",
        takes_adapters: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Add an engine to the one table: a class of BaseEngine, a coroutine function from Config to Engine, or where
        either is found ("module:name"). Packages say the same with an entry point of the group weft.engines.
        `takes_adapters`: it honours --adapter; one that does not is passed over where there are adapters."""
        spec = EngineSpec(name=engine_type, start=start, platform=platform, about=about, takes_adapters=takes_adapters)
        registry.register(spec, overwrite=overwrite)

    @staticmethod
    def auto_detect() -> str:
        """The engine that auto would try first of those that can be used here, with the settings of the environment.
        Loads no model."""
        config, reasons = configuration.load(), []
        for spec in engines_in_order(config.backend.engine, config.model.device):
            why_not = why_unavailable(spec.name, config)
            if not why_not:
                return spec.name
            reasons.append(f"{spec.name}: {why_not}")
        raise Unavailable(f"No engine can be used here: {'; '.join(reasons)}.")


create_engine = EngineFactory.create
