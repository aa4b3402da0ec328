"""An engine on an event loop of its own, for a door that waits: a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from weft.backends.contract import Engine, failure_of
from weft.types import Delta, SamplingParams

T = TypeVar("T")

LETTING_GO_S = 5.0


class LocalEngine:
    """A context manager. Ctrl-C reaches the caller's thread: it ends what is waited for, and not the engine."""

    engine: Engine

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        self._start = start
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-local", daemon=True)

    def __enter__(self) -> LocalEngine:
        self._thread.start()
        try:
            self.engine = self._wait(self._start())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._wait(self.engine.close())
        finally:
            self._stop()

    def stream(self, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        """The answer as it comes; raises the error that it ends with. Leaving the iterator early aborts."""
        arrived: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with aclosing(await self.engine.submit(prompt_token_ids, params)) as deltas:
                    async for delta in deltas:
                        arrived.put(delta)
            finally:
                arrived.put(None)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (delta := arrived.get()) is not None:
                if failure := failure_of(delta):
                    raise failure
                yield delta
            pumping.result()
        finally:
            if pumping.cancel():
                _read_to_the_end(arrived)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._wait(_end_other_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _read_to_the_end(arrived: queue.SimpleQueue[Delta | None]) -> None:
    """Wait until the engine has let go of the request."""
    with contextlib.suppress(queue.Empty):
        while arrived.get(timeout=LETTING_GO_S) is not None:
            pass


async def _end_other_tasks() -> None:
    """What an interrupted start left behind gets the time to clean up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
