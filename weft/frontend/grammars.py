"""What an output must be, as the engine in use is told it."""

from __future__ import annotations

from weft.backends.contract import Engine
from weft.config import ServerOptions
from weft.text.grammars.compiler import GrammarCompiler
from weft.text.grammars.passed import written_down
from weft.text.grammars.specs import GrammarSpec, Thinking, ToolCalls


class Grammars:
    """An engine that computes with tokens is told a grammar; for one that is given text, the request's own words are
    written down. Which of the two it is may change while the server runs."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._compiler: GrammarCompiler | None = None

    async def grammar_of(self, spec: GrammarSpec, thinking: Thinking | None) -> str:
        """Raises InvalidRequest for what no engine could write."""
        if not self._engine.abilities.tokens:
            assert not isinstance(spec, ToolCalls), "calls are passed on with the conversation"
            return written_down(spec, self._options.max_schema_kb)
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._engine.tokenizer, self._options)
        return await self._compiler.compile(spec, thinking)

    async def close(self) -> None:
        if self._compiler is not None:
            await self._compiler.close()
