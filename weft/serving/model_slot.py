"""One model's slot in the pool: it is loaded when a request asks for it, once for all that do, and unloaded when its
memory is wanted for another."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import Need
from weft.errors import ModelNotFound, Unavailable, WeftError, in_full, public_reason
from weft.options import ModelEntry, ModelPoolOptions
from weft.serving.served_model import ServedModel

log = logging.getLogger(__name__)

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]

BACKOFF_S, MAX_BACKOFF_S = 5.0, 300.0
"""A load that failed is not tried again before so long, nor is a model loaded again whose engine has died for good;
twice as long after every other failure, until none has come for a while."""


class Failure(Struct, frozen=True):
    """A failure is how the last load ended, and when another may be tried."""

    error: Exception
    retry_at: float
    backoff_s: float

    @property
    def reason(self) -> str:
        """Return the reason, for the operator."""
        return str(self.error) if isinstance(self.error, WeftError) else f"{type(self.error).__name__}: {self.error}"


class ModelSlot:
    """A request claims the model, waits until it is open, enters, leaves and ends the claim (`RequestContext`)."""

    def __init__(
        self,
        entry: ModelEntry,
        options: ModelPoolOptions,
        load: Callable[[ModelSlot], Awaitable[ServedModel]],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed` is called whenever there may be more memory than before."""
        self.entry = entry
        self.served: ServedModel | None = None
        self.need = Need()
        """What it takes, planned or measured, while `holds_memory`."""
        self.holds_memory = False
        """True from the moment that memory was set aside for it."""
        self.waits_for_memory = False
        self.stage = ""
        """The stage of a load under way."""
        self.failure: Failure | None = None
        self._last_failure: Failure | None = None
        """The same, but kept after a load that went well: an engine may fail again soon."""
        self.is_gone = False
        """True when it is no longer in the pool."""
        self.last_used = 0.0
        self.wanted_by = ""
        """The tenant whose request began the last load."""
        self._claimed: dict[str, float] = {}
        """The time of each tenant's last claim."""
        self.image_model_name = ""
        """The name of the image model beside it, as far as is known."""
        self.num_claims = 0
        self.num_inside = 0
        self.num_loads = self.num_failures = self.num_unloads = 0
        self._options = options
        self._load_served = load
        self._changed = changed
        self._clock = clock
        self._loaded_entry: ModelEntry | None = None
        self._task: asyncio.Task[None] | None = None
        """A load or an unload under way."""
        self._leaving = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._began = 0.0
        self._load_s = 0.0
        """How long the last load took."""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def state(self) -> State:
        if self._leaving:
            return "unloading"
        if self.served is not None:
            return "loaded"
        if self._task is not None:
            return "loading"
        return "unloaded" if self.failure is None else "failed"

    @property
    def is_open(self) -> bool:
        """True when it can be entered now."""
        return self.served is not None and not self._leaving

    @property
    def would_load(self) -> bool:
        """True when the next request for it begins a load."""
        return not self.is_open and self._task is None and not self._is_backing_off

    def last_used_by_others(self, tenant: str) -> float:
        return max((when for name, when in self._claimed.items() if name != tenant), default=-math.inf)

    @property
    def is_idle(self) -> bool:
        """True when it is loaded and no request claims it."""
        return self.is_open and not self.num_claims

    @property
    def is_outdated(self) -> bool:
        """True when it is loaded as the entry was before it changed."""
        before = self._loaded_entry
        return (
            self.is_open
            and before is not None
            and replace(before, place="", preload=False) != replace(self.entry, place="", preload=False)
        )

    @property
    def has_given_up(self) -> bool:
        """True when it is loaded and its engine has died for good."""
        return self.served is not None and self.is_open and self.served.engine.health().reason == "failed"

    @property
    def trouble(self) -> str:
        """Return why requests cannot be answered; empty: they can, or the model is loaded for them."""
        if self.failure is not None and self.served is None:
            return f"failed: {public_reason(self.failure.error)}"
        if self.served is not None and not (health := self.served.engine.health()).ready:
            return health.reason or "not ready"
        return ""

    def answers_to(self, name: str) -> bool:
        """Return whether this is the name of an adapter (alone, or as in model:adapter), or of the image model."""
        return name == self.image_model_name or name.removeprefix(f"{self.name}:") in self.adapter_names

    @property
    def adapter_names(self) -> list[str]:
        """Return the adapters that it has, or that it will have when it is loaded."""
        return [*self.entry.adapters] if self.served is None else self.served.adapter_names

    # What a request does.

    def claim(self, tenant: str = "") -> None:
        """Count a request that wants the model. Raises Unavailable where too many wait already."""
        most = self._options.max_waiting_per_model
        if not self.is_open and self.num_claims - self.num_inside >= most:
            raise self._not_now(f"{most} requests wait for it already")
        self.num_claims += 1
        self._claimed[tenant] = self._clock()
        if self.would_load:
            self.wanted_by = tenant

    def end_claim(self) -> None:
        self.num_claims -= 1
        if self.num_claims:
            return
        if self._task is not None and self.waits_for_memory:
            # No request waits for it any more.
            self._task.cancel()
        self._changed()

    async def opened(self) -> None:
        """Return when it can be entered. Raises Unavailable when it cannot be loaded, or not in time, and
        ModelNotFound when it was taken away."""
        wait_s = self._options.model_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while not self.is_open:
                    if self.is_gone:
                        raise ModelNotFound(f"The model {self.name!r} is not here any more.", param="model")
                    self._check_failure()
                    task = self._begun()
                    if self._seconds_left > wait_s:
                        raise self._not_now("it is being loaded, which takes longer than a request may wait")
                    await asyncio.wait({task})
        except TimeoutError:
            raise self._not_now(
                f"it is not loaded after {in_full(wait_s)} s ({self.stage or 'waiting for room'})"
            ) from None

    def enter(self) -> ServedModel:
        """Let a request in, which is possible only while it is open."""
        assert self.served is not None
        self.num_inside += 1
        self._empty.clear()
        return self.served

    def leave(self) -> None:
        self.num_inside -= 1
        self.last_used = self._clock()
        if not self.num_inside:
            self._empty.set()

    # What the pool does.

    def adopt(self, served: ServedModel, entry: ModelEntry) -> None:
        """Take in what was loaded, by this entry."""
        self.served, self._loaded_entry, self.failure = served, entry, None
        self.last_used = self._clock()
        image_model = served.engine.model.images
        self.image_model_name = image_model.name if image_model is not None else ""

    def begin(self) -> None:
        """Load it, unless that is being done, it is there, it is gone, or it failed a short while ago."""
        if not self.is_gone and not self.is_open and self._task is None and not self._is_backing_off:
            self._begun()

    def forgive(self) -> None:
        """Forget that a load failed."""
        self.failure = self._last_failure = None

    def fail(self, error: Exception) -> None:
        now, last = self._clock(), self._last_failure
        is_again = last is not None and now < last.retry_at + MAX_BACKOFF_S
        backoff_s = min(2 * last.backoff_s, MAX_BACKOFF_S) if last is not None and is_again else BACKOFF_S
        self.failure = self._last_failure = Failure(error, now + backoff_s, backoff_s)
        self.num_failures += 1

    async def unload(self) -> None:
        """Let no request in, wait for those inside, and end the engine. Harmless when it is not loaded."""
        while self._task is not None:
            await asyncio.wait({self._task})
        if self.served is not None:
            self._leaving = True
            self._task = asyncio.create_task(self._unload(self.served))
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """End everything, without waiting for the requests inside."""
        self.is_gone = True
        self._empty.set()
        if self._task is not None:
            if not self._leaving:
                self._task.cancel()
            await asyncio.wait({self._task})
        if self.served is not None:
            await self._unload(self.served)

    def _begun(self) -> asyncio.Task[None]:
        if self._task is None:
            self._began = self._clock()
            self._task = asyncio.create_task(self._load())
        return self._task

    async def _load(self) -> None:
        entry = self.entry
        try:
            served = await self._load_served(self)
        except Exception as error:
            self.holds_memory = False
            self.fail(error)
            assert self.failure is not None
            known = isinstance(error, WeftError)
            log.error("the model %s could not be loaded: %s", self.name, self.failure.reason, exc_info=not known)
        except BaseException:
            self.holds_memory = False
            raise
        else:
            self.adopt(served, entry)
            self._load_s = self._clock() - self._began
            self.num_loads += 1
            log.info("the model %s is loaded (%.1f s)", self.name, self._load_s)
        finally:
            self.stage = ""
            self.waits_for_memory = False
            self._task = None
            self._changed()

    async def _unload(self, served: ServedModel) -> None:
        try:
            await self._empty.wait()
            await served.close()
        except Exception:
            log.exception("the model %s did not end well", self.name)
        self.served = None
        self.holds_memory = False
        self.num_unloads += 1
        self._leaving = False
        self._task = None
        self._changed()
        log.info("the model %s is unloaded", self.name)

    @property
    def _is_backing_off(self) -> bool:
        return self.failure is not None and self._clock() < self.failure.retry_at

    def _check_failure(self) -> None:
        if self.failure is not None and self._task is None and self._is_backing_off:
            raise Unavailable(
                f"The model {self.name!r} could not be loaded: {public_reason(self.failure.error)}",
                retry_after_s=math.ceil(self.failure.retry_at - self._clock()),
            )

    @property
    def _seconds_left(self) -> float:
        """Estimate the rest of a load by what the last one took."""
        return self._load_s - (self._clock() - self._began) if self.served is None else 0.0

    def _not_now(self, why: str) -> Unavailable:
        return Unavailable(
            f"The model {self.name!r} cannot answer now: {why}.", retry_after_s=max(1, math.ceil(self._seconds_left))
        )
