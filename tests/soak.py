"""`make soak`: an hour of mixed load, after which nothing has grown and nothing is slower: `python -m tests.soak`.

The requests of tests/e2e/mixed_load.py come at a steady rate that the server can keep up with, whether or not the last
ones are answered. Every ten seconds the memory and the open files of the api process and of the engine are noted. The
first tenth is warm-up; from there memory may not rise by more than 1 MB a minute, nor files by more than a few in all.
Latencies are told, and how busy the processes are, which other work of the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.e2e.mixed_load import Differs, Lost, MixedLoad, MixedServer, Usage, slope, usage

MAX_MB_A_MINUTE = 1.0
MAX_MORE_FILES = 4
"""Connections come and go: so many files more by the end of the line through the samples are no leak."""
SPARKS = "▁▂▃▄▅▆▇█"


class Settings(Struct, frozen=True, kw_only=True):
    minutes: float = 60.0
    rate: float = 2.0
    """Requests a second, of all kinds in turn."""
    sample_s: float = 10.0
    device: str = "cpu"
    variants: int = 4


class Sample(Struct, frozen=True):
    minute: float
    usage: dict[str, Usage]
    """By process."""


class Answered(Struct, frozen=True):
    kind: str
    minute: float
    seconds: float


class Outcome(Struct):
    samples: list[Sample] = []
    answered: list[Answered] = []
    lost: list[str] = []
    differing: list[str] = []
    most_open: int = 0
    """Requests that were open at the same time, at most."""

    def measured(self, minutes: float) -> list[Sample]:
        """Return the samples behind the warm-up."""
        return [sample for sample in self.samples if sample.minute >= minutes / 10]


class Growth(Struct, frozen=True):
    """How much of something one process held from sample to sample."""

    process: str
    what: str
    minutes: list[float]
    values: list[float]
    max_slope: float

    @property
    def slope(self) -> float:
        return slope(self.minutes, self.values)

    @property
    def is_flat(self) -> bool:
        return self.slope <= self.max_slope


def growths(samples: list[Sample]) -> list[Growth]:
    minutes = [sample.minute for sample in samples]
    lasted = minutes[-1] - minutes[0] or 1.0
    found = []
    for process in samples[0].usage:
        held = [sample.usage[process] for sample in samples]
        found.append(Growth(process, "MB", minutes, [one.rss_mb for one in held], MAX_MB_A_MINUTE))
        found.append(Growth(process, "files", minutes, [one.num_files for one in held], MAX_MORE_FILES / lasted))
        busy = [
            (after.cpu_s - before.cpu_s) / (end - begin) / 0.6
            for (before, after), (begin, end) in zip(pairwise(held), pairwise(minutes), strict=True)
        ]
        found.append(Growth(process, "% of a core", minutes[1:], busy, float("inf")))
    return found


class Soak:
    """The driver of one run."""

    def __init__(self, settings: Settings, server: MixedServer, load: MixedLoad) -> None:
        self._settings = settings
        self._load = load
        self._pids = {"api": server.process.pid, "engine": server.first_engine}
        self._began = time.monotonic()
        self.outcome = Outcome()

    async def run(self, progress: Progress) -> None:
        task = progress.add_task("soak", total=self._settings.minutes * 60)
        sampling = asyncio.create_task(self._sample_on())
        open_requests: set[asyncio.Task[None]] = set()
        for number in itertools.cycle(range(len(self._load.requests))):
            if self._minute() >= self._settings.minutes:
                break
            asked = asyncio.create_task(self._send(number))
            open_requests.add(asked)
            asked.add_done_callback(open_requests.discard)
            self.outcome.most_open = max(self.outcome.most_open, len(open_requests))
            progress.update(task, completed=60 * self._minute())
            await asyncio.sleep(1 / self._settings.rate)
        await asyncio.gather(*open_requests)
        sampling.cancel()

    def _minute(self) -> float:
        return (time.monotonic() - self._began) / 60

    async def _send(self, number: int) -> None:
        minute, began = self._minute(), time.monotonic()
        try:
            await self._load.check(number)
        except Lost as lost:
            self.outcome.lost.append(str(lost))
        except Differs as differs:
            self.outcome.differing.append(str(differs))
        else:
            kind = self._load.requests[number].kind
            self.outcome.answered.append(Answered(kind, minute, time.monotonic() - began))

    async def _sample_on(self) -> None:
        while True:
            self.outcome.samples.append(Sample(self._minute(), {name: usage(pid) for name, pid in self._pids.items()}))
            await asyncio.sleep(self._settings.sample_s)


def run(settings: Settings, console: Console) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, MixedServer(Path(folder), settings.device) as server:
        return asyncio.run(_soaked(settings, server, console))


async def _soaked(settings: Settings, server: MixedServer, console: Console) -> Outcome:
    async with MixedLoad(server, settings.variants) as load:
        await load.record()
        soak = Soak(settings, server, load)
        with Progress(console=console, transient=True) as progress:
            await soak.run(progress)
        return soak.outcome


def report(outcome: Outcome, settings: Settings, console: Console) -> bool:
    """Print what was found, and return whether it is good."""
    found = growths(outcome.measured(settings.minutes))
    held = Table("process", "", "begin", "end", "a minute", "", title="Behind the warm-up")
    for one in found:
        colour = "green" if one.is_flat else "red"
        begin, end = (f"{value:.0f}" for value in (one.values[0], one.values[-1]))
        rise = f"[{colour}]{one.slope:+.2f}[/{colour}]"
        held.add_row(one.process, one.what, begin, end, rise, sparkline(one.values))
    console.print(held)
    spent = Table("kind", "requests", "p50 first", "p50 last", "p99 first", "p99 last", title="Seconds, by tenths")
    for kind in sorted({one.kind for one in outcome.answered}):
        own = [one for one in outcome.answered if one.kind == kind]
        first = [one.seconds for one in own if one.minute < settings.minutes / 10]
        last = [one.seconds for one in own if one.minute >= settings.minutes * 9 / 10]
        spent.add_row(kind, str(len(own)), *(_percentile(of, q) for q in (50, 99) for of in (first, last)))
    console.print(spent)
    console.print(
        f"{len(outcome.answered)} right answers, {len(outcome.lost)} failures, {len(outcome.differing)} answers that "
        f"differ; at most {outcome.most_open} requests were open at the same time."
    )
    for trouble in (*outcome.lost, *outcome.differing):
        console.print(trouble, markup=False)
    return not outcome.lost and not outcome.differing and all(one.is_flat for one in found)


def _percentile(seconds: list[float], q: int) -> str:
    return f"{np.percentile(seconds, q):.3f}" if seconds else "-"


def sparkline(values: list[float], width: int = 24) -> str:
    """Return the values as bars from the lowest to the highest, at most `width` of them."""
    shown = [float(part.mean()) for part in np.array_split(values, min(width, len(values)))]
    lowest, span = min(shown), max(shown) - min(shown)
    return "".join(SPARKS[round((value - lowest) / span * (len(SPARKS) - 1)) if span else 0] for value in shown)


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Serve a mixed load for long.")
    parser.add_argument("--minutes", type=float, default=defaults.minutes)
    parser.add_argument("--rate", type=float, default=defaults.rate, help="requests a second")
    parser.add_argument("--sample-s", type=float, default=defaults.sample_s)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument("--variants", type=int, default=defaults.variants)
    settings = Settings(**vars(parser.parse_args()))
    console = Console()
    outcome = run(settings, console)
    sys.exit(not report(outcome, settings, console))


if __name__ == "__main__":
    main()
