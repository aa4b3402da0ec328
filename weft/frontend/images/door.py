"""POST /v1/images/generations"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from functools import partial

from fastapi import Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft.frontend import sse
from weft.frontend.body import ClientGone, parse, read_body
from weft.frontend.errors import error_body
from weft.frontend.exchange import Guard, Reply, Waiting, told_in_stream, written
from weft.frontend.gate import Gate, Seat
from weft.frontend.guard import guarded
from weft.frontend.images.drawing import Drawing, Finished, Step
from weft.frontend.images.embeds import job_from, tensors_of
from weft.frontend.images.job import ImageJob, Wish, check_image_model, sides
from weft.frontend.images.schemas import ImagesRequest
from weft.frontend.images.writer import ImagesWriter
from weft.frontend.protocol import short_way
from weft.types import check_priority

log = logging.getLogger(__name__)


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
        options = self._gate.config.server
        with self._gate.admit(receive) as seat:
            try:
                body = await read_body(scope, receive, options.max_body_mb << 20)
                order = await _order(body, seat)
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


async def _order(body: bytes, seat: Seat) -> Order:
    request = await parse(ImagesRequest, body, seat.config.limits)
    service = await seat.choose_painter(request.model)
    check_image_model(request.model, service.model_name, service.engine)
    check_priority(request.priority)
    embeds, information = await tensors_of(request, service.limits)
    width, height = sides(request.size)
    wish = Wish(
        prompt=request.prompt or "",
        prompt_embeds=embeds,
        negative_prompt=request.negative_prompt,
        additional_information=information,
        width=width,
        height=height,
        steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        seed=request.seed,
        sampler=request.sampler,
        n=request.n,
        previews=request.partial_images,
    )
    job = await job_from(wish, service, cache_salt=request.cache_salt, priority=request.priority)
    return Order(job, request.stream)


async def _whole(job: ImageJob, drawing: Drawing, guard: Guard, reply: Reply) -> None:
    writer = ImagesWriter(job)
    finished: dict[int, Finished] = {}

    async def take(index: int, news: Step | Finished) -> None:
        if isinstance(news, Finished):
            finished[index] = news

    with drawing.counted():
        await guard(drawing.run(take))
        await reply.answer(writer.whole(finished))


async def _stream(job: ImageJob, drawing: Drawing, guard: Guard, reply: Reply, keep_alive_s: float) -> None:
    async with told_in_stream(reply, _failure):
        with drawing.counted():
            await guard(_send_events(job, drawing, reply, keep_alive_s))


async def _send_events(job: ImageJob, drawing: Drawing, reply: Reply, keep_alive_s: float) -> None:
    writer = ImagesWriter(job)
    sending = asyncio.Lock()
    waiting = Waiting(reply, keep_alive_s)

    async def take(index: int, news: Step | Finished) -> None:
        events = writer.events(index, news)
        async with sending:
            await waiting.end()
            await reply.start(sse.HEADERS)
            await written(reply, events)

    try:
        await drawing.run(take)
    finally:
        await waiting.end()
    await reply.end(b"")


def _failure(error: WeftError) -> bytes:
    return sse.named_event("error", error_body(error))
