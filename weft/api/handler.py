"""The one handler of every endpoint over HTTP, from the request's body to the answer's last byte."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import ClassVar

import msgspec
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from weft import logs
from weft.api.body import read_body
from weft.api.error_responses import Unexpected, error_body
from weft.api.event_log import WAITING, EventLog
from weft.api.http_protocol import DirectWriter, direct_writer
from weft.errors import WeftError
from weft.serving.admission import Admission, ClientGone, RequestContext, no_hang_up
from weft.serving.generation import Generation
from weft.serving.output_reader import CollectedOutput
from weft.types import GenerationRequest, Output, Usage

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""The most that is given to a socket at once."""

Headers = list[tuple[bytes, bytes]]
JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


DONE = b"data: [DONE]\n\n"

_UNBUFFERED: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
SSE_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *_UNBUFFERED]
NDJSON_HEADERS: Headers = [(b"content-type", b"application/x-ndjson"), *_UNBUFFERED]
"""A stream whose every line is JSON has neither comments nor empty lines."""


def named_event(name: str, body: object) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: WeftError) -> bytes:
    """Return what ends a stream of chunks that has begun and cannot go on."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE


class Writer:
    """A writer writes the answers of one endpoint: in one piece, or as a stream, of server-sent events as a rule."""

    stream_headers: ClassVar[Headers] = SSE_HEADERS

    @property
    def waiting(self) -> bytes:
        """These bytes tell the reader of a stream that it will begin."""
        return WAITING

    def __init__(self, answer_id: str, model_name: str, *, stream: bool) -> None:
        """`model_name`: as the client called it, for the log and the metrics. `stream`: a stream is wanted."""
        self.answer_id = answer_id
        self.model_name = model_name
        self.stream = stream
        self.background: EventLog | None = None
        """It takes the events of an answer that is generated whether its client waits or not."""

    def opening(self) -> bytes:
        """Return the chunks before those of the first output."""
        return b""

    def chunks(self, index: int, output: Output) -> bytes | Awaitable[bytes]:
        """Return the chunks that an output gives: none, one, or a last one with the reason why it ended. They are
        awaited where they take a thread to write."""
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def closing(self, usages: Sequence[Usage]) -> bytes | Awaitable[bytes]:
        """Return what follows the last output's chunks; the usage is that of each request."""
        return b""

    def failure(self, error: WeftError) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        return error_event(error)

    def cancelled(self) -> bytes:
        """Return what ends the events of an answer in the background that was cancelled."""
        return b""

    def check(self, output: Output) -> None:
        """Raise what is wrong with an answer in one piece as soon as an output shows it, before others are computed."""

    async def whole(self, outputs: Sequence[CollectedOutput]) -> bytes | Sequence[bytes]:
        """Return the answer that is not streamed; a large one in pieces, which are never copied together."""
        raise NotImplementedError


Endpoint = Callable[[bytes, RequestContext], Awaitable[tuple[Sequence[GenerationRequest], Writer]]]
"""Parses the body of one kind of request, and chooses its model; raises what is wrong with it. Where there are no
requests, the writer's whole answer is all of it."""


class StreamedResponse:
    """The answer on its way: headers at the last moment, so that an error before the first token has its status.

    Its beginning and its end go through every layer of the application, what comes in between by the direct writer.
    """

    def __init__(self, send: Send, direct_writer: DirectWriter | None, headers: Mapping[str, str]) -> None:
        """`headers`: what the answer has besides those of its type."""
        self._send = send
        self._direct = direct_writer
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.started = False

    async def start(self, headers: Headers) -> None:
        """Send the headers, once."""
        if not self.started:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers + self._headers})
            self.started = True

    def write(self, body: bytes) -> Awaitable[None] | None:
        """Write a piece. Returns None when it is on its way, else what to wait for."""
        if self._direct is not None and self._direct.write(body):
            return None
        return self._send_body(body, more=True)

    async def end(self, body: bytes) -> None:
        await self._send_body(body, more=False)

    async def answer(self, body: bytes | Sequence[bytes]) -> None:
        """Send an answer of JSON whose length is known."""
        pieces = [body] if isinstance(body, bytes) else body
        length = sum(map(len, pieces))
        await self.start([*JSON_HEADERS, (b"content-length", b"%d" % length)])
        if length <= PIECE_BYTES:
            await self.end(b"".join(pieces))
            return
        for piece in pieces:
            # A socket keeps a copy of all that it cannot send at once.
            for at in range(0, len(piece), PIECE_BYTES):
                await self._send_body(piece[at : at + PIECE_BYTES], more=True)
        await self.end(b"")

    def _send_body(self, body: bytes, *, more: bool) -> Awaitable[None]:
        if self._direct is not None:
            self._direct.flush()
        return self._send({"type": "http.response.body", "body": body, "more_body": more})


FIELDS_HEADER = "weft-fields-without-effect"
SESSION_HEADER = b"x-session-id"


def fields_header(context: RequestContext) -> dict[str, str]:
    """Return the header that names fields of a request which were accepted without effect, if there are any."""
    return {FIELDS_HEADER: context.fields.told} if context.fields.without_effect else {}


class Handler(Response):
    """A response that does the work itself, next to the socket: it sees the client hang up."""

    def __init__(self, admission: Admission, endpoint: Endpoint, *, is_batch: bool = False) -> None:
        super().__init__()
        self._admission = admission
        self._endpoint = endpoint
        self._is_batch = is_batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        options = self._admission.config.server
        with ExitStack() as stack:
            context = stack.enter_context(self._admission.admit(receive, is_batch=self._is_batch))
            context.session = _session(scope)
            context.check_capacity()
            try:
                body = await read_body(scope, receive, options.max_body_mb << 20, context.hold_body)
                requests, writer = await self._endpoint(body, context)
            except ClientGone:
                return
            del body
            context.release_body()
            context.answer_id = writer.answer_id
            told = fields_header(context)
            response = StreamedResponse(send, direct_writer(scope), told)
            if not requests:
                await response.answer(await writer.whole([]))
                return
            generation = Generation(requests, context, arrived, writer.model_name)
            context.served.metrics.left_aside(context.fields.without_effect)
            if (log := writer.background) is not None:
                await log.save()
                log.run(_in_background(stack.pop_all(), context, generation, writer, len(requests), log))
                if log.answer:
                    await response.answer(log.answer)
                else:
                    await streamed(log, 0, options.keep_alive_s, told)(scope, receive, send)
            elif writer.stream:
                async with _told_in_stream(response, writer):
                    with _until_hang_up(), generation.counted():
                        await context.guard(
                            _send_chunks(generation, writer, len(requests), response, options.keep_alive_s)
                        )
            else:
                outputs = [CollectedOutput() for _ in requests]

                def collect(index: int, output: Output) -> None:
                    writer.check(output)
                    outputs[index].add(output)

                with _until_hang_up(), generation.counted():
                    await context.guard(generation.run(collect))
                    await response.answer(await writer.whole(outputs))


def _session(scope: Scope) -> str:
    """Return the session that a request's header names; empty: none."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == SESSION_HEADER), "")


def streamed(log: EventLog, first: int, keep_alive_s: float, told: Mapping[str, str] | None = None) -> Response:
    """Return the response of the events from this number on, with these headers besides those of its type."""
    headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
    return StreamingResponse(log.follow(first, keep_alive_s), headers=headers | dict(told or {}))


async def _in_background(
    admitted: ExitStack,
    context: RequestContext,
    generation: Generation,
    writer: Writer,
    num_requests: int,
    log: EventLog,
) -> None:
    """Generate an answer whose client does not wait for it."""
    context.receive = no_hang_up
    with admitted:
        try:
            async with _told_in_stream(log, writer):
                with generation.counted():
                    await context.guard(_send_chunks(generation, writer, num_requests, log, 0))
        except asyncio.CancelledError:
            if not log.is_cancelled:
                # The server ends: the next one tells what became of the answer.
                raise
            await log.end(writer.cancelled())


@asynccontextmanager
async def _told_in_stream(response: StreamedResponse | EventLog, writer: Writer) -> AsyncIterator[None]:
    """Raise an error before the first byte, which gets its status; make a later one the stream's last event."""
    try:
        yield
    except ClientGone:
        raise
    except WeftError as error:
        if not response.started:
            raise
        log.error("a stream ended with %s: %s", type(error).__name__, error)
        await response.end(writer.failure(error))
    except Exception as error:
        if not response.started:
            raise
        log.exception("a stream failed")
        await response.end(writer.failure(Unexpected(str(error))))


@contextmanager
def _until_hang_up() -> Iterator[None]:
    """Note in the request's line that the client has gone, and tell no one else."""
    try:
        yield
    except ClientGone:
        logs.note({"hung_up": True})


async def _send_chunks(
    generation: Generation,
    writer: Writer,
    num_requests: int,
    response: StreamedResponse | EventLog,
    keep_alive_s: float,
) -> None:
    keep_alive = KeepAlive(response, writer, keep_alive_s)
    opening = asyncio.Lock()
    is_open = False
    usages = [Usage()] * num_requests

    def take(index: int, output: Output) -> Awaitable[None] | None:
        if output.finish:
            usages[index] = output.usage
        chunks = writer.chunks(index, output)
        if is_open and type(chunks) is bytes:
            return response.write(chunks) if chunks else None
        return begin(chunks)

    async def begin(chunks: bytes | Awaitable[bytes]) -> None:
        """Write the first chunks, or those that take a thread. Several requests may begin at the same time; the first
        one's call counts."""
        nonlocal is_open
        if not isinstance(chunks, bytes):
            chunks = await chunks
        async with opening:
            if not is_open:
                await keep_alive.end()
                await response.start(writer.stream_headers)
                await _written(response, writer.opening())
                is_open = True
        await _written(response, chunks)

    try:
        await generation.run(take)
    finally:
        await keep_alive.end()
    closing = writer.closing(usages)
    await response.end(closing if isinstance(closing, bytes) else await closing)


class KeepAlive:
    """Tells a client, and the proxies between, that its stream is alive, until there is more to tell."""

    def __init__(self, response: StreamedResponse | EventLog, writer: Writer, interval_s: float) -> None:
        """0: it says nothing."""
        self._task = asyncio.create_task(self._say(response, writer, interval_s)) if interval_s else None

    async def end(self) -> None:
        """Stop it. It may be called again."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _say(self, response: StreamedResponse | EventLog, writer: Writer, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await response.start(writer.stream_headers)
            await _written(response, writer.waiting)


async def _written(response: StreamedResponse | EventLog, body: bytes) -> None:
    if body and (writing := response.write(body)) is not None:
        await writing


def add_posts(app: FastAPI, routes: Mapping[str, Callable[[], Response]]) -> None:
    """Add routes that the description of the interface leaves out."""

    def responding(response: Callable[[], Response]) -> Callable[[], Awaitable[Response]]:
        async def respond() -> Response:
            return response()

        return respond

    for path, response in routes.items():
        app.add_api_route(path, responding(response), methods=["POST"], include_in_schema=False)
