"""Who goes first, and who has to give way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from weft.scheduler.cursors import TokenCursor


def decodes_first(running: Iterable[TokenCursor]) -> list[TokenCursor]:
    """Running requests in the order of a step: those that decode, so that answers keep flowing, then the rest.
    Within each kind the oldest comes first."""
    return sorted(running, key=lambda cursor: not cursor.decoding)


def victim(running: Sequence[TokenCursor], planned: Collection[TokenCursor]) -> TokenCursor | None:
    """The newest running request that this step has not promised anything to, and that may be preempted."""
    for cursor in reversed(running):
        if cursor not in planned and not cursor.holds_all:
            return cursor
    return None
