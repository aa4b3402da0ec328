"""Who goes first, and who has to give way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from weft.plan import Limits
from weft.scheduler.cursors import Cursor

LEAST_PROMPT_ROOM = 128


def decodes_first(running: Iterable[Cursor]) -> tuple[list[Cursor], list[Cursor]]:
    """Running requests in the order of a step: those that decode, so that answers keep flowing, then the rest.
    Within each kind the oldest comes first."""
    decodes: list[Cursor] = []
    others: list[Cursor] = []
    for cursor in running:
        (decodes if cursor.decoding else others).append(cursor)
    return decodes, others


def prompt_room(limits: Limits, decodes: int, waiting_tokens: int) -> int:
    """Prompt tokens for a step that also decodes. Few, and the fewer the fewer decodes there are (their step is short,
    and prompts would make it much longer); as many as fit while more is waiting than a step and a half could hold."""
    if waiting_tokens > limits.max_num_batched_tokens * 3 // 2:
        return max(limits.max_mixed_prefill, limits.max_prefill_chunk - decodes)
    return min(limits.max_mixed_prefill, max(LEAST_PROMPT_ROOM, 4 * decodes))


def victim(running: Sequence[Cursor], planned: Collection[Cursor]) -> Cursor | None:
    """The newest running request that this step has not promised anything to, and that may be preempted."""
    for cursor in reversed(running):
        if cursor not in planned and not cursor.holds_all:
            return cursor
    return None
