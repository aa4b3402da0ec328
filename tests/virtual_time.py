"""An event loop whose clock jumps to the next thing to do: timing laws to the microsecond, in no time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and nothing will ever come"
        self.now += max(timeout, 0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """The work of a thread is done at once, and takes none of the loop's time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop whose clock jumps. time.monotonic and time.perf_counter tell its time meanwhile."""
    loop = Loop()
    patch = mock.patch.multiple(time, monotonic=loop.time, perf_counter=loop.time)
    with patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


async def sleep(seconds: float) -> None:
    """Let time pass, which is possible on the clock that jumps alone: a test never waits for real time."""
    assert isinstance(asyncio.get_running_loop(), Loop), "only `virtual_time.run` lets time pass"
    await asyncio.sleep(seconds)
