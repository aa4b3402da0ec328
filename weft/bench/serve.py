"""Measures a server under load: a closed loop of streamed completions over HTTP, against any server that speaks
OpenAI's interface.

Every connection asks again as soon as it is answered. Prompts are random token ids, none of them twice, so that no
cache can help; answers are greedy and of a fixed length. Tokens are those that the server's own usage counts; times
are of the stream's events, as they arrive.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from weft.bench.http import Address, Connection
from weft.bench.report import Judged, Required, environment
from weft.errors import ConfigError, EngineFault, Unavailable

FIRST_TOKEN_ID = 10
"""Ids below are, in most vocabularies, special tokens."""
REQUEST_TIMEOUT_S = 600.0
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
PREPARE_TIMEOUT_S = 300.0


class Load(Struct, frozen=True):
    """A load is a number of requests over a number of connections, all of the same shape."""

    connections: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """Parse `32x64:128:256`: 32 connections, 64 requests, 128 prompt tokens, 256 output tokens."""
        found = re.fullmatch(r"\s*(\d+)x(\d+):(\d+):(\d+)\s*", text)
        if found is None or not all(map(int, found.groups())):
            raise ConfigError(
                f"{text!r} is no load.",
                hint="Write connections x requests : prompt tokens : output tokens, such as 32x64:128:256.",
            )
        return cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.connections}x{self.requests}:{self.prompt_tokens}:{self.output_tokens}"


DEFAULT_LOADS = tuple(
    map(Load.parse, ("1x4:128:256", "32x64:128:256", "128x256:128:256", "256x512:128:256", "128x256:512:256"))
)


class ServeWork(Struct, frozen=True, kw_only=True):
    """The work to measure."""

    loads: tuple[Load, ...] = DEFAULT_LOADS
    runs: int = 3
    seed: int = 0
    vocabulary: int = 10_000
    """Prompts are made of token ids below this."""


class Quantiles(Struct, frozen=True):
    p50: float
    p99: float


class Run(Struct, frozen=True, kw_only=True):
    """The figures of one run of a load."""

    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    first_token_ms: Quantiles
    inter_token_ms: Quantiles
    """Milliseconds between the events of a stream; a server may put several tokens in an event."""
    client_cpu_share: float
    """CPU seconds of the client over seconds: near 1, the client was the limit and not the server."""
    server_cpu_us_per_token: float | None
    """CPU time of the process that answers HTTP, by its own /metrics, over the tokens; None: it does not tell."""
    failures: list[str]


class LoadFigures(Struct, frozen=True, kw_only=True):
    """One line of the report: medians of the runs."""

    load: Load
    output_tokens_per_s: float
    spread: float
    """The spread of the tokens a second: (largest - smallest) / median."""
    first_token_ms: Quantiles
    inter_token_ms: Quantiles
    server_cpu_us_per_token: float | None
    num_failures: int
    runs: list[Run]


class ServeReport(Struct, frozen=True, kw_only=True):
    model: str
    url: str
    startup_seconds: float | None
    """Seconds from the start of the process until it took requests; None for a server that ran already."""
    figures: list[LoadFigures]
    environment: dict[str, Any]
    work: ServeWork

    @property
    def num_failures(self) -> int:
        return sum(figures.num_failures for figures in self.figures)


def judge(report: ServeReport, required: Required) -> list[Judged]:
    """Judge the median time to the first token of every load, and the tokens of all connections together."""
    judged: list[Judged] = []
    for figures in report.figures:
        judged += required.first_token(f"{figures.load}, first token", figures.first_token_ms.p50)
        judged += required.speed(f"{figures.load}, output", figures.output_tokens_per_s)
    return judged


Tick = Callable[[Load, int], None]
"""A callback for every request that is done, with its load and the number of the run."""


async def run_serve(
    url: str,
    work: ServeWork,
    *,
    model: str = "",
    key: str = "",
    startup_seconds: float | None = None,
    tick: Tick = lambda load, run: None,
) -> ServeReport:
    """Measure a server that is ready. Without a model, the first one that it lists is asked."""
    address = Address.parse(url, key)
    asked = model or await _first_model(address)
    bench = _Bench(address, asked, work)
    await bench.warm_up()
    await _until_prepared(address)
    figures = []
    for load in work.loads:
        runs = [await bench.run(load, partial(tick, load, run)) for run in range(work.runs)]
        figures.append(_figures(load, runs))
    return ServeReport(
        model=asked,
        url=url,
        startup_seconds=startup_seconds,
        figures=figures,
        environment=environment(),
        work=work,
    )


@asynccontextmanager
async def own_server(flags: Sequence[str]) -> AsyncIterator[tuple[str, float]]:
    """Run `weft serve` on a free port; yield its address, and the seconds from its start until it was ready."""
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--no-grpc", "--log-level", "warning", *flags]
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


class _Usage(Struct):
    completion_tokens: int


class _Chunk(Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class StreamTimes:
    """The reader of a stream of server-sent events, which notes when each came."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_s: float | None = None
        self.gaps_s: list[float] = []
        self.output_tokens: int | None = None
        self.done = False
        self.error = ""
        self._last = 0.0
        self._beginning = b""
        """Data before the first event, for an answer that is no stream."""
        self._unread = b""

    def read(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.first_s is None:
            self._beginning += data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def failure(self, status: int, wanted: int) -> str:
        """Return what is wrong with the answer, now that it has ended; empty for nothing."""
        if status != 200:
            return f"status {status}: {self._beginning.decode(errors='replace').strip()[:200]}"
        if self.error:
            return f"the stream ended with {self.error}"
        if not self.done:
            return "the stream ended without [DONE]"
        if self.output_tokens is None:
            return "the server did not report its usage"
        if self.output_tokens != wanted:
            return f"{wanted} tokens were asked for, {self.output_tokens} came"
        return ""

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        if payload.startswith(b'{"error"'):
            self.error = payload.decode(errors="replace")[:200]
            return
        if b'"usage":{' in payload or b'"usage": {' in payload:
            chunk = _chunk_decoder.decode(payload)
            if chunk.usage is not None:
                self.output_tokens = chunk.usage.completion_tokens
            if not chunk.choices:
                return
        if self.first_s is None:
            self.first_s = now - self.began
        else:
            self.gaps_s.append(now - self._last)
        self._last = now


class _Bench:
    def __init__(self, address: Address, model: str, work: ServeWork) -> None:
        self._address = address
        self._model = model
        self._vocabulary = work.vocabulary
        self._random = random.Random(work.seed)

    async def warm_up(self) -> None:
        """Send two requests, one after the other. Raises what keeps the server from answering them."""
        run = await self.run(Load(1, 2, 16, 4), lambda: None)
        if run.failures:
            raise Unavailable(f"The server does not answer as it should: {run.failures[0]}.")

    async def run(self, load: Load, tick: Callable[[], None]) -> Run:
        todo = [self._request(load) for _ in range(load.requests)]
        answers: list[StreamTimes] = []
        failures: list[str] = []

        async def ask_until_done() -> None:
            connection: Connection | None = None
            while todo:
                request = todo.pop()
                times = StreamTimes()
                try:
                    if connection is None or not connection.is_open:
                        connection = await Connection.open(self._address)
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        failure = times.failure(await connection.ask(request, times.read), load.output_tokens)
                except (OSError, TimeoutError, ValueError) as error:
                    failure = f"{type(error).__name__}: {error}"
                if failure:
                    failures.append(failure)
                answers.append(times)
                tick()
            if connection is not None:
                connection.close()

        server_began = await _server_cpu_seconds(self._address)
        began, cpu_began = time.perf_counter(), time.process_time()
        await asyncio.gather(*(ask_until_done() for _ in range(min(load.connections, load.requests))))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        server_ended = await _server_cpu_seconds(self._address)
        tokens = sum(times.output_tokens or 0 for times in answers)
        if server_began is None or server_ended is None or not tokens:
            server_cpu = None
        else:
            server_cpu = 1e6 * (server_ended - server_began) / tokens
        return Run(
            seconds=seconds,
            output_tokens=tokens,
            output_tokens_per_s=tokens / seconds,
            first_token_ms=_quantiles([times.first_s for times in answers if times.first_s is not None]),
            inter_token_ms=_quantiles([gap for times in answers for gap in times.gaps_s]),
            client_cpu_share=cpu_seconds / seconds,
            server_cpu_us_per_token=server_cpu,
            failures=failures,
        )

    def _request(self, load: Load) -> bytes:
        prompt = [self._random.randrange(FIRST_TOKEN_ID, self._vocabulary) for _ in range(load.prompt_tokens)]
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._address.request("POST", "/v1/completions", msgspec.json.encode(body))


class _Card(Struct):
    id: str


class _Cards(Struct):
    data: list[_Card]


async def _until_prepared(address: Address) -> None:
    """Wait until a Weft that is ready no longer compiles and captures in its idle gaps; other servers do not say."""
    began = time.perf_counter()
    while time.perf_counter() - began < PREPARE_TIMEOUT_S:
        _, body = await _get(address, "/metrics")
        if not re.search(rb"^weft_prepared\{[^}]*\} 0", body, re.MULTILINE):
            return
        await asyncio.sleep(0.2)
    raise Unavailable(f"The server was still compiling after {PREPARE_TIMEOUT_S:.0f} s without a request.")


async def _server_cpu_seconds(address: Address) -> float | None:
    """The CPU time that the server's process has taken so far, as Prometheus' clients tell it; None: it does not say,
    or is gone, which the requests' own failures tell."""
    try:
        _, body = await _get(address, "/metrics")
    except OSError:
        return None
    found = re.search(rb"^process_cpu_seconds_total (\S+)$", body, re.MULTILINE)
    return None if found is None else float(found[1])


async def _get(address: Address, path: str) -> tuple[int, bytearray]:
    body = bytearray()
    connection = await Connection.open(address)
    status = await connection.ask(address.request("GET", path), body.extend)
    connection.close()
    return status, body


async def _first_model(address: Address) -> str:
    try:
        status, body = await _get(address, "/v1/models")
        if status != 200:
            raise Unavailable(f"GET /v1/models was answered {status}: {body.decode(errors='replace')[:200]}")
        return msgspec.json.decode(body, type=_Cards).data[0].id
    except (OSError, ValueError, IndexError) as error:
        raise Unavailable(
            f"There is no server with a model at {address.host}, port {address.port}: {error}.", hint="Set --url."
        ) from error


def _figures(load: Load, runs: list[Run]) -> LoadFigures:
    speeds = [run.output_tokens_per_s for run in runs]
    median = statistics.median(speeds)
    cpu = [run.server_cpu_us_per_token for run in runs if run.server_cpu_us_per_token is not None]
    return LoadFigures(
        load=load,
        output_tokens_per_s=median,
        spread=(max(speeds) - min(speeds)) / median if median else 0.0,
        first_token_ms=_medians([run.first_token_ms for run in runs]),
        inter_token_ms=_medians([run.inter_token_ms for run in runs]),
        server_cpu_us_per_token=statistics.median(cpu) if cpu else None,
        num_failures=sum(len(run.failures) for run in runs),
        runs=runs,
    )


def _quantiles(seconds: list[float]) -> Quantiles:
    """Return the quantiles in milliseconds; 0 for no times at all."""
    if not seconds:
        return Quantiles(0.0, 0.0)
    seconds.sort()
    p50, p99 = (1000 * seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in (0.5, 0.99))
    return Quantiles(p50, p99)


def _medians(quantiles: list[Quantiles]) -> Quantiles:
    return Quantiles(statistics.median(q.p50 for q in quantiles), statistics.median(q.p99 for q in quantiles))
