"""An image on its way, followed to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from weft.backends.contract import Engine, ImageUpdate, ImageUpdates, Terms, failure_of
from weft.errors import EngineFault
from weft.frontend.images.job import ImageJob
from weft.frontend.images.picture import Image

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
