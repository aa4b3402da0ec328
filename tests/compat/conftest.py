"""The fixtures of engines are those of the backends' tests."""

from __future__ import annotations

from tests.backends.conftest import add_engine, no_weft_environment, table

__all__ = ["add_engine", "no_weft_environment", "table"]
