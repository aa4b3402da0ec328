"""The scheduler stands on the ground alone: no torch, no numpy, no other room of Weft."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys

import pytest

import weft.scheduler

GROUND = {
    "weft",
    "weft.types",
    "weft.engine_stats",
    "weft.plan",
    "weft.errors",
    "weft.config",
    "weft.options",
    "weft.payloads",
}
MODULES = [
    "weft.scheduler",
    *(f"weft.scheduler.{module.name}" for module in pkgutil.iter_modules(weft.scheduler.__path__)),
]


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Everything that a fresh interpreter holds after importing the whole room."""
    script = f"import json, sys, {', '.join(MODULES)}; print(json.dumps(sorted(sys.modules)))"
    # What measures coverage imports modules of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_whole_room_was_imported(loaded: set[str]) -> None:
    assert (
        {"weft.scheduler.scheduler", "weft.scheduler.block_pool", "weft.scheduler.integrity"} <= set(MODULES) <= loaded
    )


def test_no_other_room_is_imported(loaded: set[str]) -> None:
    weft_modules = {name for name in loaded if name.split(".")[0] == "weft"}
    assert weft_modules - GROUND - set(MODULES) == set()


@pytest.mark.parametrize("heavy", ["torch", "numpy", "asyncio", "socket"])
def test_what_a_scheduler_has_no_use_for_is_not_imported(loaded: set[str], heavy: str) -> None:
    assert heavy not in {name.split(".")[0] for name in loaded}
