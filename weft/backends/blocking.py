"""An engine on an event loop of its own thread, for callers that block: a terminal, a script, any thread of a program.

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

from weft.backends.contract import Engine, failure_of
from weft.errors import InvalidRequest, Unavailable
from weft.types import GenerationRequest, Output, Prompt, Sample, SamplingParams

T = TypeVar("T")

Observe = Callable[[Output], object]
"""Called with every output when it comes, on the engine's thread."""

ABORT_SECONDS = 5.0
"""How long a caller that leaves waits until the engine has ended its request."""

CLOSED = "The engine was closed."


def _ignore(output: Output) -> None:
    pass


class BlockingEngine:
    """An engine for callers that block. Ctrl-C reaches the caller's thread: it ends the request, not the engine."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Engine]], *, in_background: bool = False) -> None:
        """Start the engine. In the background: return at once, and `engine` raises until it has started."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-engine-loop", daemon=True)
        self._launching = threading.Lock()
        """Held while work is handed to the loop: none is once it closes."""
        self._closed = False
        self._aborts: dict[str, Callable[[], bool]] = {}
        """The calls that end open requests, by request id, or several by the id of their batch."""
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
        """The error that kept the engine from starting."""
        starting = self._starting
        return starting.exception() if starting.done() and not starting.cancelled() else None

    @property
    def engine(self) -> Engine:
        """The engine. Raises Unavailable while it starts, and the error that kept it from starting."""
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
        """End the engine and the requests that are open in it. It may be called more than once."""
        with self._launching:
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
        """Do the work on the engine's loop, and return what it gives."""
        future = self._launch(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, adapter: str | None = None
    ) -> Generator[Output, None, None]:
        """Return the outputs of a request to generate tokens, as `follow` does."""
        return self.follow(GenerationRequest(prompt=prompt, task=Sample(params=params), adapter=adapter))

    def follow(self, request: GenerationRequest, observe: Observe = _ignore) -> Generator[Output, None, None]:
        """Return the outputs of a request as they come; raises the error that it ends with. Leaving the generator early
        aborts it, and so does `abort` with its id, if it has one."""
        arrived: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        pumping = self._start_pump(request, arrived.put, observe)
        has_ended = False
        try:
            while (output := arrived.get()) is not None:
                yield _checked(output)
            has_ended = True
            self._check_end(pumping)
        finally:
            self._forget(request.request_id, pumping.cancel)
            # A generator may be collected on any thread: the engine's own must not wait for itself.
            if not has_ended and pumping.cancel() and threading.current_thread() is not self._thread:
                with contextlib.suppress(queue.Empty):
                    while arrived.get(timeout=ABORT_SECONDS) is not None:
                        pass

    async def follow_async(
        self, request: GenerationRequest, observe: Observe = _ignore
    ) -> AsyncGenerator[Output, None]:
        """Return the same for a caller on another event loop, which goes on meanwhile."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Output | None] = asyncio.Queue()

        def put(output: Output | None) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, output)

        pumping = self._start_pump(request, put, observe)
        has_ended = False
        try:
            while (output := await arrived.get()) is not None:
                yield _checked(output)
            has_ended = True
            await asyncio.wait([asyncio.wrap_future(pumping)])
            self._check_end(pumping)
        finally:
            self._forget(request.request_id, pumping.cancel)
            if not has_ended and pumping.cancel():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ABORT_SECONDS):
                        while await arrived.get() is not None:
                            pass

    def abort(self, request_id: str) -> bool:
        """End an open request, or a batch of them, whose readers get no more. Return False when there is none of that
        id."""
        end = self._aborts.pop(request_id, None)
        return end is not None and end()

    def collect(
        self, requests: Sequence[GenerationRequest], observers: Sequence[Observe] = (), batch_id: str = ""
    ) -> list[list[Output]]:
        """Return all outputs of several requests, submitted at once, in their order; raises the first error that one
        ends with. With a `batch_id`, `abort` ends each by its id and all by that: what had come is returned."""
        answers: list[list[Output]] = [[] for _ in requests]

        async def one(request: GenerationRequest, outputs: list[Output], observe: Observe) -> None:
            def take(output: Output) -> None:
                observe(output)
                outputs.append(_checked(output))

            async with aclosing(await self.engine.submit(request)) as stream:
                await stream.follow(take)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                each = zip(requests, answers, observers or repeat(_ignore), strict=False)
                tasks = [group.create_task(one(request, outputs, observe)) for request, outputs, observe in each]
                aborts = {
                    request.request_id: self._abort_of(task) for request, task in zip(requests, tasks, strict=True)
                }
                with self._abortable({**aborts, batch_id: self._abort_of(*tasks)} if batch_id else {}):
                    await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.wait(all_of_them())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return answers

    def _abort_of(self, *tasks: asyncio.Task[None]) -> Callable[[], bool]:
        """Return a call that ends tasks of the engine's loop from any thread."""

        def end() -> bool:
            running = [task for task in tasks if not task.done()]
            for task in running:
                self._loop.call_soon_threadsafe(task.cancel)
            return bool(running)

        return end

    def _launch(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._launching:
            if not self._closed and threading.current_thread() is not self._thread:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise Unavailable(CLOSED if self._closed else "The engine's own thread cannot wait for the engine.")

    def _start_pump(
        self, request: GenerationRequest, put: Callable[[Output | None], None], observe: Observe
    ) -> Future[None]:
        self._check_free(request.request_id)
        pumping = self._launch(self._pump(request, put, observe))
        if request.request_id:
            self._aborts[request.request_id] = pumping.cancel
        return pumping

    async def _pump(self, request: GenerationRequest, put: Callable[[Output | None], None], observe: Observe) -> None:
        """Give every output of a request to `put`, and None when no more will come."""

        def take(output: Output) -> None:
            observe(output)
            put(output)

        try:
            async with aclosing(await self.engine.submit(request)) as stream:
                await stream.follow(take)
        finally:
            put(None)

    def _check_free(self, request_id: str) -> None:
        if request_id in self._aborts:
            raise InvalidRequest(f"There is a request {request_id!r} already.", param="request_id")

    def _forget(self, request_id: str, end: Callable[[], bool]) -> None:
        if self._aborts.get(request_id) == end:
            self._aborts.pop(request_id, None)

    @contextlib.contextmanager
    def _abortable(self, aborts: Mapping[str, Callable[[], bool]]) -> Iterator[None]:
        for request_id in aborts:
            self._check_free(request_id)
        self._aborts |= aborts
        try:
            yield
        finally:
            for request_id, end in aborts.items():
                self._forget(request_id, end)

    def _check_end(self, pumping: Future[None]) -> None:
        """Raise the error that kept a stream from its end; nothing, where it was aborted."""
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


def _checked(output: Output) -> Output:
    """Return the output, unless it ends a request that failed: then its error is raised."""
    if failure := failure_of(output):
        raise failure
    return output


async def _end_other_tasks() -> None:
    """Cancel what an interrupted start left behind, and wait until it has cleaned up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
