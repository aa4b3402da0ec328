"""One model that is served, as the endpoints know it."""

from __future__ import annotations

import time

from msgspec import Struct

from weft.backends.contract import Engine, unknown_adapter
from weft.errors import InvalidRequest, ModelNotFound
from weft.observe.metrics import Metrics
from weft.observe.traces import Traces
from weft.options import Config, LimitOptions, ServerOptions
from weft.text.grammars.compiler import GrammarCompiler
from weft.text.grammars.specs import GrammarSpec, ThinkingSpec, ToolCallsSpec, encode_spec


class ModelGrammars:
    """Gives an engine what keeps outputs in form: a compiled grammar where it computes with tokens, the request's own
    fields where it is given text. Which of the two it is may change while the server runs."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._compiler: GrammarCompiler | None = None

    async def grammar_of(self, spec: GrammarSpec, thinking: ThinkingSpec | None) -> str:
        """Write the grammar of a spec. Raises InvalidRequest for what no engine could generate."""
        if not self._engine.abilities.tokens:
            assert not isinstance(spec, ToolCallsSpec), "calls are passed on with the conversation"
            return encode_spec(spec, self._options.max_schema_kb)
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._engine.text.tokenizer, self._options)
        return await self._compiler.compile(spec, thinking)

    async def close(self) -> None:
        if self._compiler is not None:
            await self._compiler.close()


class ServedModel(Struct, frozen=True, kw_only=True):
    """An engine, and all that the endpoints need beside it."""

    engine: Engine
    model_name: str
    """The operator's name for it, or its own."""
    created: int
    metrics: Metrics
    grammars: ModelGrammars
    options: ServerOptions
    limits: LimitOptions
    traces: Traces | None = None

    async def grammar_of(self, spec: GrammarSpec | None, thinking: ThinkingSpec | None = None) -> str:
        """Return what the engine needs to keep an output in form; empty: it has none."""
        return await self.grammars.grammar_of(spec, thinking) if spec is not None else ""

    def check_model(self, name: str) -> None:
        """Raise unless it is the language model, or one of its adapters."""
        if name == self.model_name or self._adapter_named(name) is not None:
            return
        image_model = self.engine.model.images
        if image_model is not None and name == image_model.name:
            raise InvalidRequest(
                f"The model {name!r} generates images, not text.",
                hint=f"Send it to /v1/images/generations, or name {self.model_name!r}.",
                param="model",
            )
        here = ", ".join(map(repr, (self.model_name, *self.adapter_names)))
        raise ModelNotFound(f"There is no model {name!r:.200} here; this server has {here}.", param="model")

    @property
    def adapter_names(self) -> list[str]:
        return [adapter.name for adapter in self.engine.adapters]

    def adapter_for(self, model_name: str, adapter: str | None = None) -> str | None:
        """Return the adapter of a request, by the model that it names and by its own field. Raises InvalidRequest."""
        named = self._adapter_named(model_name)
        if named is not None:
            if adapter not in (None, named):
                raise InvalidRequest(
                    f"The model {model_name!r} is an adapter itself, and adapter is {adapter!r:.200}.", param="adapter"
                )
            return named
        if adapter and adapter not in self.adapter_names:
            raise unknown_adapter(adapter, self.engine.adapters)
        return adapter

    def _adapter_named(self, name: str) -> str | None:
        """Find an adapter by its own name, or as in model:adapter where several models have one of that name."""
        own = name.removeprefix(f"{self.model_name}:")
        return own if own in self.adapter_names else None

    async def close(self) -> None:
        """End the engine, and what was started for it."""
        await self.grammars.close()
        await self.engine.close()


def open_served_model(config: Config, engine: Engine, traces: Traces | None) -> ServedModel:
    name = config.model.served_model_name or engine.model.name
    return ServedModel(
        engine=engine,
        model_name=name,
        created=int(time.time()),
        metrics=Metrics(name, engine),
        grammars=ModelGrammars(engine, config.server),
        options=config.server,
        limits=config.limits,
        traces=traces,
    )
