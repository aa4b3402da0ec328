"""Parallel sampling: requests with one prompt are siblings, and the first of them is their leader. The others wait,
outside the waiting queue, until the leader's prefill is done, and then share its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weft.scheduler.block_pool import Block
from weft.scheduler.cursors import Cursor, RowCursor


class Siblings:
    """The requests that wait for their leaders."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[RowCursor, None]] = {}
        """They are grouped by their leader's id, in the order of arrival."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[RowCursor]:
        for waiting in self._waiting.values():
            yield from waiting

    def add(self, cursor: RowCursor) -> None:
        self._waiting.setdefault(cursor.request.sibling_of, {})[cursor] = None

    def remove(self, cursor: RowCursor) -> None:
        leader = cursor.request.sibling_of
        del self._waiting[leader][cursor]
        if not self._waiting[leader]:
            del self._waiting[leader]

    def take_ready(self, cursors: Mapping[str, Cursor]) -> list[RowCursor]:
        """Remove and return the requests that need not wait any longer; `cursors` are all open requests."""
        ready = [
            cursor
            for leader, waiting in self._waiting.items()
            for cursor in waiting
            if not waits_for(cursor, cursors.get(leader))
        ]
        for cursor in ready:
            self.remove(cursor)
        return ready


def waits_for(cursor: RowCursor, leader: Cursor | None) -> bool:
    """Return whether a sibling waits for its leader: one that will have computed the prompt sooner than the sibling
    itself. A leader that was preempted has lost its blocks."""
    if not isinstance(leader, RowCursor) or leader.preemptions or not cursor.takes_cached:
        return False
    return leader.settled < num_shared(cursor) * cursor.block_size


def num_shared(cursor: RowCursor) -> int:
    """Return how many blocks a sibling can share: full ones of the prompt. It computes its last known token itself, for
    the logits."""
    return min(cursor.num_prompt, len(cursor.tokens) - 1) // cursor.block_size


def shared_prompt(cursor: RowCursor, running: Iterable[RowCursor]) -> list[Block]:
    """Return the blocks of a prompt that a running sibling has computed: all that can be shared, or none."""
    if not cursor.request.sibling_of or not cursor.takes_cached:
        return []
    return next(filter(None, (shared_blocks(cursor, relative) for relative in running)), [])


def shared_blocks(cursor: RowCursor, relative: RowCursor) -> list[Block]:
    """Return the blocks that a running request of the same family shares with a sibling: all that it can, or none."""
    ours, theirs = cursor.request, relative.request
    if (
        cursor.family != relative.family
        or relative.settled < num_shared(cursor) * cursor.block_size
        or (ours.cache_salt, ours.adapter) != (theirs.cache_salt, theirs.adapter)
        or ours.prompt_digest != theirs.prompt_digest
    ):
        return []
    return relative.blocks[: num_shared(cursor)]
