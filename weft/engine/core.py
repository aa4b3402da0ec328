"""The engine's loop: drain what came, schedule, launch, apply, emit."""

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
from weft.errors import InvalidRequest
from weft.plan import StepPlan
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.types import EngineStats, Event, FinishReason, Request
from weft.worker.runner import Deferred, Pending, Runner

log = logging.getLogger(__name__)

T = TypeVar("T")
PREPARE_WAIT_SECONDS = 0.01
"""How long an engine with nothing else to do waits for a grammar, or an adapter, before it looks at its messages."""


class EngineCore:
    """A scheduler and a runner. With `overlap` a step is launched before the last one is read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._depth = 1 if overlap else 0
        self._under_way: deque[Pending | Deferred] = deque()
        self._preparing = PendingResources(runner)
        self.prepared = False
        """Nothing is left that would make later steps faster."""

    def submit(self, requests: Iterable[Request]) -> list[Event]:
        """Queue requests; the events are of those that were refused."""
        refused = []
        for request in requests:
            try:
                if not self._preparing.add(request):
                    self.scheduler.add(request)
            except InvalidRequest as error:
                refused.append(_refusal(request, error.message))
        return refused

    def learn(self, vocabulary: Vocabulary) -> None:
        """Needed before the first request with a grammar."""
        width = self.scheduler.limits.logits_width
        self.runner.constraints.learn(vocabulary.tokens, vocabulary.special_ids, vocabulary.eos_token_ids, width)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if not self._preparing.remove(request_id):
                self.scheduler.abort(request_id)

    def forget_prompts(self) -> int:
        """Empty the prefix cache, and forget the texts that no image is drawn from; returns how many blocks it knew."""
        known = len(self.scheduler.pool.by_key)
        self.scheduler.pool.forget_all()
        self.scheduler.images.memory.embeds.forget_unused()
        return known

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._under_way) or bool(self._preparing)

    def step(self, on_start: Callable[[list[str]], None] = lambda request_ids: None) -> list[Event]:
        """Advance every request that can be advanced. `on_start` hears of requests that are admitted, before the
        step is computed. A step for which there is no memory is taken back, and its work done in smaller ones."""
        events = self._take_prepared() if self._preparing else []
        plan = self.scheduler.schedule()
        if plan is not None:
            if plan.admit or plan.admit_images:
                on_start(self._admitted(plan))
            launched = _within_memory(partial(self.runner.execute, plan))
            if launched is None:
                events += self._read_oldest() if self._under_way else []
                return events + self.scheduler.take_back(plan)
            self._under_way.append(launched)
            if isinstance(launched, Deferred):
                events += self._complete(launched)
        if self._under_way and (plan is None or len(self._under_way) > self._depth):
            events += self._read_oldest()
        return events

    def prepare(self) -> bool:
        """Do a piece of work that makes later steps faster; False when there is none left, or no memory for it."""
        self.prepared = not _within_memory(self.runner.prepare)
        return not self.prepared

    def settle(self) -> None:
        """Called when there is nothing to do: the books must add up."""
        check_integrity(self.scheduler)

    def stats(self) -> EngineStats:
        return replace(self.scheduler.stats(), prepared=self.prepared)

    def _take_prepared(self) -> list[Event]:
        """Queue the requests that have what they need; the events are of those that were refused."""
        if not self.scheduler.has_work and not self._under_way:
            self._preparing.wait(PREPARE_WAIT_SECONDS)
        refused = []
        for request, error in self._preparing.take(lambda: self.scheduler.adapters):
            if error:
                refused.append(_refusal(request, error))
                continue
            try:
                self.scheduler.add(request)
            except InvalidRequest as reason:
                refused.append(_refusal(request, reason.message))
        return refused

    def _complete(self, deferred: Deferred) -> list[Event]:
        """Read the steps before the newest one, and launch its sampling while its logits are computed."""
        events = []
        while len(self._under_way) > 1:
            events += self._read_oldest()
        # A step that was taken back took this one with it.
        if self._under_way:
            self._under_way.clear()
            launched = _within_memory(deferred.sample)
            if launched is None:
                return events + self.scheduler.take_back(deferred.plan)
            self._under_way.append(launched)
        return events

    def _read_oldest(self) -> list[Event]:
        pending = self._under_way.popleft()
        result = _within_memory(pending.result)
        if result is not None:
            return self.scheduler.apply(pending.plan, result)
        later = [other.plan for other in self._under_way]
        self._under_way.clear()
        return self.scheduler.take_back(pending.plan, *later)

    def _admitted(self, plan: StepPlan) -> list[str]:
        rows = {admission.row for admission in plan.admit}
        slots = {admission.slot for admission in plan.admit_images}
        drawing = [cursor.id for cursor in self.scheduler.images.denoising if cursor.latent_slot in slots]
        return [cursor.id for cursor in self.scheduler.running if cursor.row in rows] + drawing


def _refusal(request: Request, error: str) -> Event:
    return Event(request_id=request.request_id, finish=FinishReason.REJECTED, error=error)


def _within_memory(work: Callable[[], T]) -> T | None:
    """What the work gives, or None when the device has no memory for it. Other faults are for the process to die of:
    after them nothing that the device holds can be trusted."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        log.warning("No memory: %s", str(error))
    # Not in the handler: there the error still holds what the step had allocated.
    torch.cuda.empty_cache()
    return None
