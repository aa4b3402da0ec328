"""`make chaos`: engines are killed at random moments under mixed load, and no client notices: `python -m tests.chaos`.

Clients send the requests of tests/e2e/mixed_load.py to a real server, again and again. Meanwhile its engine is killed
(SIGKILL), stopped (SIGSTOP: the supervision must find it out), or fails in a step: an exception, on a GPU also a
device-side assert or an illegal access. The faults in steps come from outside the product, by
tests/chaos_faults/sitecustomize.py.

The engine is killed or stopped while it serves, just after it has become ready, when the requests that the last one had
are tried one by one, and while it starts. It fails in a step while it serves, and only when every request that an
engine has died with is answered: by Weft's rule a request on trial is to blame for an engine that fails by itself, and
no client could tell it from one that is. No stream may be lost, no answer may differ from the one that was recorded
before, and nothing may be left of the server when it has ended.

The server has three flags that are not the defaults, because what they bound is here the driver's doing.
--heartbeat-timeout-s and --start-timeout-s are short: an engine that was stopped goes unnoticed for so long, while it
serves and while it starts. --max-restarts, the deaths without a token between them after which Weft gives up, is more
than there are kills: nothing keeps these from coming one after another without a token between them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.e2e.mixed_load import Differs, Lost, MixedLoad, MixedServer, Usage, slope, usage
from tests.e2e.server import run_first
from tests.processes import is_engine
from tests.waiting import until

FAULTS = Path(__file__).parent / "chaos_faults" / "sitecustomize.py"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
IN_STEPS = ("exception", "assert", "access")
SERVING, READY, STARTING = "while it serves", "just ready", "while it starts"
MOMENTS = {SERVING: 1, READY: 1, STARTING: 1}
"""The moments of kills, and how often each is chosen."""
SERVING_SECONDS = 1.0
"""The mean time between an engine's being ready and a kill while it serves."""
READY_SECONDS = 0.2
"""Just ready is at most so long ago."""
STARTING_SECONDS = 0.5
"""A kill while the engine starts comes at most so long after the process is there."""
MONITOR_SECONDS = 0.02
START_TIMEOUT_SECONDS = {"cpu": 20, "cuda": 120}
MAX_MORE_MB, MAX_MORE_FILES = 32, 8
"""What the api process may hold more at the end than at the beginning."""


class Settings(Struct, frozen=True, kw_only=True):
    kills: int = 100
    seed: int = 1
    kinds: tuple[str, ...] = ("kill", "stop", "exception")
    device: str = "cpu"
    clients: int = 10
    variants: int = 4
    """Requests of each kind that differ from each other."""
    heartbeat_timeout_s: int = 3
    start_timeout_s: int = 0
    """0: as the device needs it, when its kernels are compiled."""
    plan: tuple[tuple[str, str], ...] = ()
    """Kinds and moments of the kills, one after the other; by default they are chosen at random."""

    def planned(self, chance: random.Random) -> list[tuple[str, str]]:
        """Return the kinds and moments of the kills: each kind as often as the others, in any order."""
        if self.plan:
            return [*self.plan]
        kinds = [*itertools.islice(itertools.cycle(self.kinds), self.kills)]
        chance.shuffle(kinds)
        moments = chance.choices([*MOMENTS], [*MOMENTS.values()], k=self.kills)
        return [(kind, SERVING if kind in IN_STEPS else moment) for kind, moment in zip(kinds, moments, strict=True)]


class Kill(Struct):
    kind: str
    moment: str
    pid: int
    at: float
    recovered: float = 0.0
    """When another engine was ready."""


class Outcome(Struct):
    """What became of it all."""

    kills: list[Kill] = []
    answered: Counter[str] = field(default_factory=Counter)
    """The right answers, by kind."""
    lost: list[str] = []
    differing: list[str] = []
    orphans: list[int] = []
    restarts: int = 0
    seconds: float = 0.0
    usage: list[tuple[float, Usage]] = []
    """What the api process held, by the minute."""

    @property
    def is_good(self) -> bool:
        bad = (self.lost, self.differing, self.orphans, self.num_unrecovered, self.grew_in_mb, self.grew_in_files)
        return not any(bad)

    @property
    def grew_in_mb(self) -> bool:
        return self.usage[-1][1].rss_mb > self.usage[0][1].rss_mb + MAX_MORE_MB

    @property
    def grew_in_files(self) -> bool:
        return self.usage[-1][1].num_files > self.usage[0][1].num_files + MAX_MORE_FILES

    @property
    def num_unrecovered(self) -> int:
        return sum(not kill.recovered for kill in self.kills)


class Chaos:
    """The driver of one run."""

    def __init__(self, settings: Settings, server: MixedServer, load: MixedLoad, folder: Path) -> None:
        self._settings = settings
        self._server = server
        self._load = load
        self._folder = folder
        self._random = random.Random(settings.seed)
        self._began = time.monotonic()
        self._is_over = False
        self._ready = True
        self._recovered = self._began
        self._open: dict[object, float] = {}
        """When each of the open requests was sent."""
        self._fork_server = _parent(server.first_engine)
        self.outcome = Outcome()

    async def run(self, progress: Progress | None = None) -> None:
        """Kill engines under load; then every request is answered once more."""
        self._monitoring = asyncio.create_task(self._monitor())
        clients = [asyncio.create_task(self._send_on(number)) for number in range(self._settings.clients)]
        try:
            task = progress.add_task("kills", total=self._settings.kills) if progress else None
            for kind, moment in self._settings.planned(self._random):
                await self._kill(kind, moment)
                if progress and task is not None:
                    progress.advance(task)
            await self._until_recovered()
        finally:
            self._is_over = True
            await asyncio.gather(*clients)
            await asyncio.gather(*(self._send(number) for number in range(len(self._load.requests))))
            self._monitoring.cancel()
        self.outcome.restarts = int(await asyncio.to_thread(self._server.metric, "weft_engine_restarts_total"))
        self.outcome.seconds = time.monotonic() - self._began

    async def _send_on(self, client: int) -> None:
        choice = random.Random(f"{self._settings.seed} {client}")
        while not self._is_over:
            await self._send(choice.randrange(len(self._load.requests)))

    async def _send(self, number: int) -> None:
        self._open[sent := object()] = time.monotonic()
        try:
            await self._load.check(number)
        except Lost as lost:
            self.outcome.lost.append(str(lost))
        except Differs as differs:
            self.outcome.differing.append(str(differs))
        else:
            self.outcome.answered[self._load.requests[number].kind] += 1
        finally:
            del self._open[sent]

    async def _kill(self, kind: str, moment: str) -> None:
        await self._until_recovered() if moment != STARTING else await self._until_there()
        delays = {
            SERVING: self._random.expovariate(1 / SERVING_SECONDS),
            READY: self._random.uniform(0, READY_SECONDS),
            STARTING: self._random.uniform(0, STARTING_SECONDS),
        }
        await asyncio.sleep(delays[moment])
        pid = await self._fail_in_a_step(kind) if kind in IN_STEPS else await self._signal(SIGNALS[kind])
        self._ready = False
        self.outcome.kills.append(Kill(kind, moment, pid, time.monotonic()))

    async def _signal(self, number: signal.Signals) -> int:
        pid = await self._until_there()
        os.kill(pid, number)
        return pid

    async def _fail_in_a_step(self, fault: str) -> int:
        await self._until(lambda: all(sent > self._recovered for sent in self._open.values()))
        # An engine may look at any moment: what it finds is whole.
        (written := self._folder / "written").write_text(fault)
        written.rename(self._folder / "fault")
        await self._until(lambda: not (self._folder / "fault").exists())
        return int((self._folder / "struck").read_text())

    def _victim(self) -> int | None:
        """Return the engine process that was not struck yet, if there is one."""
        struck = {kill.pid for kill in self.outcome.kills}
        children = Path(f"/proc/{self._fork_server}/task/{self._fork_server}/children").read_text().split()
        return next((pid for pid in map(int, children) if pid not in struck and is_engine(pid)), None)

    async def _until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, for as long as the server is there, and seen."""
        seeing = self._monitoring
        try:
            await until(lambda: self._server.process.poll() is not None or seeing.done() or condition())
        except TimeoutError as error:
            raise TimeoutError(f"{error} after {self.outcome.kills}:\n{self._log}") from error
        if seeing.done():
            seeing.result()
        if (code := self._server.process.poll()) is not None:
            raise RuntimeError(f"the server ended with {code}:\n{self._log}")

    @property
    def _log(self) -> str:
        return "".join(self._server.log[-20:])

    async def _until_recovered(self) -> None:
        await self._until(lambda: self._ready)

    async def _until_there(self) -> int:
        """Wait for an engine process that was not struck yet, ready or not."""
        while (pid := self._victim()) is None:
            await self._until(lambda: self._victim() is not None)
        return pid

    async def _monitor(self) -> None:
        """See when another engine is ready after a kill, and once a second what the api process holds."""
        for tick in itertools.count():
            await asyncio.sleep(MONITOR_SECONDS)
            if tick % int(1 / MONITOR_SECONDS) == 0:
                minute = (time.monotonic() - self._began) / 60
                self.outcome.usage.append((minute, usage(self._server.process.pid)))
            if self._ready:
                continue
            victim = self._victim()
            if victim is not None and await self._load.is_ready() and victim == self._victim():
                self._ready, self._recovered = True, time.monotonic()
                for kill in self.outcome.kills:
                    kill.recovered = kill.recovered or self._recovered


def run(settings: Settings, console: Console | None = None) -> Outcome:
    """Start a server, strike it, end it, and look for what it has left behind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (faults := folder / "faults").mkdir()
        server = MixedServer(
            folder,
            settings.device,
            *("--heartbeat-timeout-s", str(settings.heartbeat_timeout_s)),
            *("--start-timeout-s", str(settings.start_timeout_s or START_TIMEOUT_SECONDS[settings.device])),
            *("--max-restarts", str(2 * settings.kills)),
            env=run_first(FAULTS, faults),
        )
        with server:
            outcome = asyncio.run(_strike(settings, server, faults, console))
            children = server.children()
        outcome.orphans = [pid for pid in {*children, *_processes_of(faults)} if Path(f"/proc/{pid}").exists()]
    return outcome


async def _strike(settings: Settings, server: MixedServer, folder: Path, console: Console | None) -> Outcome:
    async with MixedLoad(server, settings.variants) as load:
        await load.record()
        chaos = Chaos(settings, server, load, folder)
        with Progress(console=console, transient=True) if console else contextlib.nullcontext() as progress:
            await chaos.run(progress)
        return chaos.outcome


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _processes_of(folder: Path) -> list[int]:
    """Return the processes that were started with this folder on Python's path, all those of the server."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def report(outcome: Outcome, settings: Settings, console: Console) -> None:
    def row(what: str, value: object, *, is_bad: object = False) -> None:
        table.add_row(what, f"[red]{value}[/red]" if is_bad else str(value))

    kinds, moments = (Counter(getattr(kill, name) for kill in outcome.kills) for name in ("kind", "moment"))
    times = [kill.recovered - kill.at for kill in outcome.kills if kill.recovered]
    minutes, held = [minute for minute, _ in outcome.usage], [one for _, one in outcome.usage]
    title = f"{len(outcome.kills)} kills in {outcome.seconds:.0f} s on {settings.device}, seed {settings.seed}"
    table = Table("", "", title=title, show_header=False)
    row("kills", _counted(kinds))
    row("moments", _counted(moments))
    row("engines that died", outcome.restarts)
    row("right answers", f"{outcome.answered.total()}: {_counted(outcome.answered)}")
    row("streams lost", len(outcome.lost), is_bad=outcome.lost)
    row("answers that differ", len(outcome.differing), is_bad=outcome.differing)
    row("processes left behind", len(outcome.orphans), is_bad=outcome.orphans)
    row("kills without recovery", outcome.num_unrecovered, is_bad=outcome.num_unrecovered)
    for kind in kinds:
        own = [kill.recovered - kill.at for kill in outcome.kills if kill.recovered and kill.kind == kind]
        row(f"recovery after {kind}", _percentiles(own))
    row("recovery after all", _percentiles(times))
    for what, values, grew in (
        ("MB", [one.rss_mb for one in held], outcome.grew_in_mb),
        ("files", [one.num_files for one in held], outcome.grew_in_files),
    ):
        rise = f"{values[0]:.0f} → {values[-1]:.0f}, {slope(minutes, values):+.2f} a minute"
        row(f"api process, {what}", rise, is_bad=grew)
    console.print(table)
    for trouble in (*outcome.lost, *outcome.differing):
        console.print(trouble, markup=False)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _percentiles(seconds: list[float]) -> str:
    return f"p50 {np.percentile(seconds, 50):.2f} s, p99 {np.percentile(seconds, 99):.2f} s" if seconds else "-"


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill engines under mixed load.")
    parser.add_argument("--kills", type=int, default=defaults.kills)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--kinds", default=",".join(defaults.kinds), help=f"of {', '.join((*SIGNALS, *IN_STEPS))}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument("--clients", type=int, default=defaults.clients)
    parser.add_argument("--variants", type=int, default=defaults.variants)
    parser.add_argument("--heartbeat-timeout-s", type=int, default=defaults.heartbeat_timeout_s)
    parser.add_argument("--start-timeout-s", type=int, default=defaults.start_timeout_s)
    given = vars(parser.parse_args())
    settings = Settings(**given | {"kinds": tuple(given["kinds"].split(","))})
    if unknown := {*settings.kinds} - {*SIGNALS, *IN_STEPS}:
        parser.error(f"there is no kind {', '.join(sorted(unknown))}")
    console = Console()
    outcome = run(settings, console)
    report(outcome, settings, console)
    sys.exit(not outcome.is_good)


if __name__ == "__main__":
    main()
