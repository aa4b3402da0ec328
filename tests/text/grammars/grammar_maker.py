"""Grammars of many requests at once, made as a server makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from weft.options import ServerOptions
from weft.text.grammars.compiler import GrammarCompiler
from weft.text.grammars.specs import GrammarSpec, ThinkingSpec
from weft.text.tokenizer import Tokenizer


def grammars(
    tokenizer: Tokenizer,
    specs: Sequence[GrammarSpec],
    options: ServerOptions | None = None,
    thinking: ThinkingSpec | None = None,
) -> list[str]:
    async def compiled() -> list[str]:
        compiler = GrammarCompiler(tokenizer, options)
        try:
            return [await compiler.compile(spec, thinking) for spec in specs]
        finally:
            await compiler.close()

    return asyncio.run(compiled())
