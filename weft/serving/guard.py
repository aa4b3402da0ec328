"""Work that stops when its client hangs up, when its time is over, or when the server will not wait any longer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from starlette.types import Message, Receive

from weft.errors import RequestTimeout, Unavailable


class ClientGone(Exception):
    """The client has hung up, so that no answer can be sent."""


async def side_by_side(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it at the same time. Raises the first error of any; the others are cancelled then."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def guarded(
    work: Coroutine[Any, Any, None], receive: Receive, *, aborted: asyncio.Future[str], timeout_s: float
) -> None:
    """Run the work to its end, or cancel it and raise ClientGone, Unavailable or RequestTimeout (0: no limit)."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hung_up(receive))
    ends: set[asyncio.Future[Any]] = {task, gone, aborted}
    try:
        await asyncio.wait(ends, timeout=timeout_s or None, return_when=asyncio.FIRST_COMPLETED)
        if task.done() or await _ended_after_all(task):
            return task.result()
        if gone.done():
            gone.result()
            raise ClientGone
        if aborted.done():
            raise Unavailable(aborted.result())
        raise RequestTimeout(f"The request took longer than {timeout_s:g} s and was ended.")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})


async def _ended_after_all(task: asyncio.Task[None]) -> bool:
    """Cancel the task and wait for it; true when it ended by itself before the word reached it."""
    task.cancel()
    await asyncio.wait({task})
    return not task.cancelled()


async def no_hang_up() -> Message:
    """For doors that are told otherwise when a client has gone: there is nothing to listen for."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
