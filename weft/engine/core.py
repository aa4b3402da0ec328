"""The engine core: it schedules a step, launches it, applies its result, and returns what that brought to requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from msgspec.structs import replace

from weft.engine.pending_resources import PendingResources
from weft.engine.wire import Vocabulary
from weft.engine_stats import EngineStats
from weft.errors import InvalidRequest
from weft.machine.hardware import MemoryGauge
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.types import Event, FinishReason, Request, StepEvents
from weft.worker.runner import Deferred, Pending, Runner

log = logging.getLogger(__name__)

T = TypeVar("T")
PENDING_WAIT_SECONDS = 0.01
"""How long an engine with nothing else to do waits for a grammar, or an adapter, before it reads its messages."""
UNKNOWN_MEMORY = MemoryGauge(lambda: (0, 0))


class EngineCore:
    """The core steps a scheduler and a runner. With `overlap` a step is launched before the last one is read."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, overlap: bool = False, memory: MemoryGauge = UNKNOWN_MEMORY
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._depth = 1 if overlap else 0
        self._under_way: deque[Pending | Deferred] = deque()
        self._pending = PendingResources(runner)
        self._memory = memory
        self.prepared = False
        """True when nothing is left that would make later steps faster."""

    def submit(self, requests: Iterable[Request]) -> list[Event]:
        """Queue requests, and return the events of those that were refused."""
        refused = []
        for request in requests:
            try:
                if not self._pending.add(request):
                    self.scheduler.add(request)
            except InvalidRequest as error:
                refused.append(_refusal(request, error.message))
        return refused

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take in the vocabulary, which grammars need: it comes before the first request that has one."""
        width = self.scheduler.limits.logits_width
        self.runner.constraints.learn(vocabulary.tokens, vocabulary.special_ids, vocabulary.eos_token_ids, width)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if not self._pending.remove(request_id):
                self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, and forget the prompt embeds that no image uses; return how many blocks it knew."""
        known = len(self.scheduler.pool.by_key)
        self.scheduler.pool.forget_all()
        self.scheduler.images.memory.embeds.forget_unused()
        return known

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._under_way) or bool(self._pending)

    def step(self, on_start: Callable[[list[str]], None] = lambda request_ids: None) -> StepEvents:
        """Advance every request that can be advanced. `on_start` is told the ids of admitted requests before the step
        is computed. A step for which there is no memory is taken back, and its work done in smaller ones."""
        brought = StepEvents()
        if self._pending:
            self._take_pending(brought)
        plan = self.scheduler.schedule()
        if plan is not None:
            if plan.admit or plan.admit_images:
                admitted = [admission.request_id for admission in plan.admit]
                on_start(admitted + [admission.request_id for admission in plan.admit_images])
            was_idle = all(step.has_ended for step in self._under_way)
            launched = _within_memory(partial(self.runner.execute, plan))
            if launched is None:
                if self._under_way:
                    self._read_oldest(brought)
                brought.events += self.scheduler.take_back(plan)
                return brought
            self.scheduler.launched(plan, was_idle=was_idle)
            self._under_way.append(launched)
            if isinstance(launched, Deferred):
                self._complete(launched, brought)
        if self._under_way and (plan is None or len(self._under_way) > self._depth):
            self._read_oldest(brought)
        return brought

    def prepare(self) -> bool:
        """Do a piece of work that makes later steps faster, and return False when there is none left, or no memory."""
        self.prepared = not _within_memory(self.runner.prepare)
        return not self.prepared

    def settle(self) -> None:
        """Check that the scheduler's books add up. It is called when there is nothing to do."""
        check_integrity(self.scheduler)

    def stats(self) -> EngineStats:
        allocated, reserved = self._memory.now()
        return replace(
            self.scheduler.stats(), prepared=self.prepared, memory_allocated=allocated, memory_reserved=reserved
        )

    def _take_pending(self, brought: StepEvents) -> None:
        """Queue the requests whose resources are there, and refuse those that cannot have theirs."""
        if not self.scheduler.has_work and not self._under_way:
            self._pending.wait(PENDING_WAIT_SECONDS)
        for request, error in self._pending.take(lambda: self.scheduler.adapters):
            if error:
                brought.events.append(_refusal(request, error))
                continue
            try:
                self.scheduler.add(request)
            except InvalidRequest as reason:
                brought.events.append(_refusal(request, reason.message))

    def _complete(self, deferred: Deferred, brought: StepEvents) -> None:
        """Read the steps before the newest one, and launch its sampling while its logits are computed."""
        while len(self._under_way) > 1:
            self._read_oldest(brought)
        # A step that was taken back took this one with it.
        if self._under_way:
            self._under_way.clear()
            launched = _within_memory(deferred.sample)
            if launched is None:
                brought.events += self.scheduler.take_back(deferred.plan)
            else:
                self._under_way.append(launched)

    def _read_oldest(self, brought: StepEvents) -> None:
        """Read the result of the oldest step under way. Of every step that is launched, one is read."""
        launched = self._under_way.popleft()
        result = _within_memory(launched.result)
        if result is not None:
            read = self.scheduler.apply(launched.plan, result)
            # A request has one token in a message.
            brought.tokens = read.tokens
            brought.events += read.events
            return
        later = [other.plan for other in self._under_way]
        self._under_way.clear()
        brought.events += self.scheduler.take_back(launched.plan, *later)


def _refusal(request: Request, error: str) -> Event:
    return Event(request_id=request.request_id, finish=FinishReason.REJECTED, error=error)


def _within_memory(work: Callable[[], T]) -> T | None:
    """Return what the work gives, or None when the device has no memory for it. Other faults end the process: after
    them nothing that the device holds can be trusted."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        log.warning("No memory: %s", str(error))
    # Not in the handler: there the error still holds what the step had allocated.
    torch.cuda.empty_cache()
    return None
