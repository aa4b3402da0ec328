"""The API knows the engine by its contract alone, and the command line loads nothing that it does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("weft.cli.main", ["fastapi", "uvicorn", "pydantic", "prometheus_client", "torch", "tokenizers", "asyncio"]),
        ("weft.api.server", ["torch", "weft.engine", "weft.scheduler", "weft.worker", "weft.model", "weft.hub"]),
        ("weft.api.app", ["numpy", "llguidance"]),
        ("weft.terminal", ["torch", "fastapi", "weft.engine", "weft.hub"]),
    ],
)
def test_a_module_does_not_load(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
