"""Engines that are in the table for the length of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.backends import registry
from weft.backends.registry import EngineSpec


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered in a test is forgotten after it."""
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def add_engine(table: None) -> Callable[..., None]:
    """`add_engine(name, start, **fields)`."""

    def add(name: str, start: Any, **fields: Any) -> None:
        registry.register(EngineSpec(name=name, start=start, **({"platform": "any", "about": "a test's"} | fields)))

    return add


@pytest.fixture
def no_weft_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(("WEFT_", "CY_LLM_")) and name != "WEFT_HOME"]:
        monkeypatch.delenv(name)
