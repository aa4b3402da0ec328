"""Measures servers under load, over HTTP: any server that speaks OpenAI's interface, one of its own, or two in turns.

A point is a load and what its requests ask for. Every run of a point sends the same number of new requests, so that no
cache can help but where the dataset is about caches; two servers are sent the same ones.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from weft.bench.arrivals import Load, Size
from weft.bench.datasets import DatasetSpec, dialogues
from weft.bench.generator import Cancellations, Client, Distribution, Generator, Run, Slo
from weft.bench.http import Address
from weft.bench.http_load import HttpClient, exchange, first_models
from weft.bench.report import Judged, Required, environment
from weft.errors import ConfigError, EngineFault, Unavailable

GRPC_SCHEME = "grpc://"
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
PREPARE_TIMEOUT_S = 300.0


RANDOM = DatasetSpec()


class Point(Struct, frozen=True, kw_only=True):
    """A load, and what its requests ask for."""

    load: Load
    dataset: DatasetSpec = RANDOM

    @classmethod
    def parse(cls, text: str, dataset: DatasetSpec = RANDOM) -> Point:
        """Parse `32x64:128:256`: 32 connections, 64 requests, 128 prompt tokens, 256 output tokens."""
        found = re.fullmatch(r"\s*(\d+)x(\d+):(\d+(?:-\d+)?):(\d+(?:-\d+)?)\s*", text)
        if found is None or not int(found[1]) or not int(found[2]):
            raise ConfigError(
                f"{text!r} is not a load.",
                hint="Write connections x requests : prompt tokens : output tokens, such as 32x64:128:256.",
            )
        sized = replace(dataset, input_tokens=Size.parse(found[3]), output_tokens=Size.parse(found[4]))
        return cls(load=Load(connections=int(found[1]), requests=int(found[2])), dataset=sized)

    def __str__(self) -> str:
        if not self.load.rate:
            return f"{self.load.connections}x{self.load.requests}:{self.dataset}"
        return f"{self.load}, {self.load.requests}:{self.dataset}"


DEFAULT_POINTS = tuple(
    map(Point.parse, ("1x4:128:256", "32x64:128:256", "128x256:128:256", "256x512:128:256", "128x256:512:256"))
)


class ServeWork(Struct, frozen=True, kw_only=True):
    """The work to measure."""

    points: tuple[Point, ...] = DEFAULT_POINTS
    runs: int = 3
    seed: int = 0
    warm_up: int = 2
    """Requests that are sent, one after the other, before anything is measured."""
    options: Mapping[str, Any] = {}
    """Fields that every request has, as those for sampling."""
    slo: Slo = Slo()
    cancellations: Cancellations = Cancellations()


class PointFigures(Struct, frozen=True, kw_only=True):
    """One line of the report: medians of the runs."""

    point: Point
    name: str
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    spread: float
    """The spread of the tokens a second: (largest - smallest) / median."""
    std_dev: float
    """Their standard deviation; 0 for a single run."""
    first_token_ms: Distribution
    inter_token_ms: Distribution
    e2e_ms: Distribution
    server_cpu_us_per_token: float | None
    num_failures: int
    runs: list[Run]


class ServeReport(Struct, frozen=True, kw_only=True):
    """`tokens_per_sec`, `ttft_ms`, `std_dev`, `runs` and `seed` are what the CY-LLM Engine's scripts read: the figures
    of the first point."""

    model: str
    url: str
    tokens_per_sec: float
    ttft_ms: float
    std_dev: float
    runs: int
    seed: int
    startup_seconds: float | None
    """Seconds from the start of the process until it took requests; None for a server that ran already."""
    figures: list[PointFigures]
    environment: dict[str, Any]
    work: ServeWork

    @property
    def num_failures(self) -> int:
        return sum(figures.num_failures for figures in self.figures)


def judge(report: ServeReport, required: Required) -> list[Judged]:
    """Judge the median time to the first token of every point, and the tokens of all connections together."""
    judged: list[Judged] = []
    for figures in report.figures:
        judged += required.first_token(f"{figures.name}, first token", figures.first_token_ms.p50)
        judged += required.speed(f"{figures.name}, output", figures.output_tokens_per_s)
    return judged


class Target(Struct, frozen=True, kw_only=True):
    """A server that is ready."""

    url: str
    model: str = ""
    """Empty: the first one that it lists."""
    key: str = ""
    startup_seconds: float | None = None


Tick = Callable[[Point, int], None]
"""A callback for every conversation that is done, with its point and the number of the run."""


async def run_serve(
    targets: Sequence[Target], work: ServeWork, tick: Tick = lambda point, run: None
) -> list[ServeReport]:
    """Measure servers that are ready, in turns: the order changes with every run."""
    benches = [await _Bench.open(target, work) for target in targets]
    try:
        for bench in benches:
            await bench.warm_up()
        for point in work.points:
            for bench in benches:
                bench.begin(point)
            for number in range(work.runs):
                for bench in benches if number % 2 == 0 else benches[::-1]:
                    await bench.run(point, lambda point=point, number=number: tick(point, number))  # type: ignore[misc]
    finally:
        for bench in benches:
            await bench.close()
    return [bench.report() for bench in benches]


class _Bench:
    """The measurements of one server."""

    def __init__(self, target: Target, client: Client, address: Address | None, model: str, work: ServeWork) -> None:
        """`address`: where it answers HTTP; None: over gRPC alone."""
        self._target = target
        self._address = address
        self._model = model
        self._work = work
        self._client = client
        self._chance = random.Random(work.seed)
        self._runs: list[tuple[Point, list[Run]]] = []
        self._generator: Generator

    @classmethod
    async def open(cls, target: Target, work: ServeWork) -> _Bench:
        if target.url.startswith(GRPC_SCHEME):
            from weft.bench.grpc_load import GrpcClient  # gRPC's packages, which HTTP does without

            return cls(
                target,
                GrpcClient.at(target.url, work.options, key=target.key, model=target.model),
                None,
                target.model,
                work,
            )
        address = Address.parse(target.url, target.key)
        try:
            model = target.model or (await first_models(address))[0]
        except (OSError, ValueError, LookupError) as error:
            raise Unavailable(
                f"There is no server with a model at {address.host}, port {address.port}: {error}.",
                hint="Give the address of one that runs.",
            ) from error
        return cls(target, HttpClient(address, model, work.options), address, model, work)

    async def warm_up(self) -> None:
        """Send a few requests, one after the other. Raises what keeps the server from answering them."""
        if self._work.warm_up:
            self.begin(self._work.points[0])
            run = await self._generator.run(Load(connections=1, requests=self._work.warm_up))
            self._runs.clear()
            if run.failures:
                raise Unavailable(f"The server does not answer as it should: {run.failures[0]}.")
        if self._address is not None:
            await _until_prepared(self._address)

    def begin(self, point: Point) -> None:
        """Prepare the requests of a point."""
        source = dialogues(point.dataset, self._chance)
        slo, cancellations = self._work.slo, self._work.cancellations
        self._generator = Generator(self._client, source, self._chance, slo=slo, cancellations=cancellations)
        self._runs.append((point, []))

    async def run(self, point: Point, tick: Callable[[], None]) -> None:
        before = await self._server_cpu_seconds()
        run = await self._generator.run(point.load, tick)
        after = await self._server_cpu_seconds()
        if before is not None and after is not None and run.output_tokens:
            run = replace(run, server_cpu_us_per_token=1e6 * (after - before) / run.output_tokens)
        self._runs[-1][1].append(run)

    async def _server_cpu_seconds(self) -> float | None:
        """The CPU time that the server's process has taken so far, as Prometheus' clients tell it; None: it does not
        say, or is gone, which the requests' own failures tell."""
        if self._address is None:
            return None
        try:
            _, body = await exchange(self._address, "GET", "/metrics")
        except OSError:
            return None
        found = re.search(rb"^process_cpu_seconds_total (\S+)$", body, re.MULTILINE)
        return None if found is None else float(found[1])

    async def close(self) -> None:
        await self._client.close()

    def report(self) -> ServeReport:
        figures = [_figures(point, runs) for point, runs in self._runs]
        first = figures[0]
        return ServeReport(
            model=self._model,
            url=self._target.url,
            tokens_per_sec=first.output_tokens_per_s,
            ttft_ms=first.first_token_ms.p50,
            std_dev=first.std_dev,
            runs=self._work.runs,
            seed=self._work.seed,
            startup_seconds=self._target.startup_seconds,
            figures=figures,
            environment=environment(),
            work=self._work,
        )


def _figures(point: Point, runs: list[Run]) -> PointFigures:
    speeds = [run.output_tokens_per_s for run in runs]
    median = statistics.median(speeds)
    cpu = [run.server_cpu_us_per_token for run in runs if run.server_cpu_us_per_token is not None]
    return PointFigures(
        point=point,
        name=str(point),
        output_tokens_per_s=median,
        total_tokens_per_s=statistics.median(run.total_tokens_per_s for run in runs),
        requests_per_s=statistics.median(run.requests_per_s for run in runs),
        goodput_per_s=statistics.median(run.goodput_per_s for run in runs),
        spread=(max(speeds) - min(speeds)) / median if median else 0.0,
        std_dev=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        first_token_ms=_median([run.first_token_ms for run in runs]),
        inter_token_ms=_median([run.inter_token_ms for run in runs]),
        e2e_ms=_median([run.e2e_ms for run in runs]),
        server_cpu_us_per_token=statistics.median(cpu) if cpu else None,
        num_failures=sum(sum(run.errors.values()) for run in runs),
        runs=runs,
    )


def _median(all_runs: list[Distribution]) -> Distribution:
    """Return the median over the runs of each figure."""
    names = ("mean", "p50", "p90", "p99", "max")
    figures = {name: statistics.median(getattr(run, name) for run in all_runs) for name in names}
    curves = [run.curve for run in all_runs if run.curve]
    return Distribution(**figures, curve=[statistics.median(each) for each in zip(*curves, strict=True)])


@asynccontextmanager
async def own_server(flags: Sequence[str], *, grpc_socket: str = "") -> AsyncIterator[tuple[str, float]]:
    """Run `weft serve` on a free port; yield its address, and the seconds from its start until it was ready.
    `grpc_socket`: where it answers gRPC, too."""
    rpc = ["--grpc-port", "0", "--grpc-socket", grpc_socket] if grpc_socket else ["--no-grpc"]
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", *rpc, "--log-level", "warning", *flags]
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield await _url_when_ready(process), time.perf_counter() - began
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _url_when_ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)).decode()
    except TimeoutError:
        raise Unavailable(f"The server was not ready after {START_TIMEOUT_S:.0f} s.") from None
    found = re.search(r" at (http://\S+) ", line)
    if found is None:
        raise EngineFault(f"The server did not start (exit code {await process.wait()}); it says why above.")
    return found[1]


async def _until_prepared(address: Address) -> None:
    """Wait until a Weft that is ready no longer compiles and captures in its idle gaps; other servers do not say."""
    began = time.perf_counter()
    while time.perf_counter() - began < PREPARE_TIMEOUT_S:
        _, body = await exchange(address, "GET", "/metrics")
        if not re.search(rb"^weft_prepared\{[^}]*\} 0", body, re.MULTILINE):
            return
        await asyncio.sleep(0.2)
    raise Unavailable(f"The server was still compiling after {PREPARE_TIMEOUT_S:.0f} s without a request.")
