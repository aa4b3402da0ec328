"""Loading an engine, whichever it is: planned before anything is allocated, and tried with less where the memory does
not hold what was asked. This is the only place where a load is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from weft import logs
from weft.backends.contract import Engine
from weft.errors import EngineFault, OutOfMemory, Unavailable
from weft.hub.progress import Progress
from weft.hub.resolve import find_model
from weft.machine.hardware import Machine, inspect_machine, oom_kills
from weft.machine.memory import MIB, as_out_of_memory, safe_share
from weft.machine.planner import CPU_CACHE_BYTES, MEMORY_PROFILES, Plan, Planner, plan_fields, plan_lines
from weft.options import CacheOptions, Config, settings

SHARE_STEP = 0.10
"""The share of a GPU by which an engine that ran out of memory is given less."""
LEAST_CONTEXT = 2048
"""No shorter context is tried, unless the plan says that no longer one fits."""
HALVINGS = 3
"""How often the context, and the batch, is halved."""
UNKNOWN_CONTEXT = 16384
"""Where to begin with a model whose own context is not known."""

PlanOf = Callable[[Config], Plan | None]


def fallback_configs(config: Config, plan_of: PlanOf) -> Iterator[Config]:
    """Return the configurations to try after this, in order. Each keeps what those before it changed, and is made when
    it is asked for: by what is free then."""
    for lower in (_own_cache, _free_share, _smaller_share, _contexts, _batches):
        for config in lower(config, plan_of(config)):  # noqa: B020 - the next step goes on from the last
            config = _within_free(config, plan_of(config))
            yield config


def flags_between(old: Config, new: Config) -> str:
    """The flags that make one of the other."""
    changed = []
    for setting in settings("model", "cache", "scheduler"):
        before, after = (getattr(getattr(config, setting.section), setting.name) for config in (old, new))
        if before != after:
            changed.append(f"{setting.flag} {after}")
    return " ".join(changed)


def _own_cache(config: Config, plan: Plan | None) -> Iterator[Config]:
    """A cache that was asked for by its size is given up for the one that the engine takes by itself: where the plan
    has no room for it, or that one is smaller."""
    has_room = plan is not None and plan.problem is None
    is_smaller = plan is not None and plan.place == "cpu" and plan.kv > CPU_CACHE_BYTES
    if _has_sized_cache(config) and (is_smaller or not has_room):
        yield replace(config, cache=replace(config.cache, kv_cache_memory_mb=0, num_blocks=0))


def _free_share(config: Config, plan: Plan | None) -> Iterator[Config]:
    """Yield a configuration that takes all memory that is free now, where the plan itself finds the share too small or
    more than there is."""
    if plan is None or plan.problem is None or plan.place == "cpu" or not plan.free_share:
        return
    if plan.free_share != config.cache.gpu_memory_utilization:
        yield replace(config, cache=replace(config.cache, gpu_memory_utilization=plan.free_share))


def _smaller_share(config: Config, plan: Plan | None) -> Iterator[Config]:
    """Yield configurations with less memory, but enough for the weights and the least context, where it was the engine
    that ran out of it."""
    if plan is None or plan.problem is not None or plan.place == "cpu" or not plan.free_share:
        return
    total, given = plan.memory.total, safe_share(config.cache)
    if _has_sized_cache(config):
        given = min(given, plan.needed_bytes / total)
    least = (plan.needed_bytes - plan.kv + LEAST_CONTEXT * plan.kv_per_token) / total
    share = max(math.ceil(least * 100) / 100, min(plan.free_share, round(given - SHARE_STEP, 2)))
    if share < given:
        cache = replace(config.cache, gpu_memory_utilization=share, kv_cache_memory_mb=0, num_blocks=0)
        yield replace(config, cache=cache)


def _has_sized_cache(config: Config) -> bool:
    return bool(config.cache.kv_cache_memory_mb or config.cache.num_blocks)


def _within_free(config: Config, plan: Plan | None) -> Config:
    """Return the configuration within what is free now: what was free a try ago may be taken."""
    if plan is None or plan.place == "cpu" or not 0 < plan.free_share < config.cache.gpu_memory_utilization:
        return config
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=plan.free_share))


def _contexts(config: Config, plan: Plan | None) -> Iterator[Config]:
    """The longest that the plan holds, and halves."""
    longest = (plan.max_model_len if plan is not None else config.model.max_model_len) or UNKNOWN_CONTEXT
    largest = plan.largest_context if plan is not None else 0
    halves = {longest >> times for times in range(1, HALVINGS + 1)}
    least = min(LEAST_CONTEXT, largest or LEAST_CONTEXT)
    for context in sorted((c for c in halves | {largest} if least <= c < longest), reverse=True):
        shorter = replace(config, model=replace(config.model, max_model_len=context))
        yield replace(shorter, cache=_cache_for(context, shorter, plan)) if plan is not None else shorter


def _cache_for(context: int, config: Config, plan: Plan) -> CacheOptions:
    """Return the cache settings for a context: on a CPU the cache has a size of its own, lowered to hold this
    context."""
    if plan.place != "cpu" or not plan.kv_per_token:
        return config.cache
    blocks = -(-context // config.cache.block_size) + 1
    needed_mib = -(-blocks * config.cache.block_size * plan.kv_per_token // MIB)
    current_mib = config.cache.kv_cache_memory_mb or CPU_CACHE_BYTES // MIB
    return replace(config.cache, kv_cache_memory_mb=min(needed_mib, current_mib))


def _batches(config: Config, plan: Plan | None) -> Iterator[Config]:
    """Return configurations of fewer requests at a time, and fewer tokens in a step."""
    options = config.scheduler
    seqs = plan.max_num_seqs if plan is not None else options.num_seqs(on_cpu=False)
    tokens = plan.max_num_batched_tokens if plan is not None else options.num_batched_tokens(on_cpu=False)
    for _ in range(HALVINGS):
        if seqs == 1:
            return
        seqs //= 2
        tokens = max(seqs, tokens // 2)
        yield replace(config, scheduler=replace(config.scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens))


T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Do work in a thread as asyncio.to_thread does, but one that the program does not wait for when it ends."""
    future: Future[T] = Future()
    # Whoever gives up waiting does not end the thread, which will have an outcome to set.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the task that waits
            future.set_exception(error)

    threading.Thread(target=run, name="weft-background", daemon=True).start()
    return await asyncio.wrap_future(future)


log = logging.getLogger(__name__)

Start = Callable[[Config], Awaitable[Engine]]
"""Starts one kind of engine."""
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
    """The stage that a load has reached."""

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
        """Take what `load_safely` takes, but for `report`."""
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
    if engine not in MEMORY_PROFILES:
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
        for config in chain([self.asked], fallback_configs(self.asked, lambda config: self.plan_of(config))):
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
            f"{self.asked.model.model} does not fit, also not with smaller settings: {' '.join(tries)}",
            hint="Free memory, or serve a smaller model.",
        )

    async def _look(self, planner: Planner | None) -> None:
        """Plan with the machine as it is now."""
        if planner is not None:
            machine = await in_daemon_thread(self.inspect)
            self.plan_of = lambda config: planner.plan(config, machine)

    def _tell(self, plan: Plan | None, flags: str, *, is_first: bool) -> None:
        if plan is not None and is_first:
            logs.event(log, logging.INFO, "plan", plan_fields(plan), table=partial(plan_lines, plan))
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
        for config in fallback_configs(self.asked, self.plan_of):
            plan = self.plan_of(config)
            if plan is not None and plan.problem is None:
                yield config


class _Watch:
    """The watch is told of every stage, and knows when something last moved."""

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
    """Wait for the work. `discard` gets its result when it comes after the wait was given up."""
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
