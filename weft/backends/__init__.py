"""Engines behind one contract: native, vLLM, remote; found, loaded and falling back by one table."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.backends.base import BaseEngine, InferMetrics
    from weft.backends.factory import EngineFactory, create_engine
    from weft.backends.hybrid import start_engine
    from weft.backends.registry import DEFAULT_ENGINE_PRIORITY, check_engine_available, list_engines

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
    "BaseEngine": "base",
    "InferMetrics": "base",
    "EngineFactory": "factory",
    "create_engine": "factory",
    "start_engine": "hybrid",
    "DEFAULT_ENGINE_PRIORITY": "registry",
    "check_engine_available": "registry",
    "list_engines": "registry",
}


def __getattr__(name: str) -> object:
    """Public names are imported when they are asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"weft.backends.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'weft.backends' has no attribute {name!r}")
