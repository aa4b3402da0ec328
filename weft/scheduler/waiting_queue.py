"""Who waits, and who of them is next: by priority, then by fair shares, then by arrival.

A tenant's counter says how many tokens were computed for it, prompt and answer alike, and denoise steps by what they
cost. Of equal priority, the tenant with the smallest counter is next. While two tenants always have somebody waiting,
nobody is preempted and nothing is drawn, their counters differ by at most what the running requests of one can still
compute: max_num_seqs * max_model_len tokens. Images under way add what is left of them; among those the tenant with
the smallest counter comes first in every step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator

from weft.scheduler.cursors import Cursor, Need

Line = OrderedDict[Cursor, None]
"""Requests in order: both of its ends, and any of its middle, in constant time."""


class _Tenant:
    __slots__ = ("num_open", "num_queued", "served")

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0
        """Open requests that stand in the queue; others run, or wait for a sibling."""
        self.served = 0


class Tenants:
    """How much was computed for each tenant that has an open request. Only differences mean anything: a tenant is
    forgotten with its last request, and one that comes gets no credit for the time it was away."""

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
        """Of each tenant: its open requests, and those of them that are queued."""
        return {name: (tenant.num_open, tenant.num_queued) for name, tenant in self._tenants.items()}

    def _lift(self, tenant: _Tenant) -> None:
        """A tenant for which nobody waited asked for nothing more, so it has nothing saved up."""
        others = [other for other in self._tenants.values() if other is not tenant]
        active = [other.served for other in others if other.num_queued] or [other.served for other in others]
        tenant.served = max(tenant.served, min(active, default=0))


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.returned: Line = OrderedDict()
        """Were preempted, and go first."""
        self.lines: dict[tuple[str, Need | None], Line] = {}
        """By tenant, and by what a request needs that may be scarce."""

    def __iter__(self) -> Iterator[Cursor]:
        yield from self.returned
        for line in self.lines.values():
            yield from line


class WaitingQueue:
    """Requests that could be admitted. It can be walked through by priority; within one, tenants come one by one."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.num_tokens = 0
        """Of all the prompts that wait."""
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        """Those of `_levels`, in order."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Cursor]:
        for priority in self._priorities:
            yield from self._levels[priority]

    def __contains__(self, cursor: Cursor) -> bool:
        level = self._levels.get(cursor.priority)
        return level is not None and (cursor in level.returned or cursor in level.lines.get(_line_of(cursor), ()))

    def add(self, cursor: Cursor, *, ahead: bool = False) -> None:
        """At the end of its tenant's line, or `ahead` of it."""
        self.tenants.queued(cursor.tenant)
        line = self._level(cursor.priority).lines.setdefault(_line_of(cursor), OrderedDict())
        self._put(cursor, line, ahead)

    def put_back(self, cursor: Cursor) -> None:
        """A request that was preempted, before all others of its priority."""
        self.tenants.queued(cursor.tenant)
        self._put(cursor, self._level(cursor.priority).returned, ahead=True)

    def remove(self, cursor: Cursor) -> None:
        level = self._levels[cursor.priority]
        if cursor in level.returned:
            del level.returned[cursor]
        else:
            line = level.lines[_line_of(cursor)]
            del line[cursor]
            if not line:
                del level.lines[_line_of(cursor)]
        if not level.returned and not level.lines:
            del self._levels[cursor.priority]
            del self._priorities[bisect_left(self._priorities, cursor.priority)]
        self.tenants.left_queue(cursor.tenant)
        self.num_tokens -= cursor.num_prompt
        self._length -= 1

    def next(self, can_begin: Callable[[Cursor], bool] = lambda _: True) -> Cursor | None:
        """Whose turn it is, of those for whom there is what they need."""
        for priority in self._priorities:
            level = self._levels[priority]
            for cursor in level.returned:
                if can_begin(cursor):
                    return cursor
            heads = [head for line in level.lines.values() if can_begin(head := next(iter(line)))]
            if heads:
                return min(heads, key=lambda head: (self.tenants.served(head.tenant), head.arrival))
        return None

    def _level(self, priority: int) -> _Level:
        if priority not in self._levels:
            self._levels[priority] = _Level()
            insort(self._priorities, priority)
        return self._levels[priority]

    def _put(self, cursor: Cursor, line: Line, ahead: bool) -> None:
        line[cursor] = None
        if ahead:
            line.move_to_end(cursor, last=False)
        self.num_tokens += cursor.num_prompt
        self._length += 1


def _line_of(cursor: Cursor) -> tuple[str, Need | None]:
    request = cursor.request
    if request.image is not None:
        return cursor.tenant, Need.GIVEN if request.given.num_bytes else Need.CANVAS
    return cursor.tenant, None if request.params.prompt_logprobs is None else Need.SCORING
