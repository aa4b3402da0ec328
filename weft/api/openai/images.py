"""POST /v1/images/generations"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import Mapping
from functools import partial

import msgspec
from fastapi import Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from weft.api import sse
from weft.api.body import parse, read_body
from weft.api.error_responses import error_body
from weft.api.handler import Guard, KeepAlive, StreamedResponse, told_in_stream, written
from weft.api.http_protocol import direct_writer
from weft.api.openai.images_schema import (
    CompletedImage,
    DrawnImage,
    ImageProgress,
    ImagesAnswer,
    ImagesRequest,
    PartialImage,
    images_usage,
    job_from,
    tensors_of,
)
from weft.api.sse import named_event
from weft.errors import WeftError
from weft.serving.admission import Admission, RequestContext
from weft.serving.guard import ClientGone, guarded
from weft.serving.image_generation import Drawing, Finished, Step
from weft.serving.image_request import ImageJob, Wish, check_image_model, sides
from weft.types import check_priority


class ImagesWriter:
    def __init__(self, job: ImageJob) -> None:
        first = job.images[0]
        self._job = job
        self._size = f"{first.width}x{first.height}"
        self._created = int(time.time())
        self._num_partial = [0] * len(job.images)

    def events(self, index: int, news: Step | Finished) -> bytes:
        """Every step is told of; behind it stands the image as it is then, where there is one."""
        steps = self._job.images[index].steps
        step = news.number if isinstance(news, Step) else steps
        events = _event(ImageProgress(index=index, step=step, steps=steps))
        if isinstance(news, Finished):
            return events + _event(self._completed(index, news))
        return events if news.preview is None else events + _event(self._partial(index, news.preview))

    def whole(self, finished: Mapping[int, Finished]) -> bytes:
        data = [
            DrawnImage(b64_json=_base64(finished[index].png), seed=params.seed)
            for index, params in enumerate(self._job.images)
        ]
        usage = images_usage([each.usage for each in finished.values()])
        return msgspec.json.encode(ImagesAnswer(created=self._created, data=data, size=self._size, usage=usage))

    def _partial(self, index: int, preview: bytes) -> PartialImage:
        number = self._num_partial[index]
        self._num_partial[index] += 1
        return PartialImage(
            index=index,
            b64_json=_base64(preview),
            created_at=int(time.time()),
            size=self._size,
            partial_image_index=number,
        )

    def _completed(self, index: int, finished: Finished) -> CompletedImage:
        return CompletedImage(
            index=index,
            b64_json=_base64(finished.png),
            created_at=int(time.time()),
            size=self._size,
            seed=self._job.images[index].seed,
            usage=images_usage([finished.usage]),
        )


def _event(body: ImageProgress | PartialImage | CompletedImage) -> bytes:
    return named_event(body.type, body)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


log = logging.getLogger(__name__)


class Order(Struct, frozen=True):
    job: ImageJob
    stream: bool


class ImagesExchange(Response):
    """A response that does the work itself, next to the socket: it sees the client hang up."""

    def __init__(self, gate: Admission) -> None:
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
                reply = StreamedResponse(send, direct_writer(scope))
                if order.stream:
                    await _stream(order.job, drawing, guard, reply, options.keep_alive_s)
                else:
                    await _whole(order.job, drawing, guard, reply)
            except ClientGone:
                log.info("the client hung up")


async def _order(body: bytes, seat: RequestContext) -> Order:
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


async def _whole(job: ImageJob, drawing: Drawing, guard: Guard, reply: StreamedResponse) -> None:
    writer = ImagesWriter(job)
    finished: dict[int, Finished] = {}

    async def take(index: int, news: Step | Finished) -> None:
        if isinstance(news, Finished):
            finished[index] = news

    with drawing.counted():
        await guard(drawing.run(take))
        await reply.answer(writer.whole(finished))


async def _stream(job: ImageJob, drawing: Drawing, guard: Guard, reply: StreamedResponse, keep_alive_s: float) -> None:
    async with told_in_stream(reply, _failure):
        with drawing.counted():
            await guard(_send_events(job, drawing, reply, keep_alive_s))


async def _send_events(job: ImageJob, drawing: Drawing, reply: StreamedResponse, keep_alive_s: float) -> None:
    writer = ImagesWriter(job)
    sending = asyncio.Lock()
    waiting = KeepAlive(reply, keep_alive_s)

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
