"""The images of one request at the engine: submitted together, drawn side by side, and closed whatever happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from weft import logs
from weft.backends.contract import Engine, ImageUpdate, ImageUpdates, Terms, failure_of
from weft.errors import EngineFault, Overloaded
from weft.observe.traces import RequestOutcome
from weft.serving.admission import RequestContext
from weft.serving.guard import side_by_side
from weft.serving.image_request import Image, ImageJob, drawing_model
from weft.serving.timing import RequestTimer, all_ended
from weft.types import FinishReason, ImageParams, Usage

Take = Callable[[ImageUpdate], Awaitable[None] | None]
"""Is given an update. What it returns, if anything, is awaited before the next one."""


async def follow(updates: ImageUpdates, take: Take) -> bytes:
    """Give every update to `take`, one that tells of a failure too, and return the image. Raises the error that it
    ended with instead."""
    async for update in updates:
        if (taking := take(update)) is not None:
            await taking
        if failure := failure_of(update):
            raise failure
        if update.finish:
            if update.image is None:
                raise EngineFault("The engine ended an image without showing it.")
            return update.image
    raise EngineFault("The engine ended an image without a reason.")


async def draw(engine: Engine, job: ImageJob, take: Take) -> Image:
    """The job's first image. Cancelling it ends the request."""
    params = job.images[0]
    terms = Terms(cache_salt=job.cache_salt, priority=job.priority)
    updates = await engine.draw(job.prompt, params, terms, job.given)
    try:
        return Image(width=params.width, height=params.height, rgb=await follow(updates, take))
    finally:
        await updates.aclose()


log = logging.getLogger(__name__)

LARGE_IMAGE_BYTES = 1 << 18
"""Above this an image is compressed in a thread, so that the streams of others go on meanwhile."""


class Step(Struct, frozen=True):
    """So many steps of an image are done, and more are to come."""

    number: int
    preview: bytes | None
    """PNG, where one was asked for."""


class Finished(Struct, frozen=True):
    """An image is done."""

    png: bytes
    usage: Usage


TakeOf = Callable[[int, Step | Finished], Awaitable[None]]
"""Is given how far an image is, and its index. It is awaited before that image's next step is told of."""


class Drawing:
    """Every image that was submitted is counted as ended exactly once."""

    def __init__(self, job: ImageJob, seat: RequestContext, engine_id: str, arrived: float) -> None:
        self._job = job
        self._seat = seat
        self._service = seat.service
        self._engine_id = engine_id
        self._arrived = arrived
        self._stopwatches: list[RequestTimer] = []
        self._num_tokens = 0
        seat.choices = self._stopwatches

    async def run(self, take: TakeOf) -> None:
        """Submit the job and tell `take` of every step. Raises what the engine refuses, and the first error that an
        image ends with. Cancelling it aborts the job."""
        images: list[ImageUpdates] = []
        try:
            for index, params in enumerate(self._job.images):
                images.append(await self._submit(index, params))
                self._stopwatches.append(
                    RequestTimer(
                        self._service.metrics,
                        self._seat.account,
                        self._arrived,
                        self._job.num_prompt_tokens,
                        self._service.model_name,
                    )
                )
            await side_by_side(self._follow(index, updates, take) for index, updates in enumerate(images))
        finally:
            for updates in images:
                await updates.aclose()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """However the work within ends, every image that was submitted is counted as ended."""
        try:
            with all_ended(self._stopwatches):
                yield
        finally:
            if self._stopwatches:
                self._report()

    async def _submit(self, index: int, params: ImageParams) -> ImageUpdates:
        try:
            updates = await self._service.engine.draw(
                self._job.prompt,
                params,
                Terms(
                    request_id=f"{self._engine_id}-{index}",
                    cache_salt=self._job.cache_salt,
                    priority=self._job.priority,
                    tenant=self._seat.tenant,
                ),
                self._job.given,
            )
        except Overloaded:
            self._service.metrics.rejected()
            raise
        if index == 0:
            # As with the choices of a chat: a prompt counts once.
            self._seat.account.spend_tokens(self._job.num_prompt_tokens)
        return updates

    async def _follow(self, index: int, updates: ImageUpdates, take: TakeOf) -> None:
        params = self._job.images[index]

        async def take_shown(update: ImageUpdate) -> None:
            png = None if update.image is None else await _png(params, update.image)
            if update.finish is None:
                await take(index, Step(update.step, png))
                return
            self._ended(index, update.finish, update.usage)
            if png is not None:
                await take(index, Finished(png, update.usage))

        await follow(updates, take_shown)

    def _ended(self, index: int, reason: FinishReason, usage: Usage) -> None:
        self._stopwatches[index].end(reason)
        self._num_tokens += usage.completion_tokens
        self._seat.account.spend_tokens(usage.completion_tokens)

    def _report(self) -> None:
        """To the log, and to whoever follows traces."""
        finish = ",".join(sorted({watch.finish for watch in self._stopwatches if watch.finish is not None}))
        seconds = time.perf_counter() - self._arrived
        fields: dict[str, object] = {
            "answer_id": self._seat.answer_id,
            "images": len(self._stopwatches),
            "steps": self._job.images[0].steps,
            "prompt_tokens": self._job.num_prompt_tokens,
            "seconds": seconds,
            "finish": finish,
        }
        if self._service.options.log_prompts:
            text = self._job.images[0].prompt_text
            decode = self._service.engine.tokenizer.decode
            fields["prompt"] = text or decode(self._job.prompt, skip_special_tokens=False)
        logs.event(log, logging.INFO, "drew", fields)
        if self._service.traces is not None:
            self._service.traces.record(
                RequestOutcome(
                    model=drawing_model(self._service.engine).name,
                    request_id=self._seat.request_id,
                    tenant=self._seat.tenant,
                    choices=len(self._stopwatches),
                    prompt_tokens=self._job.num_prompt_tokens,
                    completion_tokens=self._num_tokens,
                    queue_seconds=None,
                    first_token_seconds=None,
                    seconds=seconds,
                    finish=finish,
                )
            )


async def _png(params: ImageParams, rgb: bytes) -> bytes:
    image = Image(width=params.width, height=params.height, rgb=rgb)
    return await asyncio.to_thread(image.png) if len(rgb) > LARGE_IMAGE_BYTES else image.png()
