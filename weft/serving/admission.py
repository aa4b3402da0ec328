"""Admission decides which requests come in: none while the engine starts, those with a key and a share left while it
serves, no new ones while it drains. All endpoints share it, so what holds at one holds at all. A request that is in has
a context, and its work stops when its client hangs up, when its time is over, or when the server is to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from heapq import nlargest
from typing import Any

from msgspec import Struct
from starlette.types import Message, Receive

from weft import logs
from weft.backends.contract import ConfiguredModels, Engine, Health
from weft.errors import Overloaded, RequestTimeout, Unavailable, in_full
from weft.observe.metrics import Metrics
from weft.observe.traces import open_traces
from weft.observe.watchdog import LoopWatchdog
from weft.options import Config
from weft.serving.auth import Keys
from weft.serving.live import MAX_ENDED_KEPT, MAX_OPEN_SHOWN, LiveView
from weft.serving.model_pool import ModelPool, StartEngine
from weft.serving.model_slot import ModelSlot
from weft.serving.rate_limits import Account, Accounts, RateLimitState
from weft.serving.request import FieldReport
from weft.serving.served_model import ServedModel, open_served_model
from weft.serving.timing import EndedRequests, RequestTimer, Timeline, timeline_of

SHUTTING_DOWN = "The server is shutting down."
DRAINING = "The server takes no new requests for now."


class ClientGone(Exception):
    """The client has hung up, so that no answer can be sent."""


async def no_hang_up() -> Message:
    """Wait for ever, for endpoints that are told otherwise when a client has gone."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


class RequestContext(Struct, eq=False, kw_only=True):
    """The context of one admitted request. It has a model only when that was chosen."""

    config: Config
    pool: ModelPool
    keys: Keys
    account: Account
    aborted: asyncio.Future[str]
    """Done, with the reason, when the server will not wait for the request any longer."""
    receive: Receive
    """Tells when the client hangs up."""
    request_id: str
    tenant: str
    """The name of its key; empty where no key is wanted."""
    session: str = ""
    """The session that a header names: it goes before one in the body."""
    began: float
    fields: FieldReport
    """What became of the fields of its body that are not honoured."""
    body_bytes: int = 0
    """Bytes of its body that are counted, until it was parsed."""
    answer_id: str = ""
    """Empty until the request was understood."""
    timers: Mapping[int, RequestTimer] = {}
    """Timers of what was submitted to the engine."""
    is_batch: bool = False
    """It is a line of a batch: it has the lowest priority, and no limit of time but its batch's."""
    slot: ModelSlot | None = None
    chosen: ServedModel | None = None

    @property
    def served(self) -> ServedModel:
        """The model that was chosen."""
        assert self.chosen is not None
        return self.chosen

    async def choose(self, name: str | None) -> ServedModel:
        """Return the model of this name, loaded, to generate with; None: the default one. Raises ModelNotFound,
        Unavailable, ClientGone, and Overloaded where its queue is full."""
        return self._with_capacity(await self.choose_text(name))

    async def choose_image_model(self, name: str | None) -> ServedModel:
        """Do the same for a request for images."""
        return self._with_capacity(await self._enter(self.pool.find_image_model(name)))

    async def choose_text(self, name: str | None) -> ServedModel:
        """Do the same for a request that needs the tokenizer alone, and no place in the queue."""
        return await self._enter(self.pool.find(name))

    def check_capacity(self) -> None:
        """Raise Overloaded where it is certain before the body is read that its model's queue is full: where there is
        one model."""
        served = None if self.pool.has_many else self.pool.default().served
        if served is not None:
            self._with_capacity(served)

    def _with_capacity(self, served: ServedModel) -> ServedModel:
        try:
            served.engine.check_capacity(self.tenant)
        except Overloaded:
            served.metrics.rejected()
            raise
        return served

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work to its end, or cancel it and raise ClientGone, Unavailable or RequestTimeout."""
        await self._guard(work, 0 if self.is_batch else self.config.server.request_timeout_s)

    async def _guard(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """0: no limit."""
        own = asyncio.current_task()
        task = asyncio.create_task(work, name=None if own is None else own.get_name())
        gone = asyncio.create_task(_hung_up(self.receive))
        ends: set[asyncio.Future[Any]] = {task, gone, self.aborted}
        try:
            await asyncio.wait(ends, timeout=timeout_s or None, return_when=asyncio.FIRST_COMPLETED)
            if task.done() or await _ended_after_all(task):
                return task.result()
            if gone.done():
                gone.result()
                raise ClientGone
            if self.aborted.done():
                raise Unavailable(self.aborted.result())
            raise RequestTimeout(f"The request took longer than {in_full(timeout_s)} s and was ended.")
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.wait({task, gone})

    async def _enter(self, slot: ModelSlot) -> ServedModel:
        slot.claim(self.tenant)
        self.slot = slot
        if slot.would_load:
            self.account.spend_load()
        while not slot.is_open:
            await self._guard(slot.opened(), 0)
        self.chosen = slot.enter()
        return self.chosen

    def hold_body(self, num_bytes: int) -> None:
        """Count a piece of its body; raises what its key, or the server, has no memory for."""
        self.account.hold_body(num_bytes)
        self.body_bytes += num_bytes

    def release_body(self) -> None:
        """Take note that the body was parsed, and is no longer there."""
        self.account.release_body(self.body_bytes)
        self.body_bytes = 0

    def leave(self) -> None:
        self.release_body()
        self.account.leave()
        if self.slot is not None:
            if self.chosen is not None:
                self.slot.leave()
            self.slot.end_claim()

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far."""
        return sum(timer.num_tokens for timer in self.timers.values())

    def timeline(self) -> Timeline | None:
        """Return how it has gone so far; None: nothing of it was submitted to the engine."""
        if not self.timers:
            return None
        return timeline_of(
            [*self.timers.values()],
            request_id=self.request_id,
            answer_id=self.answer_id,
            tenant=self.tenant,
            model=self.served.model_name,
            age_s=time.monotonic() - self.began,
        )

    def abort(self, why: str) -> None:
        if not self.aborted.done():
            self.aborted.set_result(why)


async def _ended_after_all(task: asyncio.Task[None]) -> bool:
    """Cancel the task and wait for it; true when it ended by itself before that reached it."""
    task.cancel()
    await asyncio.wait({task})
    return not task.cancelled()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Admission:
    def __init__(self, config: Config, models: ConfiguredModels | None = None) -> None:
        """Serve the configured models, or without them the one that `open` brings."""
        options = config.server
        self.config = config
        self.keys = Keys(options.api_key, options.api_key_file)
        self.admin_keys = Keys(options.admin_key, options.admin_key_file)
        self.traces = open_traces(options.otlp_endpoint) if options.otlp_endpoint else None
        self.pool = ModelPool(config, lambda own, engine: open_served_model(own, engine, self.traces), models)
        self._accounts = Accounts(config.limits, max_body_mb=options.max_body_mb)
        self._batch_accounts = Accounts(config.limits, max_body_mb=options.max_body_mb)
        """Batches have limits of their own, as large: they take nothing from a tenant's other requests."""
        self._ended = EndedRequests(MAX_ENDED_KEPT)
        self.live = LiveView(self.pool, self._open_timelines, self._ended)
        self.watchdog = LoopWatchdog()
        """It watches while a server runs."""
        self._closed_because = ""
        """Empty: open."""
        self._contexts: set[RequestContext] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, engine: Engine, restart: StartEngine | None = None) -> ServedModel:
        """Let requests in, now that the engine is there. `restart` starts another where it is lost."""
        return self.pool.adopt(engine, restart)

    async def close(self) -> None:
        """End all engines, and the streams of those who watch them."""
        await self.live.close()
        await self.pool.close()

    def drain(self, why: str = SHUTTING_DOWN) -> None:
        """Let no more requests in; those inside go on."""
        if self._closed_because != SHUTTING_DOWN:
            self._closed_because = why

    def resume(self) -> bool:
        """Let requests in again; false when the server is to end."""
        if self._closed_because == SHUTTING_DOWN:
            return False
        self._closed_because = ""
        return True

    def abort(self) -> None:
        """End the requests that are still inside."""
        for context in self._contexts:
            context.abort(SHUTTING_DOWN)

    def contexts(self) -> list[RequestContext]:
        """Return the requests inside, the oldest first."""
        return sorted(self._contexts, key=lambda context: context.began)

    def _open_timelines(self) -> list[Timeline]:
        """Return the timelines of the newest requests inside."""
        newest = nlargest(MAX_OPEN_SHOWN, self._contexts, key=lambda context: context.began)
        return [timeline for context in newest if (timeline := context.timeline()) is not None]

    async def empty(self) -> None:
        """Return when no request is inside."""
        await self._empty.wait()

    def health(self) -> Health:
        return Health(False, "draining") if self._closed_because else self.pool.health()

    def metrics(self) -> list[Metrics]:
        """Return the metrics of every model that is loaded."""
        return [served.metrics for served in self.pool.served_models()]

    def check_open(self) -> None:
        """Raise Unavailable while no request may come in."""
        self.pool.default()
        if self._closed_because:
            raise Unavailable(self._closed_because)

    def rate_limits(self, tenant: str) -> list[RateLimitState]:
        return self._accounts.of(tenant).rate_limits()

    @contextmanager
    def admit(self, receive: Receive = no_hang_up, *, is_batch: bool = False) -> Iterator[RequestContext]:
        """Let one request in for as long as it takes. Raises Unavailable when none may come in, and RateLimited when
        its tenant has had its share for now. `receive` tells when the client hangs up."""
        self.check_open()
        tenant = logs.tenant.get()
        account = (self._batch_accounts if is_batch else self._accounts).of(tenant)
        try:
            account.enter()
        except Overloaded:
            self._count_rejected()
            raise
        context = RequestContext(
            config=self.config,
            pool=self.pool,
            keys=self.keys,
            account=account,
            aborted=asyncio.get_running_loop().create_future(),
            receive=receive,
            request_id=logs.request_id.get(),
            tenant=tenant,
            began=time.monotonic(),
            fields=FieldReport(self.config.server.fields),
            is_batch=is_batch,
        )
        self._contexts.add(context)
        self._empty.clear()
        try:
            yield context
        finally:
            if (timeline := context.timeline()) is not None:
                self._ended.add(timeline)
            context.leave()
            self._contexts.discard(context)
            if not self._contexts:
                self._empty.set()

    def _count_rejected(self) -> None:
        """Count it for the default model: which one was wanted is not known yet."""
        served = self.pool.default().served
        if served is not None:
            served.metrics.rejected()
