"""Measures one engine without a server: decode speed by batch size, time to the first token, throughput of many
requests.

Decoding at batch N: N equal requests of random tokens; the time for many output tokens less the time for few, over
the steps in between, so that prompts and start cost nothing. Tokens are counted, not guessed from text.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from weft.backends import start_engine
from weft.backends.contract import Engine
from weft.bench.processes import peak_mib, processes_below
from weft.bench.report import Judged, Required, environment
from weft.options import Config
from weft.types import GenerationRequest, Output, Sample, SamplingParams

DECODE_PROMPT_TOKENS = 128
DECODE = "decode"
FIRST_TOKEN = "first token"


class OfflineWork(Struct, frozen=True, kw_only=True):
    """The work to measure."""

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_lengths: tuple[int, ...] = (128, 512)
    requests: int = 32
    input_tokens: int = 128
    output_tokens: int = 64
    runs: int = 3
    seed: int = 0


class Figure(Struct, frozen=True, kw_only=True):
    """One line of the report: the median of the runs, and how far apart they were."""

    name: str
    value: float
    unit: str
    spread: float
    """(largest - smallest) / median."""
    runs: list[float]


class OfflineReport(Struct, frozen=True, kw_only=True):
    model: str
    engine: str
    device: str
    dtype: str
    startup_seconds: float
    """Seconds until the first answer."""
    engine_peak_mib: float
    """Peak memory of its largest process; 0 when it has none here."""
    figures: list[Figure]
    environment: dict[str, Any]
    work: OfflineWork


Tick = Callable[[str], None]


async def run_offline(config: Config, work: OfflineWork, tick: Tick = lambda name: None) -> OfflineReport:
    """Start an engine, measure, and end it. `tick` is called after every run."""
    began = time.perf_counter()
    engine = await start_engine(config)
    try:
        bench = _Bench(engine, work)
        await bench.generate(1, 16, 1)
        startup = time.perf_counter() - began
        while not engine.stats().prepared:
            await asyncio.sleep(0.05)
        figures = [await _measure(name, unit, once, work.runs, tick) for name, unit, once in bench.lines()]
        peak = max(map(peak_mib, processes_below(os.getpid())), default=0.0)
    finally:
        await engine.close()
    return OfflineReport(
        model=engine.model.name,
        engine=engine.name,
        device=engine.model.device,
        dtype=engine.model.dtype,
        startup_seconds=startup,
        engine_peak_mib=peak,
        figures=figures,
        environment=environment(),
        work=work,
    )


def judge(report: OfflineReport, required: Required) -> list[Judged]:
    """Judge every figure that the bounds are about."""
    judged: list[Judged] = []
    for figure in report.figures:
        if figure.name.startswith(FIRST_TOKEN):
            judged += required.first_token(figure.name, figure.value)
        elif figure.name.startswith(DECODE):
            judged += required.speed(figure.name, figure.value)
    return judged


def num_runs(work: OfflineWork) -> int:
    return (work.runs + 1) * (len(work.batch_sizes) + len(work.prompt_lengths) + 1)


class _Bench:
    def __init__(self, engine: Engine, work: OfflineWork) -> None:
        self.engine = engine
        self.work = work
        self.random = random.Random(work.seed)

    def lines(self) -> list[tuple[str, str, Callable[[], Awaitable[float]]]]:
        work = self.work
        return [
            *((f"{DECODE}, batch {n}", "tok/s", self._decoding(n)) for n in work.batch_sizes),
            *((f"{FIRST_TOKEN} after {n}", "ms", self._first_token(n)) for n in work.prompt_lengths),
            (
                f"{work.requests} × ({work.input_tokens} in, {work.output_tokens} out)",
                "output tok/s",
                self._throughput,
            ),
        ]

    def _decoding(self, batch: int) -> Callable[[], Awaitable[float]]:
        few, many = (33, 289) if batch == 1 else (17, 145)

        async def once() -> float:
            short = await self.generate(batch, DECODE_PROMPT_TOKENS, few)
            long = await self.generate(batch, DECODE_PROMPT_TOKENS, many)
            return batch * (many - few) / (long - short)

        return once

    def _first_token(self, length: int) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            return 1000 * await self.generate(1, length, 1)

        return once

    async def _throughput(self) -> float:
        work = self.work
        seconds = await self.generate(work.requests, work.input_tokens, work.output_tokens)
        return work.requests * work.output_tokens / seconds

    async def generate(self, requests: int, input_tokens: int, output_tokens: int) -> float:
        """Return the seconds for a batch of random prompts, every one with exactly so many output tokens."""
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        width = self.engine.model.logits_width
        prompts = [[self.random.randrange(10, width) for _ in range(input_tokens)] for _ in range(requests)]

        async def one(prompt: list[int]) -> int:
            count = 0

            def take(output: Output) -> None:
                nonlocal count
                count += len(output.token_ids)

            stream = await self.engine.submit(GenerationRequest(prompt=prompt, task=Sample(params=params)))
            await stream.follow(take)
            return count

        began = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - began
        if any(count != output_tokens for count in counts):
            raise RuntimeError(f"asked for {output_tokens} tokens each, got {sorted(set(counts))}")
        return seconds


async def _measure(name: str, unit: str, once: Callable[[], Awaitable[float]], runs: int, tick: Tick) -> Figure:
    values = []
    for run in range(runs + 1):
        value = await once()
        # The first run compiles, captures and fills caches; it is not counted.
        if run:
            values.append(value)
        tick(name)
    median = statistics.median(values)
    return Figure(name=name, value=median, unit=unit, spread=(max(values) - min(values)) / median, runs=values)
