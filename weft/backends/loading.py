"""Loading an engine, whichever it is: planned before anything is allocated, and tried with less where the memory does
not hold what was asked. This is the only place where a load is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import chain
from typing import Any, Literal, TypeVar

from msgspec import Struct

from weft.backends.contract import Engine
from weft.backends.ladder import PlanOf, flags_between, rungs
from weft.backends.threads import in_daemon_thread
from weft.config import Config
from weft.errors import EngineFault, OutOfMemory, Unavailable
from weft.hub.hardware import Machine, inspect_machine, oom_kills
from weft.hub.manager import find_model
from weft.hub.memory import as_out_of_memory
from weft.hub.planning import HABITS, Plan, Planner
from weft.hub.progress import Progress

log = logging.getLogger(__name__)

T = TypeVar("T")
Start = Callable[[Config], Awaitable[Engine]]
"""Of one kind of engine."""
Stage = Literal["resolve", "download", "verify", "plan", "load", "warm up", "ready"]
HUB_STAGES = ("resolve", "download", "verify")
"""The hub itself sees to it that these move."""

STALL_SECONDS = 180.0
"""Any other stage in which nothing moves for so long is given up; to load there is the engine's --start-timeout-s."""
LATER_SECONDS = 30.0
"""An engine says itself that it was not ready in time; it has so long to do so."""
POLL_SECONDS = 0.1
TICK_SECONDS = 1.0


class LoadStage(Struct, frozen=True):
    """How far a load is."""

    stage: Stage
    done: int = 0
    total: int = 0
    """Bytes, of those stages that count them."""
    note: str = ""


Report = Callable[[LoadStage], None]


def _unheard(stage: LoadStage) -> None:
    pass


async def load_safely(
    start: Start,
    config: Config,
    *,
    report: Report = _unheard,
    machine: Callable[[], Machine] = inspect_machine,
    stall_s: float = STALL_SECONDS,
) -> Engine:
    """Start an engine that finds its own name in the configuration.

    Raises what `start` raises; OutOfMemory when neither what was asked nor anything less fits, or when it may not be
    tried with less; and Unavailable, naming the stage, when nothing moves for `stall_s`.
    """
    watch = _Watch(report, config, stall_s)
    return await _unless_stalled(_Load(start, config, watch, machine).run(), watch, lambda engine: engine.close())


async def plan_safely(
    config: Config,
    *,
    report: Report = _unheard,
    machine: Callable[[], Machine] = inspect_machine,
    stall_s: float = STALL_SECONDS,
) -> Plan | None:
    """Find, fetch and check the model and plan its load, and load nothing. None: the engine holds none here.

    Raises what `load_safely` would raise before it plans anything. That it does not fit is no error: `Plan.problem`."""
    watch = _Watch(report, config, stall_s)
    return await _unless_stalled(_planned(config, watch, machine), watch)


async def check_load(config: Config, **options: Any) -> Plan | None:
    """The same, but raises what `load_safely` would raise before it starts anything."""
    plan = await plan_safely(config, **options)
    if plan is not None and plan.problem is not None:
        raise plan.problem
    return plan


class Loading:
    """A load that goes on by itself."""

    def __init__(self, start: Start, config: Config, **options: Any) -> None:
        """As `load_safely`, but for `report`."""
        self.stage = LoadStage("resolve")
        self._task = asyncio.create_task(load_safely(start, config, report=self._note, **options))

    @property
    def is_done(self) -> bool:
        return self._task.done()

    async def engine(self) -> Engine:
        """Wait for its end. Raises as `load_safely` does."""
        return await asyncio.shield(self._task)

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    def _note(self, stage: LoadStage) -> None:
        self.stage = stage


async def _planner(config: Config, watch: _Watch) -> Planner | None:
    engine = config.backend.engine
    if engine not in HABITS:
        return None
    loop = asyncio.get_running_loop()

    def hear(progress: Progress) -> None:
        stage = LoadStage(progress.stage, progress.done, progress.total, progress.note)
        loop.call_soon_threadsafe(watch, stage)

    files = await in_daemon_thread(lambda: find_model(config, hear))
    watch(LoadStage("plan", note=files.name))
    return await in_daemon_thread(lambda: Planner(files, engine))


async def _planned(config: Config, watch: _Watch, machine: Callable[[], Machine]) -> Plan | None:
    planner = await _planner(config, watch)
    return None if planner is None else planner.plan(config, await in_daemon_thread(machine))


class _Load:
    """One load, of as many tries as it takes."""

    def __init__(self, start: Start, config: Config, watch: _Watch, machine: Callable[[], Machine]) -> None:
        self.start = start
        self.asked = config
        self.watch = watch
        self.inspect = machine
        self.plan_of: PlanOf = lambda config: None

    async def run(self) -> Engine:
        planner = await _planner(self.asked, self.watch)
        tries: list[str] = []
        await self._look(planner)
        for config in chain([self.asked], rungs(self.asked, lambda config: self.plan_of(config))):
            plan, flags = self.plan_of(config), flags_between(self.asked, config) or "as asked"
            self._tell(plan, flags, is_first=not tries)
            shortage = plan.problem if plan is not None else None
            if shortage is None:
                try:
                    return await self._try(config, flags, is_here=planner is not None)
                except OutOfMemory as error:
                    shortage = error
            if plan is not None and plan.is_final:
                raise shortage
            if not self.asked.backend.allow_auto_tuning:
                raise self._with_flags(shortage)
            log.warning("It does not fit (%s): %s", flags, shortage.message)
            tries.append(f"{flags}: {shortage.message}")
            await self._look(planner)
        raise OutOfMemory(
            f"{self.asked.model.model} does not fit, though less and less was asked for: {' '.join(tries)}",
            hint="Free memory, or serve a smaller model.",
        )

    async def _look(self, planner: Planner | None) -> None:
        """Plan with the machine as it is now."""
        if planner is not None:
            machine = await in_daemon_thread(self.inspect)
            self.plan_of = lambda config: planner.plan(config, machine)

    def _tell(self, plan: Plan | None, flags: str, *, is_first: bool) -> None:
        if plan is not None and is_first:
            from weft.hub.plan_table import plan_lines

            for line in plan_lines(plan):
                log.info("plan: %s", line)
        if plan is not None and plan.warning:
            log.warning("%s", plan.warning)
        if not is_first:
            log.warning("It is tried with less: %s", flags)

    async def _try(self, config: Config, flags: str, *, is_here: bool) -> Engine:
        """Raises OutOfMemory for any shortage of memory, by the type of the error or the kernel's own count."""
        self.watch(LoadStage("load", note=flags))
        kills = oom_kills()
        try:
            engine = await self.start(config)
        except EngineFault as error:
            if oom_kills() > kills:
                raise OutOfMemory("The kernel ended the engine for want of memory while it loaded.") from error
            raise
        except Exception as error:
            shortage = as_out_of_memory(error)
            if shortage is None or shortage is error:
                raise
            raise shortage from error
        if is_here:
            await self._warm_up(engine)
        self.watch(LoadStage("ready", note=flags))
        log.info("loaded by %s (%s)", config.backend.engine, flags)
        return engine

    async def _warm_up(self, engine: Engine) -> None:
        try:
            while not (health := engine.health()).ready:
                self.watch(LoadStage("warm up", note=health.reason))
                await asyncio.sleep(POLL_SECONDS)
        except BaseException:
            await engine.close()
            raise

    def _with_flags(self, shortage: OutOfMemory) -> OutOfMemory:
        """The error with the flags that would fit, as far as the plan knows."""
        fitting = next(self._fitting(), None)
        if fitting is None:
            return shortage
        hint = f"{shortage.hint} By the plan these fit: {flags_between(self.asked, fitting)}."
        return OutOfMemory(shortage.message, hint=hint.strip())

    def _fitting(self) -> Iterator[Config]:
        for config in rungs(self.asked, self.plan_of):
            plan = self.plan_of(config)
            if plan is not None and plan.problem is None:
                yield config


class _Watch:
    """Hears of every stage, and knows when something last moved."""

    def __init__(self, report: Report, config: Config, stall_s: float) -> None:
        self.stage = LoadStage("resolve")
        self._report = report
        self._stall_s = stall_s
        self._load_s = config.engine.start_timeout_s + LATER_SECONDS
        self._moved = time.monotonic()

    def __call__(self, stage: LoadStage) -> None:
        if (stage.stage, stage.done, stage.note) != (self.stage.stage, self.stage.done, self.stage.note):
            self._moved = time.monotonic()
        self.stage = stage
        self._report(stage)

    @property
    def limit_s(self) -> float:
        if self.stage.stage in HUB_STAGES:
            return math.inf
        return self._load_s if self.stage.stage == "load" else self._stall_s

    @property
    def seconds_left(self) -> float:
        return self._moved + self.limit_s - time.monotonic()


async def _unless_stalled(
    work: Coroutine[Any, Any, T], watch: _Watch, discard: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """`discard` gets what came of the work when nobody waits for it any more."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            if watch.seconds_left <= 0:
                raise Unavailable(
                    f"The load stalled: at the stage {watch.stage.stage!r} nothing moved for {watch.limit_s:.0f} s."
                )
            await asyncio.wait({task}, timeout=min(watch.seconds_left, TICK_SECONDS))
    except BaseException:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None and discard is not None:
            await discard(task.result())
        raise
    return task.result()
