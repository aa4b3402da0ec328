"""What holds for the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLEEPERS = {"time", "asyncio", "anyio"}
"""Modules whose sleep waits for time instead of a condition."""

MAY_SLEEP = {
    "waiting.py": "asks for a condition again and again",
    "virtual_time.py": "sleeps on a clock that jumps",
    "flood.py": "measures how long answers take, and paces the clients that are refused",
    "chaos.py": "kills at random moments",
    "soak.py": "sends requests at a steady rate",
    "peers/remote_peers.py": "measures servers of others, which tell of no condition, and paces the load on them",
}


def sleeps(source: str) -> Iterator[int]:
    """The lines that call sleep for longer than one turn of an event loop: any argument but a literal 0."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    functions: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in SLEEPERS}
        elif isinstance(node, ast.ImportFrom) and node.module in SLEEPERS:
            functions |= {alias.asname or alias.name for alias in node.names if alias.name == "sleep"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_sleep(node.func, modules, functions) and not _is_zero(node):
            yield node.lineno


def _is_sleep(called: ast.expr, modules: dict[str, str], functions: set[str]) -> bool:
    if isinstance(called, ast.Name):
        return called.id in functions
    return (
        isinstance(called, ast.Attribute)
        and called.attr == "sleep"
        and isinstance(called.value, ast.Name)
        and called.value.id in modules
    )


def _is_zero(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_waits_for_time(path: Path) -> None:
    """On a busy machine what was to happen meanwhile has not happened: a test waits for it, with tests/waiting.py."""
    if path.relative_to(TESTS).as_posix() in MAY_SLEEP:
        return
    found = [f"{path.relative_to(TESTS)}:{line}" for line in sleeps(path.read_text())]
    assert not found, f"wait for a condition (tests/waiting.py), an Event, or on the virtual clock: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import time as t\nt.sleep(0.1)",
        "import asyncio\nasync def f():\n    await asyncio.sleep(seconds)",
        "from time import sleep\nsleep(0.001)",
        "from asyncio import sleep as nap\nnap(delay=1)",
        "import anyio\nanyio.sleep(2)",
        "def f():\n    import time\n    time.sleep(1)",
    ],
)
def test_a_sleep_is_found(source: str) -> None:
    assert len(list(sleeps(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)",
        "from tests import virtual_time\nvirtual_time.sleep(1)",
        "class Clock:\n    def sleep(self, seconds): ...\nClock().sleep(1)",
        '"""Its sleep(1) is told of, and not called."""',
    ],
)
def test_what_waits_for_no_time_is_left_alone(source: str) -> None:
    assert not list(sleeps(source))
