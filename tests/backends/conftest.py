"""Engines that are in the table for the length of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weft.backends import registry
from weft.backends.registry import EngineSpec


@pytest.fixture
def add_engine() -> Iterator[Callable[..., None]]:
    """`add_engine(name, start, **fields)`."""
    added: list[str] = []

    def add(name: str, start: Any, **fields: Any) -> None:
        registry.register(EngineSpec(name=name, start=start, **({"platform": "any", "about": "a test's"} | fields)))
        added.append(name)

    yield add
    for name in added:
        registry.unregister(name)


@pytest.fixture
def no_weft_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(("WEFT_", "CY_LLM_")) and name != "WEFT_HOME"]:
        monkeypatch.delenv(name)
