"""POST /v1/images/generations"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft.frontend import sse
from weft.frontend.body import ClientGone, parse, read_body
from weft.frontend.errors import Unexpected, error_body
from weft.frontend.exchange import JSON_HEADERS, Reply
from weft.frontend.gate import Gate, Service
from weft.frontend.guard import guarded
from weft.frontend.images.drawing import Drawing, Finished, Step
from weft.frontend.images.embeds import check_payloads, payloads_of
from weft.frontend.images.job import ImageJob, Wish, check_image_model, job_of, sides
from weft.frontend.images.schemas import ImagesRequest
from weft.frontend.images.writer import ImagesWriter
from weft.frontend.protocol import short_way
from weft.types import check_priority

log = logging.getLogger(__name__)

Guard = Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]


class Order(Struct, frozen=True):
    job: ImageJob
    stream: bool


class ImagesExchange(Response):
    """A response that does the work itself, next to the socket: it sees the client hang up."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        with self._gate.admit() as seat:
            options = seat.service.options
            try:
                body = await read_body(scope, receive, options.max_body_mb << 20)
                order = await _order(body, seat.service)
                seat.answer_id = f"img-{uuid.uuid4().hex}"
                drawing = Drawing(order.job, seat, seat.answer_id, arrived)
                guard = partial(guarded, receive=receive, aborted=seat.aborted, timeout_s=options.request_timeout_s)
                reply = Reply(send, short_way(scope))
                if order.stream:
                    await _stream(order.job, drawing, guard, reply, options.keep_alive_s)
                else:
                    await _whole(order.job, drawing, guard, reply)
            except ClientGone:
                log.info("the client hung up")


async def _order(body: bytes, service: Service) -> Order:
    request = await parse(ImagesRequest, body, service.limits)
    engine = service.engine
    check_image_model(request.model, service.model_name, engine.model)
    check_priority(request.priority)
    if request.prompt_embeds is not None or request.additional_information is not None:
        embeds, information = await asyncio.to_thread(payloads_of, request)
        await check_payloads(embeds, information, service)
    width, height = sides(request.size)
    wish = Wish(
        prompt=request.prompt or "",
        negative_prompt=request.negative_prompt,
        width=width,
        height=height,
        steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        seed=request.seed,
        sampler=request.sampler,
        n=request.n,
        previews=request.partial_images,
    )
    job = job_of(wish, engine.model, engine.tokenizer, cache_salt=request.cache_salt, priority=request.priority)
    return Order(job, request.stream)


async def _whole(job: ImageJob, drawing: Drawing, guard: Guard, reply: Reply) -> None:
    writer = ImagesWriter(job)
    finished: dict[int, Finished] = {}

    async def take(index: int, news: Step | Finished) -> None:
        if isinstance(news, Finished):
            finished[index] = news

    with drawing.counted():
        await guard(drawing.run(take))
        body = writer.whole(finished)
        await reply.start([*JSON_HEADERS, (b"content-length", b"%d" % len(body))])
        await reply.end(body)


async def _stream(job: ImageJob, drawing: Drawing, guard: Guard, reply: Reply, keep_alive_s: float) -> None:
    """An error before the first byte is raised and gets its status; a later one becomes the stream's last event."""
    try:
        with drawing.counted():
            await guard(_send_events(job, drawing, reply, keep_alive_s))
    except WeftError as error:
        if not reply.started:
            raise
        log.error("a stream ended with %s: %s", type(error).__name__, error)
        await reply.end(_failure(error))
    except ClientGone:
        raise
    except Exception as error:
        if not reply.started:
            raise
        log.exception("a stream failed")
        await reply.end(_failure(Unexpected(str(error))))


async def _send_events(job: ImageJob, drawing: Drawing, reply: Reply, keep_alive_s: float) -> None:
    writer = ImagesWriter(job)
    sending = asyncio.Lock()
    has_begun = False

    async def send(events: bytes) -> None:
        await reply.start(sse.HEADERS)
        if (writing := reply.write(events)) is not None:
            await writing

    async def take(index: int, news: Step | Finished) -> None:
        nonlocal has_begun
        events = writer.events(index, news)
        async with sending:
            has_begun = True
            await send(events)

    async def say_waiting() -> None:
        """Tell a client, and whatever stands between, that its stream has not been forgotten."""
        while not has_begun:
            await asyncio.sleep(keep_alive_s)
            async with sending:
                if not has_begun:
                    await send(sse.WAITING)

    waiting = asyncio.create_task(say_waiting()) if keep_alive_s else None
    try:
        await drawing.run(take)
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})
    await reply.end(b"")


def _failure(error: WeftError) -> bytes:
    return sse.named_event("error", error_body(error))
