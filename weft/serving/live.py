"""The live view: the state of the engines and of recent requests, as a stream for those who watch.

One snapshot a tick is made for all watchers, and none without watchers: a request that ends leaves its timeline,
and that is all. Snapshots are made of counters that the api process has anyway; only the states of the cache's blocks
are read from an engine, between its steps and a few thousand at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice

import msgspec
from msgspec import Struct

from weft.engine_stats import EngineStats
from weft.errors import Overloaded, WeftError
from weft.observe.metrics import Histogram
from weft.serving.model_pool import ModelPool
from weft.serving.model_slot import ModelSlot
from weft.serving.served_model import ServedModel
from weft.serving.timing import EndedRequests, Timeline
from weft.types import ReadBlocks

log = logging.getLogger(__name__)

TICK_S = 0.5
MAX_WATCHERS = 32
MAX_WATCHERS_PER_KEY = 8
MAX_OPEN_SHOWN = 32
MAX_ENDED_KEPT = 100
MAX_CELLS = 1024
"""Cells of a map of blocks, however many blocks there are."""
MAX_BLOCKS_READ = 4096
"""Blocks whose states are read at once, which takes an engine less than a millisecond: the map of a larger cache is
read in parts."""
READ_S = 1.0
"""An engine that makes steps is read so often."""
REREAD_S = 5.0
"""The blocks of an engine that makes no steps are read so often."""
LATENCY_TICKS = 20
"""Latencies are those of the last ten seconds."""


class SpentBudget(Struct, frozen=True, kw_only=True):
    """The steps of one tick, and the tokens of their budgets by kind of work."""

    steps: int
    decode: int
    prefill: int
    encode: int
    denoise: int


class Throughput(Struct, frozen=True, kw_only=True):
    """The work of one tick, by the second."""

    prompt_tokens_per_s: float
    """Tokens of prompts that were computed; of an engine that tells no steps, tokens of prompts that were taken."""
    output_tokens_per_s: float
    images_per_s: float
    denoise_steps_per_s: float


class LatencyFigures(Struct, frozen=True):
    """The latencies of the last ten seconds, in seconds; quantiles are estimated from the histogram of the metrics."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float


class CacheBlocks(Struct, frozen=True, kw_only=True):
    """The blocks of a KV cache."""

    total: int
    used: int
    block_size: int
    """Tokens of a block."""
    cached: int | None = None
    """Free blocks that the prefix cache can still find; None: the engine does not tell, or not yet."""
    blocks_per_cell: int | None = None
    used_cells: str | None = None
    """The share of each cell's blocks that is in use, as a hexadecimal digit: 0 is none and f all of them."""
    cached_cells: str | None = None


class LiveModel(Struct, frozen=True, kw_only=True):
    """One model of the server. What its engine does not tell is None."""

    name: str
    state: str
    stage: str
    """The stage of a load under way."""
    engine: str
    device: str
    memory_bytes: int
    """Bytes in use on its device, or planned; 0: none, or not known."""
    running: int
    waiting: int
    restarts: int
    preemptions: int
    spent: SpentBudget | None = None
    throughput: Throughput | None = None
    """None in the first snapshot after the watch began."""
    ttft: LatencyFigures | None = None
    """None: no request had its first token in this time; likewise below."""
    inter_token: LatencyFigures | None = None
    blocks: CacheBlocks | None = None
    not_told: str = ""
    """What the engine does not tell, in words; empty: all is told."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """One event of the stream."""

    time: float
    """Seconds since 1970."""
    tick_s: float
    """Seconds since the last one."""
    models: list[LiveModel]
    open: list[Timeline]
    """The newest requests that have not ended."""
    ended: list[Timeline]
    """Requests that ended since the last snapshot; in a watcher's first one, the last that ended before."""


class LatencyWindow:
    """The values that a histogram got in the last ticks."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._past: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=LATENCY_TICKS)
        self._past.append((histogram.total, histogram.counts))

    def read(self) -> LatencyFigures | None:
        total, counts = self._histogram.total, self._histogram.counts
        total_before, counts_before = self._past[0]
        self._past.append((total, counts))
        new = [now - before for now, before in zip(counts, counts_before, strict=True)]
        if not (count := sum(new)):
            return None
        p50, p95 = (round(self._histogram.quantile(share, new), 5) for share in (0.5, 0.95))
        return LatencyFigures(count, round((total - total_before) / count, 5), p50, p95)


class BlockMap:
    """The map of an engine's blocks, which is read in parts while the engine steps."""

    def __init__(self, served: ServedModel) -> None:
        self._engine = served.engine
        self._blocks_per_cell = 1
        self._used: list[int] = []
        self._cached: list[int] = []
        self._next = 0
        """The first cell that is read next."""
        self._is_read = False
        """True when every cell was read once."""
        self._read_at = (-1, -math.inf)
        """The steps that were made, and the time, when a part was last read."""
        self._drawn: tuple[str, str] | None = None
        """The cells as digits, until they change."""
        self._reading: asyncio.Task[None] | None = None
        self.refusal = ""
        """The reason why the engine does not tell; empty: it does."""

    def refresh(self, stats: EngineStats) -> None:
        """Read the next part, unless the last one is still being read or nothing can have changed."""
        if self.refusal or self._reading is not None or not stats.blocks_total:
            return
        steps, read_at = self._read_at
        now = time.monotonic()
        is_done = self._next == 0 and steps == stats.steps
        if now - read_at < (REREAD_S if is_done else READ_S):
            return
        self._read_at = (stats.steps, now)
        per_cell = -(-stats.blocks_total // MAX_CELLS)
        num_cells = -(-stats.blocks_total // per_cell)
        if (len(self._used), self._blocks_per_cell) != (num_cells, per_cell):
            # Another engine may have taken over, with a cache of another size.
            self._used, self._cached = [0] * num_cells, [0] * num_cells
            self._blocks_per_cell, self._next, self._is_read = per_cell, 0, False
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(self._end_reading)

    async def _read(self) -> None:
        first, num_cells, per_cell = self._next, len(self._used), self._blocks_per_cell
        count = min(num_cells - first, max(1, MAX_BLOCKS_READ // per_cell))
        try:
            text = await self._engine.control(ReadBlocks(first * per_cell, count, per_cell))
        except WeftError as error:
            if error.status < 500 or error.status == 501:
                self.refusal = error.message
            return
        used, cached = msgspec.json.decode(text, type=tuple[list[int], list[int]])
        self._used[first : first + count] = used
        self._cached[first : first + count] = cached
        self._drawn = None
        self._next = (first + count) % num_cells
        self._is_read = self._is_read or self._next == 0

    def _end_reading(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled():
            task.result()

    def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def blocks(self, stats: EngineStats) -> CacheBlocks:
        total, block_size = stats.blocks_total, self._engine.model.block_size
        if not self._is_read:
            return CacheBlocks(total=total, used=stats.blocks_used, block_size=block_size)
        per_cell = self._blocks_per_cell
        if self._drawn is None:
            last = total - per_cell * (len(self._used) - 1)
            self._drawn = _digits(self._used, per_cell, last), _digits(self._cached, per_cell, last)
        used_cells, cached_cells = self._drawn
        return CacheBlocks(
            total=total,
            used=stats.blocks_used,
            block_size=block_size,
            cached=min(sum(self._cached), max(0, total - stats.blocks_used)),
            blocks_per_cell=per_cell,
            used_cells=used_cells,
            cached_cells=cached_cells,
        )


def _digits(counts: Sequence[int], size: int, last_size: int) -> str:
    """Write counts as shares of their cells, of which the last may be smaller."""
    shares = [_digit(count, size) for count in range(size + 1)]
    return "".join([shares[count] for count in counts[:-1]]) + _digit(counts[-1], last_size)


def _digit(count: int, size: int) -> str:
    """Write a count as its share of the size. Some is never shown as none, nor as all."""
    return "f" if count >= size else "0" if not count else f"{min(14, max(1, round(15 * count / size))):x}"


class ModelWatch:
    """A loaded model's counters as they were at the last tick: its snapshots are made of them."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.map = BlockMap(served)
        self._before: EngineStats | None = None
        self._ttft = LatencyWindow(served.metrics.time_to_first_token)
        self._inter_token = LatencyWindow(served.metrics.inter_token_latency)

    def look(self, slot: ModelSlot, seconds: float) -> LiveModel:
        engine, before = self.served.engine, self._before
        stats = self._before = engine.stats()
        # An engine without blocks of its own passes requests on, and does not know how they are computed.
        has_steps = engine.model.num_blocks > 0
        if has_steps:
            self.map.refresh(stats)
        return LiveModel(
            name=slot.name,
            state=slot.state if engine.health().ready else engine.health().reason or slot.state,
            stage=slot.stage,
            engine=engine.name,
            device=engine.model.device,
            memory_bytes=max(stats.memory_allocated, stats.memory_reserved) or _planned(slot),
            running=stats.running,
            waiting=stats.waiting,
            restarts=stats.restarts,
            preemptions=stats.preemptions,
            spent=_spent(stats, before) if has_steps and before is not None else None,
            throughput=None if before is None else _throughput(stats, before, seconds),
            ttft=self._ttft.read(),
            inter_token=self._inter_token.read(),
            blocks=self.map.blocks(stats) if has_steps else None,
            not_told=self.map.refusal if has_steps else f"The engine {engine.name} tells no steps and no blocks.",
        )


def _planned(slot: ModelSlot) -> int:
    return slot.need.num_bytes if slot.holds_memory else 0


def _spent(now: EngineStats, before: EngineStats) -> SpentBudget:
    return SpentBudget(
        steps=now.steps - before.steps,
        decode=now.decode_tokens - before.decode_tokens,
        prefill=now.prefill_tokens - before.prefill_tokens,
        encode=now.encode_tokens - before.encode_tokens,
        denoise=now.denoise_tokens - before.denoise_tokens,
    )


def _throughput(now: EngineStats, before: EngineStats, seconds: float) -> Throughput:
    def rate(count: int) -> float:
        return round(count / seconds, 2)

    computed = now.prefill_tokens + now.encode_tokens - before.prefill_tokens - before.encode_tokens
    return Throughput(
        prompt_tokens_per_s=rate(computed if now.steps else now.prompt_tokens - before.prompt_tokens),
        output_tokens_per_s=rate(now.generation_tokens - before.generation_tokens),
        images_per_s=rate(now.images - before.images),
        denoise_steps_per_s=rate(now.denoise_steps - before.denoise_steps),
    )


def _not_loaded(slot: ModelSlot) -> LiveModel:
    return LiveModel(
        name=slot.name,
        state=slot.state,
        stage=slot.stage,
        engine=slot.entry.config.backend.engine,
        device="",
        memory_bytes=_planned(slot),
        running=0,
        waiting=slot.num_claims - slot.num_inside,
        restarts=0,
        preemptions=0,
    )


class LiveView:
    """Makes a snapshot a tick while there are watchers, and hands it to every one of them."""

    def __init__(self, pool: ModelPool, open_timelines: Callable[[], list[Timeline]], ended: EndedRequests) -> None:
        self._pool = pool
        self._open_timelines = open_timelines
        self._ended = ended
        self._watchers: dict[str | None, int] = {}
        """How many watch, by tenant; None: those who see the requests of all."""
        self._watches: dict[str, ModelWatch] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._latest: Snapshot | None = None
        self._tick = asyncio.Event()
        """Set at the next tick; each tick has its own."""
        self._encoded: dict[str | None, bytes] = {}
        """The latest snapshot as an event, by the tenant that it is for."""
        self._is_closed = False

    @property
    def num_watchers(self) -> int:
        return sum(self._watchers.values())

    def watch(self, tenant: str | None) -> AsyncIterator[bytes]:
        """Return the events of a stream, with the requests of this tenant; None: of all. Raises Overloaded where too
        many watch already."""
        if self._is_full(tenant):
            raise Overloaded(
                f"{self.num_watchers} watch already; at most {MAX_WATCHERS} can, {MAX_WATCHERS_PER_KEY} with one key.",
                hint="Close another live view.",
            )
        return self._events(tenant)

    def _is_full(self, tenant: str | None) -> bool:
        return self.num_watchers >= MAX_WATCHERS or self._watchers.get(tenant, 0) >= MAX_WATCHERS_PER_KEY

    async def _events(self, tenant: str | None) -> AsyncIterator[bytes]:
        # Others that were let in at the same moment may have begun before: their streams are counted when they begin.
        if self._is_full(tenant):
            return
        self._watchers[tenant] = self._watchers.get(tenant, 0) + 1
        try:
            if self._ticking is None and not self._is_closed:
                self._take_snapshot(0.0, self._ended.count)
                self._ticking = asyncio.create_task(self._tick_forever(), name="weft-live-view")
                self._ticking.add_done_callback(self._end_ticking)
            if self._latest is not None:
                yield _event(_for_tenant(self._latest, tenant, ended=[*self._ended.timelines]))
            # A watcher that reads slowly misses ticks, and waits for none of them.
            while self._ticking is not None:
                await self._tick.wait()
                if self._latest is not None:
                    yield self._event_for(tenant)
        finally:
            self._watchers[tenant] -= 1
            if not self._watchers[tenant]:
                del self._watchers[tenant]
            if not self._watchers:
                self._stop()

    def _event_for(self, tenant: str | None) -> bytes:
        if tenant not in self._encoded:
            assert self._latest is not None
            self._encoded[tenant] = _event(_for_tenant(self._latest, tenant, self._latest.ended))
        return self._encoded[tenant]

    async def _tick_forever(self) -> None:
        last, seen = time.monotonic(), self._ended.count
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._take_snapshot(now - last, seen)
            last, seen = now, self._ended.count
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    def _end_ticking(self, task: asyncio.Task[None]) -> None:
        """End all streams where no snapshot could be made: clients that want to see more begin again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the live view failed", exc_info=error)
            self._stop()

    def _take_snapshot(self, seconds: float, num_seen: int) -> None:
        """Look at everything. `num_seen`: requests that had ended at the last tick."""
        kept = self._ended.timelines
        new = min(self._ended.count - num_seen, len(kept))
        self._encoded.clear()
        self._latest = Snapshot(
            time=round(time.time(), 3),
            tick_s=round(seconds, 3),
            models=[self._look(slot, seconds) for slot in self._pool.slots],
            open=self._open_timelines(),
            ended=[*islice(kept, len(kept) - new, None)],
        )

    def _look(self, slot: ModelSlot, seconds: float) -> LiveModel:
        watch = self._watches.get(slot.name)
        if watch is not None and watch.served is not slot.served:
            self._watches.pop(slot.name).map.end()
        if slot.served is None:
            return _not_loaded(slot)
        if slot.name not in self._watches:
            self._watches[slot.name] = ModelWatch(slot.served)
        return self._watches[slot.name].look(slot, seconds)

    def _stop(self) -> None:
        """End all streams, and forget everything but the requests that ended."""
        if self._ticking is not None:
            self._ticking.cancel()
        for watch in self._watches.values():
            watch.map.end()
        self._watches.clear()
        self._encoded.clear()
        self._ticking = self._latest = None
        self._tick.set()
        self._tick = asyncio.Event()

    async def close(self) -> None:
        """End the streams of all watchers."""
        self._is_closed = True
        self._stop()


def _for_tenant(snapshot: Snapshot, tenant: str | None, ended: list[Timeline]) -> Snapshot:
    """Return a snapshot with the requests that a tenant may see: its own."""
    if tenant is None:
        return msgspec.structs.replace(snapshot, ended=ended)
    return msgspec.structs.replace(
        snapshot,
        open=[timeline for timeline in snapshot.open if timeline.tenant == tenant],
        ended=[timeline for timeline in ended if timeline.tenant == tenant],
    )


def _event(snapshot: Snapshot) -> bytes:
    return b"data: " + msgspec.json.encode(snapshot) + b"\n\n"
