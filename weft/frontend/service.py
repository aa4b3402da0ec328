"""One model that is served, as the doors know it."""

from __future__ import annotations

import time

from msgspec import Struct

from weft.backends.contract import Engine
from weft.config import Config, LimitOptions, ServerOptions
from weft.errors import InvalidRequest, ModelNotFound
from weft.frontend.grammars import Grammars
from weft.observe.metrics import Metrics
from weft.observe.traces import Traces
from weft.text.grammars.specs import GrammarSpec, Thinking


class Service(Struct, frozen=True, kw_only=True):
    """An engine, and all that the doors need beside it."""

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
        if name == self.model_name:
            return
        drawn_by = self.engine.model.images
        if drawn_by is not None and name == drawn_by.name:
            raise InvalidRequest(
                f"The model {name!r} draws images and writes no text.",
                hint=f"Send it to /v1/images/generations, or name {self.model_name!r}.",
                param="model",
            )
        raise ModelNotFound(
            f"There is no model {name!r:.200} here; this server has {self.model_name!r}.", param="model"
        )

    async def close(self) -> None:
        """End the engine, and what was started for it."""
        await self.grammars.close()
        await self.engine.close()


def open_service(config: Config, engine: Engine, traces: Traces | None) -> Service:
    name = config.model.served_model_name or engine.model.name
    return Service(
        engine=engine,
        model_name=name,
        created=int(time.time()),
        metrics=Metrics(name, engine),
        grammars=Grammars(engine, config.server),
        options=config.server,
        limits=config.limits,
        traces=traces,
    )
