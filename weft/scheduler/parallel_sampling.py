"""Siblings: requests with one prompt, of which one is the leader. The others wait until its prompt is computed, and
then share its blocks. They stand beside the queue meanwhile, in nobody's way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weft.scheduler.block_pool import Block
from weft.scheduler.cursors import Cursor, RowCursor


class Siblings:
    """Those that wait for their leaders."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[RowCursor, None]] = {}
        """By their leader's id, in the order of arrival."""

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
        """Take out those that need not wait any longer; `cursors` are all open requests."""
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
    """Whether there is something to wait for: a leader that will have computed the prompt sooner than the sibling
    itself. One that was preempted has lost what it had."""
    if not isinstance(leader, RowCursor) or leader.preemptions or not cursor.takes_cached:
        return False
    return leader.settled < num_shared(cursor) * cursor.block_size


def num_shared(cursor: RowCursor) -> int:
    """How many blocks a sibling can share: full ones of the prompt. The last token that is known it computes itself,
    for its logits."""
    return min(cursor.num_prompt, len(cursor.tokens) - 1) // cursor.block_size


def shared_prompt(cursor: RowCursor, running: Iterable[RowCursor]) -> list[Block]:
    """The blocks of a prompt that a running sibling has computed, all that can be shared or none."""
    if not cursor.request.sibling_of or not cursor.takes_cached:
        return []
    return next(filter(None, (shared_blocks(cursor, relative) for relative in running)), [])


def shared_blocks(cursor: RowCursor, relative: RowCursor) -> list[Block]:
    """The blocks that a running request of the same family has for a sibling: all it can share, or none."""
    ours, theirs = cursor.request, relative.request
    if (
        cursor.family != relative.family
        or relative.settled < num_shared(cursor) * cursor.block_size
        or (ours.cache_salt, ours.adapter) != (theirs.cache_salt, theirs.adapter)
        or ours.prompt_token_ids != theirs.prompt_token_ids
    ):
        return []
    return relative.blocks[: num_shared(cursor)]
