"""Room in the queue: beyond its limits nobody comes in, but a tenant that has less than its equal share of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.config import SchedulerOptions
from weft.errors import Overloaded
from weft.types import Request

MOST = 2
"""So many times its limit the queue is full for everybody."""


def check_room(waiting: Iterable[Request], request: Request, limits: SchedulerOptions) -> None:
    """Raise Overloaded where the queue has no place for a request."""
    waiting = list(waiting)
    if not _fits(waiting, request, limits.max_queued_requests, lambda _: 1):
        raise Overloaded(
            f"{len(waiting)} requests are waiting already.", hint="Try again later (--max-queued-requests)."
        )
    if not _fits(waiting, request, limits.max_queued_tokens, _num_tokens):
        queued = sum(map(_num_tokens, waiting))
        raise Overloaded(
            f"Prompts of {queued} tokens are waiting already.", hint="Try again later (--max-queued-tokens)."
        )


def check_tensor_room(others: Iterable[Request], request: Request, limits: SchedulerOptions) -> None:
    """Raise Overloaded where the tensors of clients that are kept for open requests, in case that an engine dies, would
    be too many. One that is too large by itself is for the engine to refuse."""
    held = sum(other.given.num_bytes for other in others)
    if held and held + request.given.num_bytes > limits.max_embedding_mb << 20:
        raise Overloaded(
            f"Images with tensors of {held} bytes are open already.", hint="Try again later (--max-embedding-mb)."
        )


def _fits(waiting: list[Request], request: Request, limit: int, size: Callable[[Request], int]) -> bool:
    total = sum(map(size, waiting)) + size(request)
    if total <= limit or size(request) == 0:
        return True
    if total > MOST * limit:
        return False
    own = sum(size(other) for other in waiting if other.tenant == request.tenant) + size(request)
    return own * len({request.tenant, *(other.tenant for other in waiting)}) <= limit


def _num_tokens(request: Request) -> int:
    """A sibling's prompt is its leader's, and counted there."""
    return 0 if request.sibling_of else request.num_prompt_tokens
