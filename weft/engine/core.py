"""The engine's loop: drain what came, schedule, launch, apply, emit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from weft.errors import InvalidRequest
from weft.plan import StepPlan
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.types import EngineStats, Event, FinishReason, Request
from weft.worker.runner import Pending, Runner


class EngineCore:
    """A scheduler and a runner. With `overlap` a step is launched before the last one is read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._depth = 1 if overlap else 0
        self._under_way: deque[Pending] = deque()

    def submit(self, requests: Iterable[Request]) -> list[Event]:
        """Queue requests; the events are of those that were refused."""
        refused = []
        for request in requests:
            try:
                self.scheduler.add(request)
            except InvalidRequest as error:
                refused.append(Event(request_id=request.request_id, finish=FinishReason.REJECTED, error=error.message))
        return refused

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._under_way)

    def step(self, on_start: Callable[[list[str]], None] = lambda request_ids: None) -> list[Event]:
        """Advance every request that can be advanced. `on_start` hears of requests that are admitted, before the
        step is computed."""
        plan = self.scheduler.schedule()
        if plan is not None:
            if plan.admit:
                on_start(self._admitted(plan))
            self._under_way.append(self.runner.execute(plan))
        if self._under_way and (plan is None or len(self._under_way) > self._depth):
            pending = self._under_way.popleft()
            return self.scheduler.apply(pending.plan, pending.result())
        return []

    def settle(self) -> None:
        """Called when there is nothing to do: the books must add up."""
        check_integrity(self.scheduler)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def _admitted(self, plan: StepPlan) -> list[str]:
        rows = {admission.row for admission in plan.admit}
        return [cursor.id for cursor in self.scheduler.running if cursor.row in rows]
