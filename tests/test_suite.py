"""What holds for the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.waiting import pauses

TESTS = Path(__file__).parent
SLEEPERS = {"time", "asyncio", "anyio"}
"""Modules whose sleep waits for time instead of a condition."""

CLOCKS = {name + unit for name in ("process_time", "perf_counter", "monotonic", "thread_time") for unit in ("", "_ns")}
"""These functions of `time` measure how long something takes."""
ASKING = {"get", "post", "put", "patch", "delete", "head", "options", "request", "stream", "Client", "AsyncClient"}
NUMBER = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)

MAY_SLEEP = {
    "waiting.py": "asks for a condition again and again",
    "virtual_time.py": "sleeps on a clock that jumps",
    "flood.py": "measures how long answers take, and paces the clients that are refused",
    "chaos.py": "kills at random moments",
    "soak.py": "sends requests at a steady rate",
    "live_costs.py": "measures CPU time in windows of time",
    "clients/programs/features.py": "asks a server again and again, as its clients do",
    "peers/remote_peers.py": "measures servers of others, which tell of no condition, and paces the load on them",
}


def sleeps(source: str) -> Iterator[int]:
    """The lines that call sleep for longer than one turn of an event loop: any argument but a literal 0. A browser's
    pages sleep as well."""
    tree = ast.parse(source)
    for call in _calls(tree, SLEEPERS, {"sleep"}):
        if not _is_zero(call):
            yield call.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "wait_for_timeout":
            yield node.lineno


def impatient_clients(source: str) -> Iterator[int]:
    """Yield the lines that ask a server with httpx's own patience, which is five seconds."""
    for call in _calls(ast.parse(source), {"httpx"}, ASKING):
        if not {"timeout", "transport", None}.intersection(keyword.arg for keyword in call.keywords):
            yield call.lineno


def timed_assertions(source: str) -> Iterator[int]:
    """Yield the lines that assert how what a clock tells compares with a number."""
    tree = ast.parse(source)
    clocks = set(_calls(tree, {"time"}, CLOCKS))
    if not clocks:
        return
    for check in (node for node in ast.walk(tree) if isinstance(node, ast.Assert)):
        if any(clocks.intersection(ast.walk(one)) and _is_number(other) for one, other in _compared(check.test)):
            yield check.lineno


def _calls(tree: ast.Module, modules: Collection[str], functions: Collection[str]) -> Iterator[ast.Call]:
    """Yield the calls of these functions of these modules, under whatever names they were imported."""
    module_names: set[str] = set()
    function_names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module_names |= {alias.asname or alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            function_names |= {alias.asname or alias.name for alias in node.names if alias.name in functions}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in function_names:
                yield node
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
                if module in module_names and name in functions:
                    yield node


def _compared(test: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the values that stand next to each other in a comparison, either way round."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            for one, other in pairwise((node.left, *node.comparators)):
                yield from ((one, other), (other, one))


def _is_number(value: ast.expr) -> bool:
    """Return whether this is a number in every run: a literal, a constant by its name, or a sum of such."""
    return all(
        node.id.isupper() if isinstance(node, ast.Name) else isinstance(node, NUMBER) for node in ast.walk(value)
    )


def _is_zero(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The text of every file of the tests."""
    return {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def test_no_test_waits_for_time(texts: dict[str, str]) -> None:
    """On a busy machine what was to happen meanwhile has not happened: a test waits for it, with tests/waiting.py."""
    words = ("sleep", "wait_for_timeout")
    sleepers = {
        name: text for name, text in texts.items() if name not in MAY_SLEEP and any(word in text for word in words)
    }
    found = [f"{name}:{line}" for name, text in sleepers.items() for line in sleeps(text)]
    assert not found, f"wait for a condition (tests/waiting.py), an Event, or on the virtual clock: {found}"


@pytest.mark.parametrize(("waits", "behind"), [("", []), ("eager", []), ("late", [0.1])])
def test_waits_can_be_as_short_as_possible_or_too_long(waits: str, behind: list[float]) -> None:
    """Both show which tests take it for granted how often a condition is looked at."""
    looks = iter([False, True])
    looking = pauses(lambda: next(looks), "the second look", waits)
    assert (next(looking) == 0) == (waits == "eager")
    assert list(looking) == behind


def test_no_client_gives_up_after_a_few_seconds(texts: dict[str, str]) -> None:
    """An answer takes as long as a busy machine needs for it."""
    clients = {name: text for name, text in texts.items() if "httpx" in text}
    found = [f"{name}:{line}" for name, text in clients.items() for line in impatient_clients(text)]
    assert not found, f"give timeout=PATIENCE (tests/waiting.py): {found}"


def test_no_test_asserts_how_long_something_took(texts: dict[str, str]) -> None:
    """Seconds differ between machines: a test counts work, or shows by its growth that it is linear."""
    timed = {name: text for name, text in texts.items() if any(clock in text for clock in CLOCKS)}
    found = [f"{name}:{line}" for name, text in timed.items() for line in timed_assertions(text)]
    assert not found, (
        f"show how the time grows (tests/growth.py), count what is done, or ask a loop on the virtual clock: {found}"
    )


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
        "def f(page):\n    page.wait_for_timeout(500)",
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


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import httpx\nhttpx.get(url)", 1),
        ("import httpx\nwith httpx.Client(base_url=url) as client: ...", 1),
        ("from httpx import AsyncClient\nAsyncClient()", 1),
        ("import httpx\nhttpx.post(url, timeout=PATIENCE)\nhttpx.Client(transport=of(app))\nhttpx.Client(**how)", 0),
    ],
)
def test_an_impatient_client_is_found(source: str, count: int) -> None:
    assert len(list(impatient_clients(source))) == count


@pytest.mark.parametrize(
    "source",
    [
        "import time\nassert time.process_time() - began < 5",
        "import time as t\nassert 0.5 > t.perf_counter() - began",
        "from time import monotonic as now\nassert works and 1000 * (now() - began) <= 2 * 60",
        "from time import perf_counter_ns\nassert 0 < perf_counter_ns() - began < 10**9, 'too slow'",
        "import time\ndef f():\n    assert not time.thread_time() - began > 2 * PATIENCE",
    ],
)
def test_an_assertion_of_time_is_found(source: str) -> None:
    assert len(list(timed_assertions(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import time\nassert 0 <= shown <= time.monotonic() - began + 0.001",
        "import time\nwhile time.monotonic() - began < 5:\n    work()",
        "import time\nassert told < 1000 * (time.monotonic() - began)",
        "async def f():\n    assert asyncio.get_running_loop().time() - began < 5",
        "from tests.clock import monotonic\nassert monotonic() < 5",
    ],
)
def test_what_asserts_no_time_is_left_alone(source: str) -> None:
    assert not list(timed_assertions(source))
