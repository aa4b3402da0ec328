"""Who may come in: nobody while the engine starts, everybody while it serves, nobody new while it drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from weft.backends.contract import Engine, Health
from weft.config import Config, ServerOptions
from weft.errors import ModelNotFound, Unavailable
from weft.observe.metrics import Metrics


class Service(Struct, frozen=True, kw_only=True):
    """The model that is served, as the routes know it."""

    engine: Engine
    model_name: str
    """The operator's name for it, or its own."""
    created: int
    metrics: Metrics
    options: ServerOptions

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ModelNotFound(
                f"There is no model {name!r:.200} here; this server has {self.model_name!r}.", param="model"
            )


class Seat(Struct, frozen=True, eq=False):
    """One request's place in the house."""

    service: Service
    aborted: asyncio.Future[None]
    """Done when the server will not wait for the request any longer."""


class Gate:
    def __init__(self, config: Config) -> None:
        self.config = config
        self._service: Service | None = None
        self._draining = False
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
            options=self.config.server,
        )
        return self._service

    def drain(self) -> None:
        """Let nobody in any more; those inside go on."""
        self._draining = True

    def abort(self) -> None:
        """End the requests that are still inside."""
        for seat in self._seats:
            if not seat.aborted.done():
                seat.aborted.set_result(None)

    async def empty(self) -> None:
        """Returns when no request is inside."""
        await self._empty.wait()

    def health(self) -> Health:
        if self._draining:
            return Health(False, "draining")
        if self._service is None:
            return Health(False, "starting")
        return self._service.engine.health()

    def metrics(self) -> Metrics | None:
        """None until the engine is there to be measured."""
        return None if self._service is None else self._service.metrics

    def service(self) -> Service:
        if self._service is None:
            raise Unavailable("The model is being loaded.", hint="GET /health tells when it is ready.")
        if self._draining:
            raise Unavailable("The server is shutting down.")
        return self._service

    @contextmanager
    def admit(self) -> Iterator[Seat]:
        """A seat for as long as one request takes; Unavailable when there is none."""
        seat = Seat(self.service(), asyncio.get_running_loop().create_future())
        self._seats.add(seat)
        self._empty.clear()
        try:
            yield seat
        finally:
            self._seats.discard(seat)
            if not self._seats:
                self._empty.set()
