"""Engines behind one contract: native, vLLM, remote; found, loaded and falling back by one table."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.backends.failover import start_engine
    from weft.backends.registry import DEFAULT_ENGINE_PRIORITY, check_engine_available, list_engines
    from weft.compat.base_engine import BaseEngine, InferMetrics
    from weft.compat.factory import EngineFactory, create_engine

__all__ = [
    "DEFAULT_ENGINE_PRIORITY",
    "BaseEngine",
    "EngineFactory",
    "InferMetrics",
    "check_engine_available",
    "create_engine",
    "list_engines",
    "start_engine",
]

_HOMES = {
    "BaseEngine": "compat.base_engine",
    "InferMetrics": "compat.base_engine",
    "EngineFactory": "compat.factory",
    "create_engine": "compat.factory",
    "start_engine": "backends.failover",
    "DEFAULT_ENGINE_PRIORITY": "backends.registry",
    "check_engine_available": "backends.registry",
    "list_engines": "backends.registry",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"weft.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'weft.backends' has no attribute {name!r}")
