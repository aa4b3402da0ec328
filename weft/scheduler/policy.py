"""Who goes first, and who has to give way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from weft.plan import ImageLimits, Limits, StepPlan
from weft.scheduler.cursors import RowCursor

LEAST_PROMPT_ROOM = 128


def decodes_first(running: Iterable[RowCursor]) -> tuple[list[RowCursor], list[RowCursor]]:
    """Running requests in the order of a step: those that decode, so that answers keep flowing, then the rest.
    Within each kind the oldest comes first."""
    decodes: list[RowCursor] = []
    others: list[RowCursor] = []
    for cursor in running:
        (decodes if cursor.decoding else others).append(cursor)
    return decodes, others


def prompt_room(limits: Limits, decodes: int, waiting_tokens: int) -> int:
    """Prompt tokens for a step that also decodes. Few, and the fewer the fewer decodes there are (their step is short,
    and prompts would make it much longer); as many as fit while more is waiting than a step and a half could hold."""
    if waiting_tokens > limits.max_num_batched_tokens * 3 // 2:
        return max(limits.max_mixed_prefill, limits.max_prefill_chunk - decodes)
    return min(limits.max_mixed_prefill, max(LEAST_PROMPT_ROOM, 4 * decodes))


def denoise_credit(limits: ImageLimits, room: int, *, decodes: int, prompts_wait: bool) -> int:
    """Tokens of denoise steps for a step in which decodes left so much room: half of it if prompts want the other
    half, and no more than the limit if there are decodes, whose step it would make longer."""
    share = room // 2 if prompts_wait else room
    return max(1, min(share, limits.max_mixed_denoise) if decodes else share)


def victim(running: Sequence[RowCursor], planned: Collection[RowCursor]) -> RowCursor | None:
    """The newest running request that this step has not promised anything to, and that may be preempted."""
    for cursor in reversed(running):
        if cursor not in planned and not cursor.holds_all:
            return cursor
    return None


LEAST_TOKENS = 16
PATIENCE = 64
"""Good steps between growths. Every failure doubles it, so that what fails again and again is tried less and less;
as many good steps at the full size bring it back."""


class Throttle:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._set(limits.max_num_batched_tokens, limits.max_num_seqs)
        self._patience = PATIENCE
        self._good_steps = 0

    @property
    def is_least(self) -> bool:
        """Whether no smaller step is left to try."""
        return self.rows == 1 and self.tokens <= LEAST_TOKENS

    def failed(self, plan: StepPlan) -> None:
        """There was no memory for a step: the next ones have at most half its tokens and half its requests."""
        self._set(min(self.tokens, plan.num_tokens) // 2, min(self.rows, plan.num_requests) // 2)
        self._patience *= 2
        self._good_steps = 0

    def went_well(self) -> None:
        self._good_steps += 1
        if self._good_steps < self._patience:
            return
        self._good_steps = 0
        if self._is_whole:
            self._patience = PATIENCE
        self._set(self.tokens * 2, self.rows * 2)

    @property
    def _is_whole(self) -> bool:
        return (self.tokens, self.rows) == (self._limits.max_num_batched_tokens, self._limits.max_num_seqs)

    def _set(self, tokens: int, rows: int) -> None:
        limits = self._limits
        self.rows = min(limits.max_num_seqs, max(1, rows))
        """Requests that may run."""
        self.tokens = min(limits.max_num_batched_tokens, max(LEAST_TOKENS, self.rows, tokens))
        """Tokens of a step: at least one for each request that runs."""
