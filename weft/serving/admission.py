"""Who may come in: nobody while the engine starts, whoever has a key and a share left while it serves, nobody new
while it drains. The doors share it, so what holds at one holds at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct
from starlette.types import Receive

from weft import logs
from weft.backends.contract import ConfiguredModels, Engine, Health
from weft.errors import Overloaded, Unavailable
from weft.observe.metrics import Metrics
from weft.observe.traces import open_traces
from weft.options import Config
from weft.serving.auth import Keys
from weft.serving.guard import guarded, no_hang_up
from weft.serving.model_pool import ModelPool
from weft.serving.model_slot import ModelSlot
from weft.serving.rate_limits import Account, Accounts
from weft.serving.served_model import ServedModel, open_served_model
from weft.serving.timing import RequestTimer

SHUTTING_DOWN = "The server is shutting down."
DRAINING = "The server takes no new requests for now."


class RequestContext(Struct, eq=False, kw_only=True):
    """One request's place in the house. It has a model only when that was chosen."""

    config: Config
    fleet: ModelPool
    account: Account
    aborted: asyncio.Future[str]
    """Done, with the reason, when the server will not wait for the request any longer."""
    receive: Receive
    """Tells when the client hangs up."""
    request_id: str
    tenant: str
    """The name of its key; empty where no key is wanted."""
    began: float
    answer_id: str = ""
    """Empty until the request was understood."""
    choices: list[RequestTimer] = []
    slot: ModelSlot | None = None
    chosen: ServedModel | None = None

    @property
    def service(self) -> ServedModel:
        """Of the model that was chosen."""
        assert self.chosen is not None
        return self.chosen

    async def choose(self, name: str | None) -> ServedModel:
        """The model of this name, loaded; None: the default one. Raises ModelNotFound, Unavailable and ClientGone."""
        return await self._enter(self.fleet.find(name))

    async def choose_painter(self, name: str | None) -> ServedModel:
        """The same for a request that wants something drawn."""
        return await self._enter(self.fleet.find_painter(name))

    async def _enter(self, slot: ModelSlot) -> ServedModel:
        slot.claim()
        self.slot = slot
        while not slot.is_open:
            await guarded(slot.opened(), self.receive, aborted=self.aborted, timeout_s=0)
        self.chosen = slot.enter()
        return self.chosen

    def leave(self) -> None:
        self.account.leave()
        if self.slot is not None:
            if self.chosen is not None:
                self.slot.leave()
            self.slot.end_claim()

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def abort(self, why: str) -> None:
        if not self.aborted.done():
            self.aborted.set_result(why)


class Admission:
    def __init__(self, config: Config, roster: ConfiguredModels | None = None) -> None:
        """With a roster its models are served, else the one that `open` brings."""
        options = config.server
        self.config = config
        self.keys = Keys(options.api_key, options.api_key_file)
        self.admin_keys = Keys(options.admin_key, options.admin_key_file)
        self.traces = open_traces(options.otlp_endpoint) if options.otlp_endpoint else None
        self.fleet = ModelPool(config, lambda own, engine: open_served_model(own, engine, self.traces), roster)
        self._accounts = Accounts(config.limits)
        self._closed_because = ""
        """Empty: open."""
        self._seats: set[RequestContext] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, engine: Engine) -> ServedModel:
        """The engine is there: let requests in."""
        return self.fleet.adopt(engine)

    async def close(self) -> None:
        """End all engines."""
        await self.fleet.close()

    def drain(self, why: str = SHUTTING_DOWN) -> None:
        """Let nobody in any more; those inside go on."""
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
        for seat in self._seats:
            seat.abort(SHUTTING_DOWN)

    def seats(self) -> list[RequestContext]:
        """The requests inside, the oldest first."""
        return sorted(self._seats, key=lambda seat: seat.began)

    async def empty(self) -> None:
        """Returns when no request is inside."""
        await self._empty.wait()

    def health(self) -> Health:
        return Health(False, "draining") if self._closed_because else self.fleet.health()

    def metrics(self) -> list[Metrics]:
        """Of every model that is loaded."""
        return [service.metrics for service in self.fleet.services()]

    def check_open(self) -> None:
        """Raises Unavailable while nobody may come in."""
        self.fleet.default()
        if self._closed_because:
            raise Unavailable(self._closed_because)

    @contextmanager
    def admit(self, receive: Receive = no_hang_up) -> Iterator[RequestContext]:
        """A seat for as long as one request takes; Unavailable when there is none, RateLimited when its owner has had
        enough for now. `receive` tells when the client hangs up."""
        self.check_open()
        tenant = logs.tenant.get()
        account = self._accounts.of(tenant)
        try:
            account.enter()
        except Overloaded:
            self._count_rejected()
            raise
        seat = RequestContext(
            config=self.config,
            fleet=self.fleet,
            account=account,
            aborted=asyncio.get_running_loop().create_future(),
            receive=receive,
            request_id=logs.request_id.get(),
            tenant=tenant,
            began=time.monotonic(),
        )
        self._seats.add(seat)
        self._empty.clear()
        try:
            yield seat
        finally:
            seat.leave()
            self._seats.discard(seat)
            if not self._seats:
                self._empty.set()

    def _count_rejected(self) -> None:
        """Which model was wanted is not known yet: it counts for the default one."""
        service = self.fleet.default().service
        if service is not None:
            service.metrics.rejected()
