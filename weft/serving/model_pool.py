"""The models of a server by their names: which is meant, which are loaded, and what changes when their file does.

A server of one model has a pool of one, whose model was loaded before it came in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from weft.backends.contract import ConfiguredModels, Engine, Health, Need
from weft.errors import ConfigError, EngineFault, InvalidRequest, ModelError, ModelNotFound, OutOfMemory, Unavailable
from weft.options import Config, ModelEntry
from weft.serving.model_slot import ModelSlot
from weft.serving.served_model import ServedModel

log = logging.getLogger(__name__)

GIB = 1 << 30


class PoolMemory:
    def __init__(self, max_loaded: int, limit_bytes: int, slots: Callable[[], Iterable[ModelSlot]]) -> None:
        """0: no limit but what is free, in number and in bytes."""
        self._max_loaded = max_loaded
        self._limit_bytes = limit_bytes
        self._slots = slots
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Look again for memory: a model may have become idle, or be gone."""
        self._change.set()

    async def reserve(self, slot: ModelSlot, ask: Callable[[], Awaitable[Need]]) -> None:
        """Return when the model may be loaded; it holds its memory from then on. Idle models are unloaded for it
        (`unload_one`). While there are only busy ones it waits, and later loads wait behind it.

        Raises OutOfMemory when it is too large for the limit by itself.
        """
        await ask()
        slot.waits_for_memory = True
        async with self._turn:
            while True:
                self._change.clear()
                # Again, with the memory as it is now; what had to be fetched was fetched before it was its turn.
                need = await ask()
                self._check_size(slot, need)
                shortage = self._shortage(slot, need)
                if not shortage:
                    slot.need, slot.holds_memory, slot.waits_for_memory = need, True, False
                    return
                slot.stage = f"waiting for room: {shortage}"
                if not await self.unload_one(f"for {slot.name}: {shortage}", keep=slot):
                    await self._change.wait()

    async def unload_one(self, why: str, *, keep: ModelSlot) -> bool:
        """Unload the idle model that tenants other than the one whose request is to be served did not use for longest;
        so a tenant's own models go before those of others. False when there is none but the one to keep."""
        idle = [slot for slot in self._slots() if slot.is_idle and slot is not keep]
        if not idle:
            return False
        victim = min(idle, key=lambda slot: (slot.last_used_by_others(keep.wanted_by), slot.last_used))
        log.info("the model %s is unloaded %s", victim.name, why)
        await victim.unload()
        return True

    def _check_size(self, slot: ModelSlot, need: Need) -> None:
        if self._limit_bytes and need.num_bytes > self._limit_bytes:
            raise OutOfMemory(
                f"{slot.name} takes {need.num_bytes / GIB:.2f} GiB by its plan, and all models together may take "
                f"{self._limit_bytes / GIB:.2f} GiB.",
                hint="The setting is --max-models-memory.",
            )

    def _shortage(self, slot: ModelSlot, need: Need) -> str:
        """Return why it cannot be loaded now; empty: it can, or unloading others would not help."""
        others = [other for other in self._slots() if other is not slot and other.holds_memory]
        if self._max_loaded and len(others) >= self._max_loaded:
            return f"{len(others)} of {self._max_loaded} models are loaded"
        held = sum(other.need.num_bytes for other in others)
        if self._limit_bytes and held + need.num_bytes > self._limit_bytes:
            wanted, limit = (held + need.num_bytes) / GIB, self._limit_bytes / GIB
            return f"{wanted:.2f} GiB are wanted of {limit:.2f}"
        return need.problem if held else ""


WATCH_S = 0.5
NO_START = "This server was given its model loaded, and could not load it again."
NO_FILE = "There is no file of models to read again."

OpenServedModel = Callable[[Config, Engine], ServedModel]
StartEngine = Callable[[], Awaitable[Engine]]


class ModelPool:
    def __init__(self, config: Config, open_served: OpenServedModel, models: ConfiguredModels | None = None) -> None:
        """Serve the configured models, or without them the one that `adopt` takes in."""
        self._options = config.model_pool
        self._config = config
        self._open_served = open_served
        self._models = models
        self._restart: StartEngine | None = None
        """Starts the engine of a pool of one again."""
        self._slots: dict[str, ModelSlot] = {}
        self._going: set[ModelSlot] = set()
        """Slots that were taken away, but are not yet unloaded."""
        self._memory = PoolMemory(
            self._options.max_loaded_models, models.memory_limit if models else 0, self._all_slots
        )
        self._has_started = False
        self._failed: set[ModelSlot] = set()
        """Slots whose engines had died for good when that was looked for last."""
        self.lost = asyncio.Event()
        """Set when no model can be served any more, unless the server is to go on without."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.created = int(time.time())
        if models is not None:
            self._take_in(models.entries)

    @property
    def slots(self) -> list[ModelSlot]:
        return [*self._slots.values()]

    @property
    def has_many(self) -> bool:
        """True when its models are loaded and unloaded while it runs."""
        return self._models is not None

    def served_models(self) -> list[ServedModel]:
        """Return all models that are loaded."""
        return [slot.served for slot in self._all_slots() if slot.served is not None]

    # Which model is meant.

    def default(self) -> ModelSlot:
        """Return the model of requests that name none. Raises Unavailable while there is none yet."""
        if not self._slots:
            raise Unavailable("The model is being loaded.", hint="GET /health tells when it is ready.")
        return self._slots[self._models.default] if self._models is not None else next(iter(self._slots.values()))

    @property
    def only_name(self) -> str:
        """The name of the only model; empty: there are several, or none yet."""
        return next(iter(self._slots)) if len(self._slots) == 1 else ""

    def find(self, name: str | None) -> ModelSlot:
        """Find a model by its own name, or that of an adapter or of the image model beside it. None: the default one.

        Raises ModelNotFound for a name of none of several; the only one says itself what is wrong with a name."""
        default = self.default()
        if not name or not self.has_many:
            return default
        if name in self._slots:
            return self._slots[name]
        for slot in self._slots.values():
            if slot.answers_to(name):
                return slot
        raise ModelNotFound(
            f"There is no model {name!r:.200} here; this server has {', '.join(self._slots)}.", param="model"
        )

    def find_image_model(self, name: str | None) -> ModelSlot:
        """Do the same for a request for images. None: a loaded model that has an image model, or the default one."""
        with_images = [slot for slot in self._slots.values() if slot.is_open and slot.image_model_name]
        return with_images[0] if name is None and with_images else self.find(name)

    def named(self, name: str) -> ModelSlot:
        """Find a model by its own name alone, to load or unload it; in a pool of one, no name is that one's. Raises
        ModelNotFound, and InvalidRequest where it could not be loaded again."""
        if not self.has_many:
            name = name or self.default().name
            if self._restart is None:
                raise InvalidRequest(NO_START)
        if name not in self._slots:
            raise ModelNotFound(f"There is no model {name!r:.200} here; there are {', '.join(self._slots)}.")
        return self._slots[name]

    # How they are.

    def health(self) -> Health:
        """Return ready as soon as what is loaded at start is, and for as long as one of them can answer."""
        if not self._slots or (self.has_many and not self._has_started):
            return Health(False, "starting")
        if not self.has_many:
            [slot] = self.slots
            # One that was unloaded is loaded again for the next request.
            return slot.served.engine.health() if slot.served is not None else Health(not slot.trouble, slot.trouble)
        troubles = self.troubles()
        if len(troubles) < len(self._slots):
            return Health(True)
        return Health(False, "; ".join(f"{name}: {why}" for name, why in troubles.items()))

    def troubles(self) -> dict[str, str]:
        """Return by name why models cannot answer."""
        return {slot.name: slot.trouble for slot in self._slots.values() if slot.trouble}

    # Its life.

    def adopt(self, engine: Engine, restart: StartEngine | None = None) -> ServedModel:
        """Take in the one model of a pool of one, which is loaded. With `restart` it is watched over, can be unloaded,
        and is loaded anew where the server is to go on without an engine."""
        self._restart = restart
        served = self._open_served(self._config, engine)
        entry = ModelEntry(name=served.model_name, config=self._config, preload=True)

        async def load_again(slot: ModelSlot) -> ServedModel:
            assert restart is not None
            engine = await restart()
            slot.need, slot.holds_memory = _measured(Need(), engine), True
            return self._open_served(self._config, engine)

        slot = ModelSlot(entry, self._options, load_again, self._memory.changed)
        slot.need, slot.holds_memory = _measured(Need(), engine), True
        slot.adopt(served, slot.entry)
        self._slots = {slot.name: slot}
        if restart is not None:
            self._background(self._keep_watch())
        return served

    async def start(self) -> None:
        """Check the files that are here, load what is to be loaded at start, and watch over the file from now on.
        A model with which something is wrong keeps no other from being served."""
        assert self._models is not None
        for slot in self.slots:
            fault = await asyncio.to_thread(self._models.fault, slot.entry)
            if fault:
                log.error("%s: %s cannot be loaded: %s", slot.entry.place, slot.name, fault)
                slot.fail(ModelError(fault))
        self._background(self._keep_watch())
        for slot in self.slots:
            if slot.entry.preload and slot.entry.load_mode == "async_load":
                slot.begin()
        for slot in self.slots:
            if slot.entry.preload and slot.entry.load_mode == "check_and_load":
                await self._preload(slot)
        self._has_started = True

    async def close(self) -> None:
        # Taken now: the tasks that end here forget what they were letting go.
        slots = self._all_slots()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(slot.close() for slot in slots))

    async def load(self, slot: ModelSlot) -> None:
        """Load a model. Raises what keeps it from being loaded, or that it takes too long."""
        slot.claim()
        try:
            await slot.opened()
        finally:
            slot.end_claim()

    async def load_anew(self, slot: ModelSlot) -> None:
        """Unload a model and load it again, from its files as they are now."""
        await slot.unload()
        slot.forgive()
        await self.load(slot)

    def reload(self) -> None:
        """Read the file now. Raises ConfigError, and nothing has changed then."""
        if self._models is None:
            raise InvalidRequest(NO_FILE)
        self._models.reload()
        self._take_in(self._models.entries)

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self._models is not None and self._models.refresh():
                self._take_in(self._models.entries)
            self._look_for_lost_engines()
            for slot in self.slots:
                if slot.failure is not None and slot.entry.preload:
                    slot.begin()
                if slot.is_outdated and slot.is_idle:
                    self._background(self._renew(slot))

    def _look_for_lost_engines(self) -> None:
        """Unload the models whose engines have died for good, to be loaded anew later. Where that leaves none that
        could be served, the server is to end."""
        failed = {slot for slot in self.slots if slot.has_given_up}
        # Twice in a row: what another kind of engine says may be of the moment.
        lost, self._failed = failed & self._failed, failed
        for slot in lost:
            log.error("the model %s has no engine any more", slot.name)
            slot.fail(EngineFault("Its engine died too often and was given up."))
        if not lost:
            return
        if self._config.server.keep_serving_without_engine or any(slot.failure is None for slot in self.slots):
            for slot in lost:
                self._background(slot.unload())
        else:
            self.lost.set()

    def _take_in(self, entries: Mapping[str, ModelEntry]) -> None:
        """Take in the entries: those that are gone drain, new ones appear, what has changed is loaded anew."""
        for name in self._slots.keys() - entries.keys():
            self._let_go(self._slots.pop(name))
        for name, entry in entries.items():
            slot = self._slots.get(name)
            if slot is None:
                self._slots[name] = self._slot(entry)
            elif slot.entry != entry:
                slot.entry = entry
                slot.forgive()
        self._slots = {name: self._slots[name] for name in entries}

    def _let_go(self, slot: ModelSlot) -> None:
        slot.is_gone = True
        self._going.add(slot)
        self._background(self._unloaded(slot))

    async def _unloaded(self, slot: ModelSlot) -> None:
        try:
            await slot.unload()
        finally:
            self._going.discard(slot)

    async def _renew(self, slot: ModelSlot) -> None:
        log.info("the model %s is loaded anew: its entry has changed", slot.name)
        await slot.unload()
        slot.begin()

    async def _preload(self, slot: ModelSlot) -> None:
        slot.begin()
        try:
            await self.load(slot)
        except (ModelNotFound, Unavailable) as error:
            log.warning("the server starts without the model %s: %s", slot.name, error)

    async def _load(self, slot: ModelSlot) -> ServedModel:
        assert self._models is not None
        entry, models = slot.entry, self._models
        if entry.load_mode == "check_only":
            raise ConfigError(f"{entry.name} is only checked, and never loaded: its load_mode is check_only.")

        def report(stage: str) -> None:
            slot.stage = stage

        await self._memory.reserve(slot, partial(models.need, entry, report))
        engine = await models.start(
            entry, report, lambda why: self._memory.unload_one(f"for {slot.name}: {why}", keep=slot)
        )
        slot.need = _measured(slot.need, engine)
        return self._open_served(entry.config, engine)

    def _slot(self, entry: ModelEntry) -> ModelSlot:
        return ModelSlot(entry, self._options, self._load, self._memory.changed)

    def _all_slots(self) -> list[ModelSlot]:
        return [*self._slots.values(), *self._going]

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the model pool's work failed", exc_info=error)


def _measured(planned: Need, engine: Engine) -> Need:
    """Return what an engine says that it has taken; what was planned where it says nothing."""
    ledger = engine.model.memory
    own = ledger.weights + ledger.kv + ledger.activations + ledger.graphs
    return replace(planned, num_bytes=own + planned.libraries, problem="") if own else planned
