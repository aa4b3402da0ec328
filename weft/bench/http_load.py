"""One request over HTTP, measured: what came, when, and what went wrong. Tokens are those that the server's own usage
counts, never its events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from weft.bench.datasets import Dialogue, DialogueTurn
from weft.bench.http import Address, Connection

REQUEST_TIMEOUT_S = 600.0


class MeasuredAnswer(Struct, kw_only=True):
    """The measurement of one request. Times are in seconds."""

    began_s: float = 0.0
    """Since the load began."""
    late_s: float = 0.0
    """It was sent so much later than planned, because too many were open."""
    first_s: float | None = None
    """To the first event with content."""
    gaps_s: list[float] = []
    """Between events; a server may put several tokens in one."""
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_messages: int = 0
    """Events of a stream, or messages of gRPC."""
    num_bytes: int = 0
    """Bytes of the answer, as they came."""
    text: str = ""
    """Kept only where the next turn, or a comparison, needs it."""
    error: str = ""
    """The class of what went wrong; empty: nothing."""
    reason: str = ""
    """The failure in full."""
    was_cancelled: bool = False
    """The client left, as it was meant to."""

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.was_cancelled


class _Delta(Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None

    @property
    def is_role_alone(self) -> bool:
        """True for the first event of a chat, which is sent before there is a token."""
        return bool(self.role) and not (self.content or self.reasoning_content or self.tool_calls)


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class _Left(Exception):
    """The client leaves in the middle of an answer, as planned."""


class StreamTimes:
    """The reader of a stream of server-sent events, which notes when each came."""

    def __init__(self, *, keeps_text: bool = False, leave_after: int = 0) -> None:
        """`leave_after`: hang up after so many events; 0: never."""
        self.began = time.perf_counter()
        self.first_s: float | None = None
        self.gaps_s: list[float] = []
        self.usage: _Usage | None = None
        self.texts: list[str] = []
        self.num_events = 0
        self.num_bytes = 0
        self.done = False
        self.error = ""
        self._keeps_text = keeps_text
        self._leave_after = leave_after
        self._last = 0.0
        self._beginning = b""
        """Data before the first event, for an answer that is no stream."""
        self._unread = b""

    def read(self, data: bytes) -> None:
        now = time.perf_counter()
        self.num_bytes += len(data)
        if self.first_s is None:
            self._beginning += data[:1000]
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def failure(self, status: int, wanted: int) -> tuple[str, str]:
        """Return the class of what is wrong with the answer, now that it has ended, and its reason; empty: nothing."""
        if status != 200:
            reason = f"status {status}: {self._beginning.decode(errors='replace').strip()[:200]}"
            return f"HTTP {status}", reason
        if self.error:
            return "stream", f"the stream ended with {self.error}"
        if not self.done:
            return "stream", "the stream ended without [DONE]"
        if self.usage is None:
            return "usage", "the server did not report its usage"
        if wanted and self.usage.completion_tokens != wanted:
            return "length", f"{wanted} tokens were asked for, {self.usage.completion_tokens} came"
        return "", ""

    def _event(self, payload: bytes, now: float) -> None:
        self.num_events += 1
        if payload == b"[DONE]":
            self.done = True
            return
        if payload.startswith(b'{"error"'):
            self.error = payload.decode(errors="replace")[:200]
            return
        if self._keeps_text or b'"usage":{' in payload or b'"usage": {' in payload:
            chunk = _chunk_decoder.decode(payload)
            if chunk.usage is not None:
                self.usage = chunk.usage
            if not chunk.choices:
                return
            for choice in chunk.choices:
                self.texts.append(choice.text or (choice.delta.content if choice.delta is not None else "") or "")
        if self.first_s is None:
            choices = _chunk_decoder.decode(payload).choices
            if choices and all(choice.delta is not None and choice.delta.is_role_alone for choice in choices):
                return
            self.first_s = now - self.began
        else:
            self.gaps_s.append(now - self._last)
        self._last = now
        if self._leave_after and len(self.gaps_s) + 1 >= self._leave_after:
            raise _Left


class HttpClient:
    """Sends the turns of dialogues to a server, each measured."""

    def __init__(self, address: Address, model: str, options: Mapping[str, Any], *, keeps_text: bool = False) -> None:
        """`options`: fields that every request has, as those for sampling. `keeps_text`: of every answer, not only of
        those that a next turn repeats."""
        self._keeps_text = keeps_text
        self._address = address
        self._model = model
        self._options = options
        self._idle: list[Connection] = []

    async def converse(self, conversation: Dialogue, leave_after: int = 0) -> list[MeasuredAnswer]:
        """Send the turns one after the other, up to the first that fails; return how each went."""
        answers: list[MeasuredAnswer] = []
        said: list[Mapping[str, Any]] = []
        for turn in conversation.turns:
            body = dict(turn.body)
            if len(conversation.turns) > 1:
                said = [*said, *body["messages"]]
                body["messages"] = said
            keeps_text = self._keeps_text or len(conversation.turns) > 1
            answer = await self._ask(turn, body, keeps_text=keeps_text, leave_after=leave_after)
            answers.append(answer)
            if not answer.is_whole:
                break
            said = [*said, {"role": "assistant", "content": answer.text}]
        return answers

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(
        self, turn: DialogueTurn, body: dict[str, Any], *, keeps_text: bool, leave_after: int
    ) -> MeasuredAnswer:
        if turn.path == "/v1/images/generations":
            return await self._ask_whole(turn.path, {"model": self._model, **body})
        wanted = turn.output_tokens
        if "response_format" in self._options:
            # The form says when an answer is complete.
            wanted = 0
            body.pop("ignore_eos", None)
        request = self._address.request("POST", turn.path, msgspec.json.encode(self._streamed(body)))
        times = StreamTimes(keeps_text=keeps_text, leave_after=leave_after)
        error, reason, was_cancelled = "", "", False
        try:
            error, reason = times.failure(await self._send(request, times.read), wanted)
        except _Left:
            was_cancelled = True
        except (OSError, TimeoutError, ValueError) as problem:
            error, reason = _class_of(problem), f"{type(problem).__name__}: {problem}"
        usage = times.usage or _Usage()
        return MeasuredAnswer(
            first_s=times.first_s,
            gaps_s=times.gaps_s,
            seconds=time.perf_counter() - times.began,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            num_messages=times.num_events,
            num_bytes=times.num_bytes,
            text="".join(times.texts),
            error=error,
            reason=reason,
            was_cancelled=was_cancelled,
        )

    async def _ask_whole(self, path: str, body: Mapping[str, Any]) -> MeasuredAnswer:
        """Ask for an answer in one piece, whose bytes are not kept."""
        beginning = bytearray()
        began = time.perf_counter()
        error = reason = ""
        try:
            request = self._address.request("POST", path, msgspec.json.encode(body))
            status = await self._send(request, lambda data: beginning.extend(data[: 200 - len(beginning)]))
            if status != 200:
                error, reason = f"HTTP {status}", f"status {status}: {beginning.decode(errors='replace')}"
        except (OSError, TimeoutError, ValueError) as problem:
            error, reason = _class_of(problem), f"{type(problem).__name__}: {problem}"
        return MeasuredAnswer(seconds=time.perf_counter() - began, error=error, reason=reason)

    def _streamed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "temperature": 0,
            **body,
            **self._options,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _send(self, request: bytes, on_body: Any) -> int:
        connection = self._idle.pop() if self._idle else await Connection.open(self._address)
        if not connection.is_open:
            connection = await Connection.open(self._address)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            status = await connection.ask(request, on_body)
        if connection.is_open:
            self._idle.append(connection)
        return status


def _class_of(problem: Exception) -> str:
    match problem:
        case TimeoutError():
            return "timeout"
        case OSError():
            return "connection"
        case _:
            return "not HTTP"


async def exchange(address: Address, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send one request on a connection of its own, and return the status and the body of its answer."""
    answer = bytearray()
    connection = await Connection.open(address)
    status = await connection.ask(address.request(method, path, body), answer.extend)
    connection.close()
    return status, bytes(answer)


async def first_models(address: Address) -> Sequence[str]:
    """Return the names of a server's models."""
    status, body = await exchange(address, "GET", "/v1/models")
    if status != 200:
        raise ConnectionError(f"GET /v1/models was answered {status}: {body.decode(errors='replace')[:200]}")
    return [card["id"] for card in msgspec.json.decode(body)["data"]]
