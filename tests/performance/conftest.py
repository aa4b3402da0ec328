"""The performance suite: `make perf`, or `pytest tests/performance -m performance --benchmark-only`.

It measures a server of its own, or the one at --url. A figure fails only where a bound is given:
make perf ARGS="--min-tokens-per-s 40 --max-ttft-ms 200"
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import Struct

from tests.e2e.server import Server


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("performance", "bounds of the performance suite; without one a figure is only reported")
    group.addoption("--url", default="", help="A server that runs already, of any OpenAI-compatible kind.")
    group.addoption("--model", default="smollm2", help="What a server of its own serves.")
    group.addoption("--engine", default="", help="The engine of a server of its own.")
    group.addoption("--min-tokens-per-s", type=float, default=0.0, help="One request at a time.")
    group.addoption("--max-ttft-ms", type=float, default=0.0, help="One request at a time, the median.")
    group.addoption("--min-total-tokens-per-s", type=float, default=0.0, help="Eight requests at a time.")
    group.addoption("--min-requests-per-s", type=float, default=0.0, help="Eight short requests at a time.")


class Bounds(Struct, frozen=True, kw_only=True):
    """What the command line asks for; 0: nothing."""

    min_tokens_per_s: float
    max_ttft_ms: float
    min_total_tokens_per_s: float
    min_requests_per_s: float


@pytest.fixture(scope="session")
def bounds(pytestconfig: pytest.Config) -> Bounds:
    return Bounds(**{name: pytestconfig.getoption(name) for name in Bounds.__struct_fields__})


@pytest.fixture(scope="session")
def url(pytestconfig: pytest.Config) -> Iterator[str]:
    if given := pytestconfig.getoption("url"):
        yield given
        return
    engine = pytestconfig.getoption("engine")
    with Server("--model", pytestconfig.getoption("model"), *(["--engine", engine] if engine else [])) as server:
        yield server.url
