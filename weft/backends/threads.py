"""Waiting for a thread that must not keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, for work that may take minutes: when the program ends, it does not wait for it."""
    future: Future[T] = Future()
    # Whoever gives up waiting does not end the thread, which will have an outcome to set.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the task that waits
            future.set_exception(error)

    threading.Thread(target=run, name="weft-background", daemon=True).start()
    return await asyncio.wrap_future(future)
