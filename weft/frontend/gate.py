"""Who may come in: nobody while the engine starts, whoever has a key and a share left while it serves, nobody new
while it drains. The doors share it, so what holds at one holds at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from weft import logs
from weft.backends.contract import Engine, Health, unknown_adapter
from weft.config import Config, LimitOptions, ServerOptions
from weft.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from weft.frontend.grammars import Grammars
from weft.frontend.keys import Keys
from weft.frontend.limits import Account, Accounts
from weft.frontend.stopwatch import Stopwatch
from weft.observe.metrics import Metrics
from weft.observe.traces import Traces, open_traces
from weft.text.grammars.specs import GrammarSpec, Thinking

SHUTTING_DOWN = "The server is shutting down."
DRAINING = "The server takes no new requests for now."


class Service(Struct, frozen=True, kw_only=True):
    """The model that is served, as the routes know it."""

    engine: Engine
    model_name: str
    """The operator's name for it, or its own."""
    created: int
    metrics: Metrics
    grammars: Grammars
    options: ServerOptions
    limits: LimitOptions
    traces: Traces | None = None

    async def grammar_of(self, spec: GrammarSpec | None, thinking: Thinking | None = None) -> str:
        """What the engine needs to keep an output in form; empty: it has none."""
        return await self.grammars.grammar_of(spec, thinking) if spec is not None else ""

    def check_model(self, name: str) -> None:
        """Raise unless it is the model that writes, or one of its adapters."""
        if name == self.model_name or name in self.adapter_names:
            return
        drawn_by = self.engine.model.images
        if drawn_by is not None and name == drawn_by.name:
            raise InvalidRequest(
                f"The model {name!r} draws images and writes no text.",
                hint=f"Send it to /v1/images/generations, or name {self.model_name!r}.",
                param="model",
            )
        here = ", ".join(map(repr, (self.model_name, *self.adapter_names)))
        raise ModelNotFound(f"There is no model {name!r:.200} here; this server has {here}.", param="model")

    @property
    def adapter_names(self) -> list[str]:
        return [adapter.name for adapter in self.engine.adapters]

    def adapter_for(self, model_name: str, adapter: str | None = None) -> str | None:
        """What a request's terms say, by the model that it names and by its own field. Raises InvalidRequest."""
        if model_name in self.adapter_names:
            if adapter not in (None, model_name):
                raise InvalidRequest(
                    f"The model {model_name!r} is an adapter itself, and adapter is {adapter!r:.200}.", param="adapter"
                )
            return model_name
        if adapter and adapter not in self.adapter_names:
            raise unknown_adapter(adapter, self.engine.adapters)
        return adapter


class Seat(Struct, eq=False, kw_only=True):
    """One request's place in the house."""

    service: Service
    account: Account
    aborted: asyncio.Future[str]
    """Done, with the reason, when the server will not wait for the request any longer."""
    request_id: str
    tenant: str
    """The name of its key; empty where no key is wanted."""
    began: float
    answer_id: str = ""
    """Empty until the request was understood."""
    choices: list[Stopwatch] = []

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def abort(self, why: str) -> None:
        if not self.aborted.done():
            self.aborted.set_result(why)


class Gate:
    def __init__(self, config: Config) -> None:
        options = config.server
        self.config = config
        self.keys = Keys(options.api_key, options.api_key_file)
        self.admin_keys = Keys(options.admin_key, options.admin_key_file)
        self.traces = open_traces(options.otlp_endpoint) if options.otlp_endpoint else None
        self._accounts = Accounts(config.limits)
        self._service: Service | None = None
        self._closed_because = ""
        """Empty: open."""
        self._seats: set[Seat] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self, engine: Engine) -> Service:
        """The engine is there: let requests in."""
        name = self.config.model.served_model_name or engine.model.name
        self._service = Service(
            engine=engine,
            model_name=name,
            created=int(time.time()),
            metrics=Metrics(name, engine),
            grammars=Grammars(engine, self.config.server),
            options=self.config.server,
            limits=self.config.limits,
            traces=self.traces,
        )
        return self._service

    async def close(self) -> None:
        if self._service is not None:
            await self._service.grammars.close()

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

    def seats(self) -> list[Seat]:
        """The requests inside, the oldest first."""
        return sorted(self._seats, key=lambda seat: seat.began)

    async def empty(self) -> None:
        """Returns when no request is inside."""
        await self._empty.wait()

    def health(self) -> Health:
        if self._closed_because:
            return Health(False, "draining")
        if self._service is None:
            return Health(False, "starting")
        return self._service.engine.health()

    def metrics(self) -> Metrics | None:
        """None until the engine is there to be measured."""
        return None if self._service is None else self._service.metrics

    def service(self) -> Service:
        service = self.any_service()
        if self._closed_because:
            raise Unavailable(self._closed_because)
        return service

    def any_service(self) -> Service:
        """Even while it drains."""
        if self._service is None:
            raise Unavailable("The model is being loaded.", hint="GET /health tells when it is ready.")
        return self._service

    @contextmanager
    def admit(self) -> Iterator[Seat]:
        """A seat for as long as one request takes; Unavailable when there is none, RateLimited when its owner has had
        enough for now."""
        service = self.service()
        tenant = logs.tenant.get()
        account = self._accounts.of(tenant)
        try:
            account.enter()
        except Overloaded:
            service.metrics.rejected()
            raise
        seat = Seat(
            service=service,
            account=account,
            aborted=asyncio.get_running_loop().create_future(),
            request_id=logs.request_id.get(),
            tenant=tenant,
            began=time.monotonic(),
        )
        self._seats.add(seat)
        self._empty.clear()
        try:
            yield seat
        finally:
            account.leave()
            self._seats.discard(seat)
            if not self._seats:
                self._empty.set()
