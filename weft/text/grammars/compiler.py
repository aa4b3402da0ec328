"""Compiles the grammars of outputs: each is written, tried in a child process, and cached."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import sys
import time
from collections import OrderedDict
from pathlib import Path

import msgspec
from msgspec import Struct

from weft.errors import EngineFault, InvalidRequest, Overloaded, in_full
from weft.options import ServerOptions
from weft.text.grammars.lark import GrammarWriter
from weft.text.grammars.specs import (
    GrammarSpec,
    GrammarVocabulary,
    ThinkingSpec,
    check_size,
    too_large,
    vocabulary_of,
)
from weft.text.template_sandbox import sandbox_environment
from weft.text.tokenizer import Tokenizer

_CHILD = Path(__file__).with_name("sandbox_child.py")
_LENGTH = struct.Struct("<I")
_START_SECONDS = 60.0
_MEMORY_BYTES = 4 * 2**30


class GrammarProcess:
    """The child process that tries grammars, used by one event loop."""

    def __init__(self, vocabulary: GrammarVocabulary, seconds: float) -> None:
        """`seconds` is the time limit of one grammar."""
        alarm = math.ceil(seconds) + 1
        self._settings = {"vocabulary": vocabulary, "memory_bytes": _MEMORY_BYTES, "alarm_seconds": alarm}
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, grammar: str) -> str:
        """Return why a grammar cannot be built, or nothing. Raises TimeoutError, and EOFError when the process
        ended."""
        if self._process is None:
            await self._start()
        return await self._exchange(grammar, self._seconds)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Reads to the end of its output as well, so that no pipe stays open.
            await process.communicate()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(_CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal reaches the server, which ends this process; it must not reach both.
            start_new_session=True,
            env=sandbox_environment(),
        )
        try:
            await self._exchange(self._settings, _START_SECONDS)
        except (TimeoutError, EOFError) as error:
            raise EngineFault("The process that compiles grammars could not be started.") from error

    async def _exchange(self, message: object, seconds: float) -> str:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        body = msgspec.msgpack.encode(message)
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(_LENGTH.pack(len(body)) + body)
                await process.stdin.drain()
                head = await process.stdout.readexactly(_LENGTH.size)
                return msgspec.msgpack.decode(await process.stdout.readexactly(_LENGTH.unpack(head)[0]), type=str)
        except BaseException as error:
            # Also when the caller was cancelled: the next caller must not read this answer.
            await self.close()
            if isinstance(error, ConnectionError):
                raise EOFError from error
            raise


CACHED_GRAMMARS = 256
LATE_SECONDS = 300.0
"""A grammar that was not compiled in time is refused for so long, then tried again: the machine may have been busy."""


class Trial(Struct, frozen=True):
    """A trial tells whether a grammar can be enforced."""

    problem: str = ""
    """The reason for its refusal, as the end of a sentence; empty: it is taken."""
    hint: str = ""
    until: float = math.inf
    """When it is tried again."""


class GrammarCompiler:
    """The compiler makes `SamplingParams.grammar`. It starts nothing before the first grammar."""

    def __init__(self, tokenizer: Tokenizer, options: ServerOptions | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = options or ServerOptions()
        self._writer: GrammarWriter | None = None
        self._process: GrammarProcess | None = None
        self._turn = asyncio.Lock()
        self._trials: OrderedDict[str, Trial] = OrderedDict()
        """How each of the last grammars was tried."""

    async def compile(self, spec: GrammarSpec, thinking: ThinkingSpec | None = None) -> str:
        """Return the grammar of what a request asks for, and of the reasoning before it. Raises InvalidRequest that
        names the request's field and what is wrong with it."""
        if not self._tokenizer.eos_token_ids:
            raise InvalidRequest("This model has no end-of-sequence token: no grammar can end.", param=spec.param)
        # In a thread: a schema may be as large as a request's body.
        grammar = await asyncio.to_thread(self._written, spec, thinking)
        trial = self._tried(grammar) or await self._try(grammar)
        if trial.problem:
            raise InvalidRequest(f"{spec.param} {trial.problem}", hint=trial.hint, param=spec.param)
        return grammar

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    def _written(self, spec: GrammarSpec, thinking: ThinkingSpec | None) -> str:
        limit = self._options.max_schema_kb
        check_size(spec, limit)
        if self._writer is None:
            specials = {self._tokenizer.token_text(i): i for i in sorted(self._tokenizer.special_ids)}
            self._writer = GrammarWriter(
                specials,
                max_schema_depth=self._options.max_schema_depth,
                json_whitespace=self._options.json_whitespace,
            )
        grammar = self._writer.write(spec, thinking)
        if len(grammar) > limit * 1024:
            raise too_large(spec.param, limit, "makes a grammar of")
        return grammar

    def _tried(self, grammar: str) -> Trial | None:
        trial = self._trials.get(grammar)
        if trial is None or trial.until <= time.monotonic():
            return None
        self._trials.move_to_end(grammar)
        return trial

    async def _try(self, grammar: str) -> Trial:
        try:
            async with asyncio.timeout(self._options.grammar_timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("The grammars of other requests are still being compiled.", hint="Try again.") from None
        try:
            # Another request may have had the same one tried meanwhile.
            trial = self._tried(grammar) or await self._ask(grammar)
        finally:
            self._turn.release()
        self._trials[grammar] = trial
        if len(self._trials) > CACHED_GRAMMARS:
            self._trials.popitem(last=False)
        return trial

    async def _ask(self, grammar: str) -> Trial:
        limit = self._options.grammar_timeout_s
        if self._process is None:
            self._process = GrammarProcess(await asyncio.to_thread(vocabulary_of, self._tokenizer), limit)
        try:
            problem = await self._process.ask(grammar)
        except TimeoutError:
            return Trial(
                f"takes more than {in_full(limit)} s to compile.",
                "Make it simpler, or raise --grammar-timeout-s.",
                time.monotonic() + LATE_SECONDS,
            )
        except EOFError:
            return Trial("takes too much memory to compile.", "Make it simpler.", time.monotonic() + LATE_SECONDS)
        return Trial(f"cannot be enforced: {_in_short(problem)}.") if problem else Trial()


def _in_short(problem: str) -> str:
    """Shorten a parser's message: without the grammar's own lines and the parser's state."""
    lines = problem.split("\n")
    found = next((line for line in lines if line.startswith("error: ")), lines[0])
    return found.removeprefix("error: ").split("failed to compile JSON schema: ")[-1].rstrip(".")[:300]
