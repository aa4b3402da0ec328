"""Grammars for outputs: written, tried in a process of their own, and remembered."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from weft.config import ServerOptions
from weft.errors import InvalidRequest, Overloaded
from weft.text.grammars.process import GrammarProcess
from weft.text.grammars.specs import GrammarSpec, Thinking
from weft.text.grammars.words import words_of
from weft.text.grammars.writing import GrammarWriter
from weft.text.tokenizer import Tokenizer

CACHED_GRAMMARS = 256


class GrammarCompiler:
    """Makes `SamplingParams.grammar`. It costs nothing before the first grammar."""

    def __init__(self, tokenizer: Tokenizer, options: ServerOptions | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = options or ServerOptions()
        self._writer: GrammarWriter | None = None
        self._process: GrammarProcess | None = None
        self._turn = asyncio.Lock()
        self._problems: OrderedDict[str, str] = OrderedDict()
        """Of the last grammars that were tried: why each cannot be built, or nothing."""

    async def compile(self, spec: GrammarSpec, thinking: Thinking | None = None) -> str:
        """The grammar of what a request asks for, and of the thoughts before it; InvalidRequest names its field and
        what is wrong with it."""
        if not self._tokenizer.eos_token_ids:
            raise InvalidRequest("This model names no token that ends an answer, so no form can end.", param=spec.param)
        if self._writer is None:
            specials = {self._tokenizer.token_text(i): i for i in sorted(self._tokenizer.special_ids)}
            self._writer = GrammarWriter(specials, max_schema_depth=self._options.max_schema_depth)
        # In a thread: a schema may be as large as a request's body.
        grammar = await asyncio.to_thread(self._writer.write, spec, thinking)
        self._check_size(grammar, spec.param)
        if grammar not in self._problems:
            problem = await self._try(grammar, spec.param)
            self._problems[grammar] = problem
            if len(self._problems) > CACHED_GRAMMARS:
                self._problems.popitem(last=False)
        self._problems.move_to_end(grammar)
        if problem := self._problems[grammar]:
            raise InvalidRequest(f"{spec.param} cannot be enforced: {_in_short(problem)}.", param=spec.param)
        return grammar

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    async def _try(self, grammar: str, param: str) -> str:
        limit = self._options.grammar_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("The grammars of other requests are still being compiled.", hint="Try again.") from None
        try:
            if self._process is None:
                self._process = GrammarProcess(await asyncio.to_thread(words_of, self._tokenizer), limit)
            return await self._process.ask(grammar)
        except TimeoutError:
            raise InvalidRequest(
                f"{param} takes more than {limit:g} s to compile.",
                hint="Make it simpler, or raise --grammar-timeout-s.",
                param=param,
            ) from None
        except EOFError:
            raise InvalidRequest(
                f"{param} takes too much memory to compile.", hint="Make it simpler.", param=param
            ) from None
        finally:
            self._turn.release()

    def _check_size(self, grammar: str, param: str) -> None:
        limit = self._options.max_schema_kb
        if len(grammar) > limit * 1024:
            raise InvalidRequest(
                f"{param} makes a grammar of {len(grammar)} characters; at most {limit} KiB of them are taken.",
                hint="The server's limit is --max-schema-kb.",
                param=param,
            )


def _in_short(problem: str) -> str:
    """Without the grammar's own lines and the parser's state."""
    lines = problem.split("\n")
    found = next((line for line in lines if line.startswith("error: ")), lines[0])
    return found.removeprefix("error: ").split("failed to compile JSON schema: ")[-1].rstrip(".")
