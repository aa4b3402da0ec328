"""Measures one engine without a server: decode speed by batch size, time to the first token, throughput of many
requests.

Decoding at batch N: N equal requests, whose random prompts are in the prefix cache, so that they begin together; the
tokens of each from when all have one until the first ends, over its own time between these tokens. Tokens are counted,
not guessed from text.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from safetensors.numpy import save_file

from weft.backends import start_engine
from weft.backends.contract import Engine
from weft.backends.preflight import files_here
from weft.bench.processes import peak_mib, processes_below
from weft.bench.report import Judged, Required, environment
from weft.errors import ConfigError
from weft.machine.model_size import Geometry, size_of
from weft.options import Config
from weft.types import GenerationRequest, Output, Sample, SamplingParams

DECODE_PROMPT_TOKENS = 128
DECODE = "decode"
FIRST_TOKEN = "first token"
LEAST_SECONDS = 0.25
"""A line is measured for at least so long: two runs of a few milliseconds would be the noise of the machine."""


class OfflineWork(Struct, frozen=True, kw_only=True):
    """The work to measure."""

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_lengths: tuple[int, ...] = (128, 512)
    requests: int = 32
    input_tokens: int = 128
    output_tokens: int = 64
    runs: int = 3
    seed: int = 0
    adapters: int = 0
    """Random LoRA adapters that requests of further decode lines share; 0: there are no such lines."""
    adapter_rank: int = 16


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
Arrivals = list[tuple[float, int]]
"""When tokens of a request came, in seconds, and how many at once."""


async def run_offline(config: Config, work: OfflineWork, tick: Tick = lambda name: None) -> OfflineReport:
    """Start an engine, measure, and end it. `tick` is called after every run."""
    with ExitStack() as opened:
        if work.adapters:
            folder = opened.enter_context(TemporaryDirectory(prefix="weft-adapters-"))
            config = _with_adapters(config, work, Path(folder))
        return await _measured(config, work, tick)


async def _measured(config: Config, work: OfflineWork, tick: Tick) -> OfflineReport:
    began = time.perf_counter()
    engine = await start_engine(config)
    try:
        bench = _Bench(engine, work)
        await bench.generate(bench.prompts(1, 16), 1)
        startup = time.perf_counter() - began
        while not engine.stats().prepared:
            await asyncio.sleep(0.05)
        figures: list[Figure] = []
        for name, unit, once in bench.lines():
            # On a CPU no step compiles or captures anything: memory is touched once for all lines.
            is_warm = bool(figures) and engine.model.device == "cpu"
            figures.append(await measure(name, unit, once, work.runs, tick, is_warm=is_warm))
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
    decode_lines = len(work.batch_sizes) * (2 if work.adapters else 1)
    return (work.runs + 1) * (decode_lines + len(work.prompt_lengths) + 1)


class _Bench:
    def __init__(self, engine: Engine, work: OfflineWork) -> None:
        self.engine = engine
        self.work = work
        self.random = random.Random(work.seed)

    def lines(self) -> list[tuple[str, str, Callable[[], Awaitable[float]]]]:
        work, adapters = self.work, [_adapter_name(i) for i in range(self.work.adapters)]
        return [
            *((f"{DECODE}, batch {n}", "tok/s", self._decoding(n)) for n in work.batch_sizes),
            *(
                (f"{DECODE}, batch {n}, {work.adapters} adapters", "tok/s", self._decoding(n, adapters))
                for n in work.batch_sizes
                if adapters
            ),
            *((f"{FIRST_TOKEN} after {n}", "ms", self._first_token(n)) for n in work.prompt_lengths),
            (
                f"{work.requests} × ({work.input_tokens} in, {work.output_tokens} out)",
                "output tok/s",
                self._throughput,
            ),
        ]

    def _decoding(self, batch: int, adapters: Sequence[str] = ()) -> Callable[[], Awaitable[float]]:
        num_tokens = 289 if batch == 1 else 145

        async def once() -> float:
            prompts = self.prompts(batch, DECODE_PROMPT_TOKENS)
            await self.generate(prompts, 1, adapters)
            return speed_together(await self.generate(prompts, num_tokens, adapters))

        return once

    def _first_token(self, length: int) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            return 1000 * _seconds(await self.generate(self.prompts(1, length), 1))

        return once

    async def _throughput(self) -> float:
        work = self.work
        prompts = self.prompts(work.requests, work.input_tokens)
        arrivals = await self.generate(prompts, work.output_tokens)
        return work.requests * work.output_tokens / _seconds(arrivals)

    def prompts(self, requests: int, num_tokens: int) -> list[list[int]]:
        width = self.engine.model.logits_width
        return [[self.random.randrange(10, width) for _ in range(num_tokens)] for _ in range(requests)]

    async def generate(
        self, prompts: Sequence[list[int]], output_tokens: int, adapters: Sequence[str] = ()
    ) -> list[Arrivals]:
        """Return when the tokens of a batch came, exactly so many for every prompt. The requests take the adapters in
        turns."""
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)

        async def one(prompt: list[int], adapter: str | None) -> Arrivals:
            arrivals: Arrivals = []

            def take(output: Output) -> None:
                arrivals.append((time.perf_counter() - began, len(output.token_ids)))

            request = GenerationRequest(prompt=prompt, task=Sample(params=params), adapter=adapter)
            stream = await self.engine.submit(request)
            await stream.follow(take)
            return arrivals

        began = time.perf_counter()
        named = [adapters[i % len(adapters)] if adapters else None for i in range(len(prompts))]
        found = await asyncio.gather(*map(one, prompts, named))
        counts = {sum(count for _, count in arrivals) for arrivals in found}
        if counts != {output_tokens}:
            raise RuntimeError(f"asked for {output_tokens} tokens each, got {sorted(counts)}")
        return found


def speed_together(requests: Sequence[Arrivals]) -> float:
    """Return the tokens a second of all requests while all decode: after the last one's first token, until the first
    one's last. Raises ConfigError where one ends before another begins."""
    begin = max(arrivals[0][0] for arrivals in requests)
    end = min(arrivals[-1][0] for arrivals in requests)
    speed = 0.0
    for arrivals in requests:
        within = [one for one in arrivals if begin <= one[0] <= end]
        if len(within) < 2:
            raise ConfigError(
                f"--batch-sizes: {len(requests)} requests do not decode together, some end before others begin.",
                hint="Try fewer, more memory for the KV cache, or the prefix cache where it is off.",
            )
        speed += sum(count for _, count in within[1:]) / (within[-1][0] - within[0][0])
    return speed


def _seconds(requests: Sequence[Arrivals]) -> float:
    """Return the seconds until the last token."""
    return max(arrivals[-1][0] for arrivals in requests)


async def measure(
    name: str, unit: str, once: Callable[[], Awaitable[float]], runs: int, tick: Tick, *, is_warm: bool
) -> Figure:
    """Measure a line, `runs` times and for LEAST_SECONDS. Where the engine is not warm, a first run compiles, captures
    and fills caches; it is not counted."""
    if not is_warm:
        await once()
    tick(name)
    values: list[float] = []
    began = time.perf_counter()
    while len(values) < runs or time.perf_counter() - began < LEAST_SECONDS:
        values.append(await once())
        if len(values) <= runs:
            tick(name)
    median = statistics.median(values)
    return Figure(name=name, value=median, unit=unit, spread=(max(values) - min(values)) / median, runs=values)


def _adapter_name(i: int) -> str:
    return f"random-{i}"


def _with_adapters(config: Config, work: OfflineWork, folder: Path) -> Config:
    """Write random adapters to a folder, and return the configuration with them, and with a place for each."""
    geometry = size_of(files_here(config)).geometry
    if geometry is None:
        raise ConfigError("--adapters: the model's description does not tell the shapes of its layers.")
    names = [_adapter_name(i) for i in range(work.adapters)]
    for i, name in enumerate(names):
        _write_adapter(folder / name, geometry, work.adapter_rank, np.random.default_rng(work.seed + i))
    most = max(config.scheduler.max_loras, work.adapters)
    given = [*config.model.adapter, *(f"{name}={folder / name}" for name in names)]
    return replace(
        config,
        model=replace(config.model, adapter=given),
        scheduler=replace(config.scheduler, max_loras=most),
    )


def _write_adapter(folder: Path, geometry: Geometry, rank: int, random_numbers: np.random.Generator) -> None:
    """Write an adapter to every linear layer of a decoder, as PEFT does."""
    hidden, middle = geometry.hidden_size, geometry.intermediate_size
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }  # fmt: skip
    tensors = {}
    for layer in range(geometry.num_layers):
        for name, (rows, columns) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                numbers = random_numbers.standard_normal(shape, np.float32) * columns**-0.5
                tensors[f"{module}.{part}.weight"] = numbers.astype(np.float16)
    targets = [name.rpartition(".")[2] for name in shapes]
    folder.mkdir()
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "adapter_model.safetensors")
