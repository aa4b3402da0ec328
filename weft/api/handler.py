"""One generation over HTTP, from the request's body to the answer's last byte."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Protocol

from fastapi import Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from weft.api import sse
from weft.api.body import read_body
from weft.api.error_responses import Unexpected
from weft.api.http_protocol import DirectWriter, direct_writer
from weft.api.openai.openai_answers import CollectedOutput
from weft.errors import WeftError
from weft.serving.admission import Admission, RequestContext
from weft.serving.generation import Generation
from weft.serving.guard import ClientGone, guarded
from weft.serving.request import Job
from weft.types import Output, Usage

log = logging.getLogger(__name__)

JSON_HEADERS = [(b"content-type", b"application/json")]


class Writer(Protocol):
    """How one kind of answer is written."""

    answer_id: str

    def opening(self) -> bytes:
        """The chunks before the first delta's."""

    def chunks(self, index: int, delta: Output) -> bytes:
        """The chunks that a delta gives: none, one, or a last one with the reason why it ended."""

    def closing(self, usages: Sequence[Usage]) -> bytes:
        """What follows the last delta's chunks; the usage is that of each choice."""

    def failure(self, error: WeftError) -> bytes:
        """What ends a stream that has begun and cannot go on."""

    def whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        """The answer in one piece."""


class Order(Struct, frozen=True):
    job: Job
    writer: Writer


Endpoint = Callable[[bytes, RequestContext], Awaitable[Order]]
"""Reads one kind of request, and chooses its model; raises what is wrong with it."""


Guard = Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]
"""Runs work for as long as somebody waits for it."""


class StreamedResponse:
    """The answer on its way: headers at the last moment, so that an error before the first token has its status.

    Its beginning and its end go through every layer of the application, what comes in between by the short way.
    """

    def __init__(self, send: Send, direct_writer: DirectWriter | None) -> None:
        self._send = send
        self._short_way = direct_writer
        self.started = False

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """The first call counts."""
        if not self.started:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.started = True

    def write(self, body: bytes) -> Awaitable[None] | None:
        """None when the piece is on its way; else what to wait for."""
        if self._short_way is not None and self._short_way.write(body):
            return None
        return self._send_body(body, more=True)

    async def end(self, body: bytes) -> None:
        await self._send_body(body, more=False)

    async def answer(self, body: bytes) -> None:
        """All of it, in one piece of JSON."""
        await self.start([*JSON_HEADERS, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    def _send_body(self, body: bytes, *, more: bool) -> Awaitable[None]:
        if self._short_way is not None:
            self._short_way.flush()
        return self._send({"type": "http.response.body", "body": body, "more_body": more})


class Handler(Response):
    """A response that does the work itself, next to the socket: it sees the client hang up."""

    def __init__(self, gate: Admission, door: Endpoint) -> None:
        super().__init__()
        self._gate = gate
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        options = self._gate.config.server
        with self._gate.admit(receive) as seat:
            try:
                body = await read_body(scope, receive, options.max_body_mb << 20)
                order = await self._door(body, seat)
            except ClientGone:
                return
            # A client may send the same id twice; the engine must never see it twice.
            seat.answer_id = order.writer.answer_id
            generation = Generation(order.job, seat, f"{seat.answer_id}-{uuid.uuid4().hex[:8]}", arrived)
            guard = partial(guarded, receive=receive, aborted=seat.aborted, timeout_s=options.request_timeout_s)
            reply = StreamedResponse(send, direct_writer(scope))
            if order.job.stream:
                await _stream(order, generation, guard, reply, options.keep_alive_s)
            else:
                await _whole(order, generation, guard, reply)


async def _whole(order: Order, generation: Generation, guard: Guard, reply: StreamedResponse) -> None:
    outputs = [CollectedOutput() for _ in range(order.job.num_choices)]
    with _until_hang_up(), generation.counted():
        await guard(generation.run(lambda index, delta: outputs[index].add(delta)))
        await reply.answer(order.writer.whole(outputs))


async def _stream(
    order: Order, generation: Generation, guard: Guard, reply: StreamedResponse, keep_alive_s: float
) -> None:
    async with told_in_stream(reply, order.writer.failure):
        with _until_hang_up(), generation.counted():
            await guard(_send_chunks(order, generation, reply, keep_alive_s))


@asynccontextmanager
async def told_in_stream(reply: StreamedResponse, failure: Callable[[WeftError], bytes]) -> AsyncIterator[None]:
    """An error before the first byte is raised and gets its status; a later one becomes the stream's last event."""
    try:
        yield
    except ClientGone:
        raise
    except WeftError as error:
        if not reply.started:
            raise
        log.error("a stream ended with %s: %s", type(error).__name__, error)
        await reply.end(failure(error))
    except Exception as error:
        if not reply.started:
            raise
        log.exception("a stream failed")
        await reply.end(failure(Unexpected(str(error))))


@contextmanager
def _until_hang_up() -> Iterator[None]:
    """Nobody is left to hear that the client has gone."""
    try:
        yield
    except ClientGone:
        log.info("the client hung up")


async def _send_chunks(order: Order, generation: Generation, reply: StreamedResponse, keep_alive_s: float) -> None:
    writer = order.writer
    waiting = KeepAlive(reply, keep_alive_s)
    opening = asyncio.Lock()
    is_open = False
    usages = [Usage()] * order.job.num_choices

    def take(index: int, delta: Output) -> Awaitable[None] | None:
        if delta.finish:
            usages[index] = delta.usage
        chunks = writer.chunks(index, delta)
        if not is_open:
            return begin(chunks)
        return reply.write(chunks) if chunks else None

    async def begin(chunks: bytes) -> None:
        """Several choices may begin at the same time; the first one's call counts."""
        nonlocal is_open
        async with opening:
            if not is_open:
                await waiting.end()
                await reply.start(sse.HEADERS)
                await written(reply, writer.opening())
                is_open = True
        await written(reply, chunks)

    try:
        await generation.run(take)
    finally:
        await waiting.end()
    await reply.end(writer.closing(usages))


class KeepAlive:
    """Tells a client, and whatever stands between, that its stream has not been forgotten; until there is more to
    tell."""

    def __init__(self, reply: StreamedResponse, interval_s: float) -> None:
        """0: it says nothing."""
        self._task = asyncio.create_task(self._say(reply, interval_s)) if interval_s else None

    async def end(self) -> None:
        """Again and again, if need be."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _say(self, reply: StreamedResponse, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await reply.start(sse.HEADERS)
            await written(reply, sse.WAITING)


async def written(reply: StreamedResponse, body: bytes) -> None:
    if body and (writing := reply.write(body)) is not None:
        await writing
