"""The requests that are open in vLLM, and their events, which are sent once a turn of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from msgspec.structs import replace

from weft.backends.vllm.stats import VllmStats
from weft.engine.wire import FromEngine, Started, StepOutput, frame
from weft.errors import EngineFault, WeftError
from weft.types import Event, FinishReason, Request


class OpenRequests:
    """The open requests. All of it belongs to the event loop's thread."""

    def __init__(self, writer: asyncio.StreamWriter, stats: VllmStats, max_running: int) -> None:
        self._writer = writer
        self._stats = stats
        self._max_running = max_running
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, None] = {}
        self._running: dict[str, None] = {}
        """vLLM does not say which requests are in its steps: they are taken to be the oldest, as many as it may run."""
        self._brought: dict[str, Event] = {}
        """The event of each request: a message has no order among its events."""
        self._is_sending = False
        self.last_news = 0.0
        """The time when vLLM last brought something (monotonic)."""
        self.death: asyncio.Future[BaseException] = self._loop.create_future()
        """Set once vLLM cannot go on."""

    @property
    def silence_seconds(self) -> float:
        """The seconds for which vLLM has brought nothing although requests are open."""
        return time.monotonic() - self.last_news if self._running else 0.0

    def send(self, message: FromEngine) -> None:
        self._writer.write(frame(message))

    def accept(self, requests: Iterable[Request]) -> None:
        self._waiting.update((request.request_id, None) for request in requests)
        self._admit()

    def bring(self, events: Iterable[Event]) -> None:
        """Send events with all the others of this turn of the loop. Events of closed requests are dropped."""
        for event in events:
            request_id = event.request_id
            if request_id in self._running or request_id in self._waiting:
                earlier = self._brought.get(request_id)
                self._brought[request_id] = event if earlier is None else _joined(earlier, event)
                if event.finish is not None:
                    self._close(request_id)
        self.last_news = time.monotonic()
        self._send_soon()

    def fail(self, request_id: str, error: WeftError) -> None:
        reason = FinishReason.ERROR if isinstance(error, EngineFault) else FinishReason.REJECTED
        self.bring([Event(request_id=request_id, finish=reason, error=error.message)])

    def close(self, request_ids: Iterable[str]) -> None:
        """Forget requests that were aborted."""
        for request_id in request_ids:
            self._close(request_id)
        self._send_soon()

    def died(self, error: BaseException) -> None:
        if not self.death.done():
            self.death.set_result(error)

    def _close(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._admit()

    def _admit(self) -> None:
        capacity = self._max_running - len(self._running)
        if capacity <= 0 or not self._waiting:
            return
        if not self._running:
            self.last_news = time.monotonic()
        admitted = list(self._waiting)[:capacity]
        for request_id in admitted:
            del self._waiting[request_id]
            self._running[request_id] = None
        self.send(Started(admitted))

    def _send_soon(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._loop.call_soon(self._send_brought)

    def _send_brought(self) -> None:
        self._is_sending = False
        brought, self._brought = self._brought, {}
        tokens = {event.request_id: event.token_ids[0] for event in brought.values() if event.is_plain}
        events = [event for event in brought.values() if not event.is_plain]
        self.send(StepOutput(tokens, events, self._stats.stats(len(self._running) + len(self._waiting))))


def _joined(earlier: Event, later: Event) -> Event:
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=None if later.logprobs is None else [*(earlier.logprobs or ()), *later.logprobs],
        cached_tokens=earlier.cached_tokens,
        queue_seconds=earlier.queue_seconds,
        prompt_logprobs=earlier.prompt_logprobs,
    )
