"""The resources that requests wait for before they are scheduled: a grammar that is being built, an adapter that is
being read. Other requests go on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from weft.errors import InvalidRequest, ModelError
from weft.types import Request
from weft.worker.runner import Runner

log = logging.getLogger(__name__)


class PendingRequest(NamedTuple):
    request: Request
    grammar: Future[Any] | None
    adapter: Future[Any] | None

    @property
    def needs(self) -> list[Future[Any]]:
        return [need for need in (self.grammar, self.adapter) if need is not None]


class PendingResources:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiting: dict[str, PendingRequest] = {}
        """The waiting requests by id, in the order of arrival."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> bool:
        """Begin to make what a request needs; False: it needs nothing. Raises InvalidRequest where it cannot be had."""
        grammar = self._runner.constraints.build(request.params.grammar) if request.params.grammar else None
        adapter = self._runner.adapters.read(request.adapter) if request.adapter is not None else None
        waiting = PendingRequest(request, grammar, adapter)
        if waiting.needs:
            self._waiting[request.request_id] = waiting
        return bool(waiting.needs)

    def remove(self, request_id: str) -> bool:
        return self._waiting.pop(request_id, None) is not None

    def wait(self, seconds: float) -> None:
        """Wait until something is ready, but not for longer than this."""
        wait([need for waiting in self._waiting.values() for need in waiting.needs], seconds, FIRST_COMPLETED)

    def take(self, adapters_in_use: Callable[[], set[int]]) -> Iterator[tuple[Request, str]]:
        """Take out the requests that have what they need, and those that cannot have it, with the reason. One that
        finds no place for its adapter waits until some adapter is not in use, and others with adapters behind it."""
        is_full = False
        for waiting in list(self._waiting.values()):
            request = waiting.request
            if not all(need.done() for need in waiting.needs) or (is_full and request.adapter is not None):
                continue
            error = _failure(waiting.needs)
            if not error and request.adapter is not None and waiting.adapter is not None:
                weights = waiting.adapter.result()
                try:
                    is_full = not self._runner.adapters.place(request.adapter, weights, adapters_in_use())
                except ModelError as refused:
                    error = refused.message
            if error or not is_full or request.adapter is None:
                del self._waiting[request.request_id]
                yield request, error


def _failure(needs: Sequence[Future[Any]]) -> str:
    """Return why one of these cannot be had; empty: all can. Threads made them, so no error harms the engine."""
    for need in needs:
        error = need.exception()
        if isinstance(error, InvalidRequest | ModelError):
            return error.message
        if error is not None:
            log.error("What a request needs could not be made.", exc_info=error)
            return f"What it needs could not be made: {type(error).__name__}: {error}"
    return ""
