"""The waiting queue orders requests by fair shares of tenants, then by priority, then by arrival.

A tenant's counter says how many tokens were computed for it, prompt and answer alike, and denoise steps by their cost.
The tenant with the smallest counter is next; its priorities order its own requests, and take nothing from others.
While two tenants always have requests waiting, and there are neither preemptions nor images, their counters differ by
at most what the running requests of one can still compute: max_num_seqs * max_model_len tokens. Images that are
denoised add what is left of them; among those the tenant with the smallest counter comes first in every step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator

from weft.scheduler.cursors import Cursor, ScarceResource

OrderedCursors = OrderedDict[Cursor, None]
"""Requests in order; adding at either end and removing from anywhere take constant time."""


class _Tenant:
    __slots__ = ("num_open", "num_queued", "served")

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0
        """Open requests that are in the waiting queue; others run, or wait for a sibling."""
        self.served = 0


class Tenants:
    """The tenants count how much was computed for each that has an open request. Only differences matter: a tenant is
    forgotten with its last request, and a new one gets no credit for the time it was away."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def opened(self, name: str) -> None:
        self._tenants.setdefault(name, _Tenant()).num_open += 1

    def closed(self, name: str) -> None:
        tenant = self._tenants[name]
        tenant.num_open -= 1
        if not tenant.num_open:
            del self._tenants[name]

    def queued(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.num_queued:
            self._lift(tenant)
        tenant.num_queued += 1

    def left_queue(self, name: str) -> None:
        self._tenants[name].num_queued -= 1

    def charge(self, name: str, num_tokens: int) -> None:
        if len(self._tenants) > 1:
            self._tenants[name].served += num_tokens

    def served(self, name: str) -> int:
        return self._tenants[name].served

    def books(self) -> dict[str, tuple[int, int]]:
        """Return each tenant's number of open requests, and of those that are queued."""
        return {name: (tenant.num_open, tenant.num_queued) for name, tenant in self._tenants.items()}

    def _lift(self, tenant: _Tenant) -> None:
        """Raise the counter of a tenant that had nothing queued to that of the others: it has no share saved up."""
        others = [other for other in self._tenants.values() if other is not tenant]
        active = [other.served for other in others if other.num_queued] or [other.served for other in others]
        tenant.served = max(tenant.served, min(active, default=0))


class _Level:
    """The requests of one tenant and one priority."""

    def __init__(self) -> None:
        self.returned: OrderedCursors = OrderedDict()
        """Requests that were preempted, or began before: they go first."""
        self.queues: dict[ScarceResource | None, OrderedCursors] = {}
        """The other requests by the scarce resource that they need."""

    def __iter__(self) -> Iterator[Cursor]:
        yield from self.returned
        for queue in self.queues.values():
            yield from queue


class _TenantQueue:
    """The waiting requests of one tenant."""

    def __init__(self) -> None:
        self.levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        """The keys of `levels`, in order."""

    def __iter__(self) -> Iterator[Cursor]:
        for priority in self._priorities:
            yield from self.levels[priority]

    def __contains__(self, cursor: Cursor) -> bool:
        level = self.levels.get(cursor.priority)
        return level is not None and (
            cursor in level.returned or cursor in level.queues.get(cursor.scarce_resource, ())
        )

    def level(self, priority: int) -> _Level:
        if priority not in self.levels:
            self.levels[priority] = _Level()
            insort(self._priorities, priority)
        return self.levels[priority]

    def remove(self, cursor: Cursor) -> None:
        level = self.levels[cursor.priority]
        if cursor in level.returned:
            del level.returned[cursor]
        else:
            queue = level.queues[cursor.scarce_resource]
            del queue[cursor]
            if not queue:
                del level.queues[cursor.scarce_resource]
        if not level.returned and not level.queues:
            del self.levels[cursor.priority]
            del self._priorities[bisect_left(self._priorities, cursor.priority)]

    def next(self, can_begin: Callable[[Cursor], bool]) -> tuple[bool, Cursor] | None:
        """Return the tenant's first request that can begin, and whether it begins for the first time."""
        for priority in self._priorities:
            level = self.levels[priority]
            for cursor in level.returned:
                if can_begin(cursor):
                    return False, cursor
            first: Cursor | None = None
            for queue in level.queues.values():
                head = next(iter(queue))
                if (first is None or head.arrival < first.arrival) and can_begin(head):
                    first = head
            if first is not None:
                return True, first
        return None


class WaitingQueue:
    """The queue of the requests that could be admitted. Iteration goes tenant by tenant; within one, by priority."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.num_tokens = 0
        """Prompt tokens of all waiting requests."""
        self._queues: dict[str, _TenantQueue] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Cursor]:
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, cursor: Cursor) -> bool:
        return cursor in self._queues.get(cursor.tenant, ())

    def add(self, cursor: Cursor, *, ahead: bool = False) -> None:
        """Add a request at the end of its tenant's queue of its priority, or at the head of it."""
        level = self._level(cursor)
        self._put(cursor, level.queues.setdefault(cursor.scarce_resource, OrderedDict()), ahead)

    def put_back(self, cursor: Cursor) -> None:
        """Add a request that was admitted before: its tenant's turn for it has come already. Only better priorities of
        its own tenant go before it."""
        self._put(cursor, self._level(cursor).returned, ahead=True)

    def remove(self, cursor: Cursor) -> None:
        queue = self._queues[cursor.tenant]
        queue.remove(cursor)
        if not queue.levels:
            del self._queues[cursor.tenant]
        self.tenants.left_queue(cursor.tenant)
        self.num_tokens -= cursor.num_prompt
        self._length -= 1

    def next(self, can_begin: Callable[[Cursor], bool] = lambda _: True) -> Cursor | None:
        """Return the request whose turn it is, of those that can begin."""
        first: tuple[bool, int, int, Cursor] | None = None
        for tenant, queue in self._queues.items():
            if (head := queue.next(can_begin)) is not None:
                is_fresh, cursor = head
                turn = (is_fresh, self.tenants.served(tenant), cursor.arrival, cursor)
                if first is None or turn < first:
                    first = turn
        return None if first is None else first[-1]

    def _level(self, cursor: Cursor) -> _Level:
        return self._queues.setdefault(cursor.tenant, _TenantQueue()).level(cursor.priority)

    def _put(self, cursor: Cursor, queue: OrderedCursors, ahead: bool) -> None:
        self.tenants.queued(cursor.tenant)
        queue[cursor] = None
        if ahead:
            queue.move_to_end(cursor, last=False)
        self.num_tokens += cursor.num_prompt
        self._length += 1
