"""Compiles the grammars of outputs: each is written, tried in a child process, and cached."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from weft.errors import EngineFault, InvalidRequest, Overloaded
from weft.options import ServerOptions
from weft.text.grammars.lark import GrammarWriter
from weft.text.grammars.specs import GrammarSpec, GrammarVocabulary, ThinkingSpec, vocabulary_of
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


class GrammarCompiler:
    """The compiler makes `SamplingParams.grammar`. It starts nothing before the first grammar."""

    def __init__(self, tokenizer: Tokenizer, options: ServerOptions | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = options or ServerOptions()
        self._writer: GrammarWriter | None = None
        self._process: GrammarProcess | None = None
        self._turn = asyncio.Lock()
        self._problems: OrderedDict[str, str] = OrderedDict()
        """Why each of the last grammars cannot be built, by grammar; empty when it can."""

    async def compile(self, spec: GrammarSpec, thinking: ThinkingSpec | None = None) -> str:
        """Return the grammar of what a request asks for, and of the reasoning before it. Raises InvalidRequest that
        names the request's field and what is wrong with it."""
        if not self._tokenizer.eos_token_ids:
            raise InvalidRequest("This model has no end-of-sequence token: no grammar can end.", param=spec.param)
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
                self._process = GrammarProcess(await asyncio.to_thread(vocabulary_of, self._tokenizer), limit)
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
    """Shorten a parser's message: without the grammar's own lines and the parser's state."""
    lines = problem.split("\n")
    found = next((line for line in lines if line.startswith("error: ")), lines[0])
    return found.removeprefix("error: ").split("failed to compile JSON schema: ")[-1].rstrip(".")
