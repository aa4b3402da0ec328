"""An engine on an event loop of its own thread, for callers that wait: a terminal, a script, any thread of a program.

It may be used from many threads at once, and from a thread whose own event loop is running: nothing that an answer
needs runs there.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from itertools import repeat
from typing import Any, TypeVar

from weft.backends.contract import PLAIN_TERMS, Engine, Prompt, Stream, Terms, failure_of
from weft.errors import InvalidRequest, Unavailable
from weft.types import Output, SamplingParams

T = TypeVar("T")

Ask = Callable[[Engine], Coroutine[Any, Any, Stream]]
"""Submits one request."""
Saw = Callable[[Output], object]

LETTING_GO_S = 5.0
"""How long a caller that leaves waits until the engine has let go of its request."""

CLOSED = "The engine was closed."


def submitting(prompt: Prompt, params: SamplingParams, terms: Terms = PLAIN_TERMS) -> Ask:
    return lambda engine: engine.submit(prompt, params, terms)


def _unseen(delta: Output) -> None:
    pass


class BlockingEngine:
    """A context manager. Ctrl-C reaches the caller's thread: it ends what is waited for, and not the engine."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Engine]], *, in_background: bool = False) -> None:
        """Started when it is made, or not made at all; in the background: `engine` raises until it has started."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-engine-loop", daemon=True)
        self._gate = threading.Lock()
        """Held while work is handed to the loop: none is once it closes."""
        self._closed = False
        self._following: dict[str, Callable[[], bool]] = {}
        """What ends an answer, or several, on their way, by the names that they were given."""
        self._engine: Engine | None = None
        self._start_task: asyncio.Task[Any] | None = None
        self._thread.start()
        self._starting = self._launch(self._start(start))
        if not in_background:
            try:
                self._starting.result()
            except BaseException:
                self.close()
                raise

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    @property
    def failure(self) -> BaseException | None:
        """What kept it from starting."""
        starting = self._starting
        return starting.exception() if starting.done() and not starting.cancelled() else None

    @property
    def engine(self) -> Engine:
        """Raises Unavailable while it starts, and what kept it from starting."""
        if self._engine is not None:
            return self._engine
        if (error := self.failure) is not None:
            raise error
        raise Unavailable(CLOSED if self._closed else "The engine is still being started.")

    def __enter__(self) -> BlockingEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and what is open in it. Once is enough, and more does no harm."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        try:
            self._run(self._end())
        finally:
            self._run(_end_other_tasks())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives, done on the engine's loop."""
        future = self._launch(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stream(
        self, prompt: Prompt, params: SamplingParams, terms: Terms = PLAIN_TERMS
    ) -> Generator[Output, None, None]:
        """The answer as it comes; raises the error that it ends with. Leaving the generator early aborts."""
        return self.follow(submitting(prompt, params, terms))

    def follow(self, ask: Ask, name: str = "", saw: Saw = _unseen) -> Generator[Output, None, None]:
        """The same for a request that is asked in any way; `abort` ends it by its name. `saw` is called with every
        delta when it comes, on the engine's thread."""
        arrived: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        pumping = self._start_pump(ask, arrived.put, name, saw)
        has_ended = False
        try:
            while (delta := arrived.get()) is not None:
                yield _whole(delta)
            has_ended = True
            self._check_end(pumping)
        finally:
            self._forget(name, pumping.cancel)
            # A generator may be collected on any thread: the engine's own must not wait for itself.
            if not has_ended and pumping.cancel() and threading.current_thread() is not self._thread:
                with contextlib.suppress(queue.Empty):
                    while arrived.get(timeout=LETTING_GO_S) is not None:
                        pass

    async def follow_async(self, ask: Ask, name: str = "", saw: Saw = _unseen) -> AsyncGenerator[Output, None]:
        """The same for a caller on another event loop, which goes on meanwhile."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Output | None] = asyncio.Queue()

        def put(delta: Output | None) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, delta)

        pumping = self._start_pump(ask, put, name, saw)
        has_ended = False
        try:
            while (delta := await arrived.get()) is not None:
                yield _whole(delta)
            has_ended = True
            await asyncio.wait([asyncio.wrap_future(pumping)])
            self._check_end(pumping)
        finally:
            self._forget(name, pumping.cancel)
            if not has_ended and pumping.cancel():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LETTING_GO_S):
                        while await arrived.get() is not None:
                            pass

    def abort(self, name: str) -> bool:
        """End an answer that is on its way, or all that were collected by that name; whoever reads it gets no more.
        False: there is none of that name."""
        end = self._following.pop(name, None)
        return end is not None and end()

    def collect(
        self, asks: Sequence[Ask], saw: Sequence[Saw] = (), names: Sequence[str] = (), name: str = ""
    ) -> list[list[Output]]:
        """All of several answers, asked for at once, in their order; raises the first error that one ends with. `abort`
        ends each by its name of `names`, and all of them by `name`: of those, what had come is returned."""
        answers: list[list[Output]] = [[] for _ in asks]

        async def one(ask: Ask, deltas: list[Output], saw: Saw) -> None:
            def take(delta: Output) -> None:
                saw(delta)
                deltas.append(_whole(delta))

            async with aclosing(await ask(self.engine)) as answer:
                await answer.follow(take)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                each = zip(asks, answers, saw or repeat(_unseen), strict=False)
                tasks = [group.create_task(one(ask, deltas, seen_by)) for ask, deltas, seen_by in each]
                ends = [self._ending(task) for task in tasks] + [self._ending(*tasks)]
                with self._followed(dict(zip((*names, name), ends, strict=True)) if names else {}):
                    await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.wait(all_of_them())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return answers

    def _ending(self, *tasks: asyncio.Task[None]) -> Callable[[], bool]:
        """Ends work on the engine's loop, from any thread."""

        def end() -> bool:
            running = [task for task in tasks if not task.done()]
            for task in running:
                self._loop.call_soon_threadsafe(task.cancel)
            return bool(running)

        return end

    def _launch(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._gate:
            if not self._closed and threading.current_thread() is not self._thread:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise Unavailable(CLOSED if self._closed else "The engine's own thread cannot wait for the engine.")

    def _start_pump(self, ask: Ask, put: Callable[[Output | None], None], name: str, saw: Saw) -> Future[None]:
        self._check_free(name)
        pumping = self._launch(self._pump(ask, put, saw))
        if name:
            self._following[name] = pumping.cancel
        return pumping

    async def _pump(self, ask: Ask, put: Callable[[Output | None], None], saw: Saw) -> None:
        """Give every delta of an answer to `put`, and None when no more will come."""

        def take(delta: Output) -> None:
            saw(delta)
            put(delta)

        try:
            async with aclosing(await ask(self.engine)) as deltas:
                await deltas.follow(take)
        finally:
            put(None)

    def _check_free(self, name: str) -> None:
        if name in self._following:
            raise InvalidRequest(f"There is a request {name!r} already.", param="request_id")

    def _forget(self, name: str, end: Callable[[], bool]) -> None:
        if self._following.get(name) == end:
            self._following.pop(name, None)

    @contextlib.contextmanager
    def _followed(self, ends: Mapping[str, Callable[[], bool]]) -> Iterator[None]:
        for name in ends:
            self._check_free(name)
        self._following |= ends
        try:
            yield
        finally:
            for name, end in ends.items():
                self._forget(name, end)

    def _check_end(self, pumping: Future[None]) -> None:
        """Raise what kept an answer from its end; nothing, where it was aborted."""
        try:
            pumping.result()
        except CancelledError:
            if self._closed:
                raise Unavailable(CLOSED) from None

    async def _start(self, start: Callable[[], Coroutine[Any, Any, Engine]]) -> None:
        self._start_task = asyncio.current_task()
        self._engine = await start()

    async def _end(self) -> None:
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.wait([self._start_task])
        if self._engine is not None:
            await self._engine.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _whole(delta: Output) -> Output:
    """The delta, unless it ends an answer that failed."""
    if failure := failure_of(delta):
        raise failure
    return delta


async def _end_other_tasks() -> None:
    """What an interrupted start left behind gets the time to clean up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
