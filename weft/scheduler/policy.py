"""Policies: the order of a step, its budgets, preemption victims, and the throttle after steps without memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from weft.plan import ImageLimits, Limits, StepPlan
from weft.scheduler.cursors import RowCursor

MIN_PREFILL_BUDGET = 128
LEAST_MIXED_TOKENS = 256
"""Tokens of a step with prefills and decodes whose time is bounded. Larger steps have this number times a power of two,
as the tiles of matrix products and attention do on a GPU: with a few tokens more it would compute one more round."""


def decodes_and_prefills(running: Iterable[RowCursor]) -> tuple[list[RowCursor], list[RowCursor]]:
    """Return the running requests that decode, and those that prefill. Within each kind the oldest comes first."""
    decodes: list[RowCursor] = []
    prefills: list[RowCursor] = []
    for cursor in running:
        (decodes if cursor.decoding else prefills).append(cursor)
    return decodes, prefills


def prefill_budget(limits: Limits, decodes: int, waiting_tokens: int, step_tokens: int) -> int:
    """Return how many prefill tokens a step that also decodes may have. They are few, and the fewer the fewer decodes
    there are (their step is short, and prefills would make it much longer); while prompts of more tokens wait than a
    step and a half could compute, they fill the step up to `step_tokens`."""
    if waiting_tokens > limits.max_num_batched_tokens * 3 // 2:
        return max(limits.max_mixed_prefill, min(limits.max_prefill_chunk, step_tokens) - decodes)
    return min(limits.max_mixed_prefill, max(MIN_PREFILL_BUDGET, 4 * decodes))


def denoise_credit(limits: ImageLimits, left: int, *, decodes: int, prompts_wait: bool) -> int:
    """Return the denoise credit, in tokens, of a step in which decodes left this much budget: half of it if prompts
    wait for the other half, and no more than the limit if there are decodes, whose step it would make longer."""
    share = left // 2 if prompts_wait else left
    return max(1, min(share, limits.max_mixed_denoise) if decodes else share)


def victim(running: Sequence[RowCursor], planned: Collection[RowCursor]) -> RowCursor | None:
    """Return the newest running request that is not planned in this step and may be preempted."""
    for cursor in reversed(running):
        if cursor not in planned and not cursor.holds_all:
            return cursor
    return None


LEAST_TOKENS = 16


class StepPace:
    """The pace sizes the prefills of a step by the time that steps take, so that none lasts longer than a goal: running
    requests then wait no longer for a token, nor does a new one for its turn."""

    def __init__(self, most: int, goal: float, least: int = LEAST_TOKENS, *, in_powers: bool = False) -> None:
        """Find the `least` to `most` tokens that a step can compute in `goal` seconds, in whole multiples of the least;
        `in_powers`: in powers of two of them. Without a goal they are the most."""
        self._most = most
        self._goal = goal
        self._least = least
        self._in_powers = in_powers
        self._seconds_per_token = 0.0
        self.tokens = most
        """Tokens of a step."""

    def took(self, num_tokens: int, seconds: float) -> None:
        """Take in a step of so many tokens. Short ones tell nothing: most of their time is the reading of weights."""
        if not self._goal or num_tokens < self._least:
            return
        cost = seconds / num_tokens
        # A rise is followed at once, as attention over a long prompt grows from chunk to chunk; a fall by halves.
        self._seconds_per_token = max(cost, (self._seconds_per_token + cost) / 2)
        tokens = int(min(self._most, self._goal / max(self._seconds_per_token, self._goal / self._most)))
        lots = max(1, tokens // self._least)
        self.tokens = self._least * (1 << lots.bit_length() - 1 if self._in_powers else lots)


PATIENCE = 64
"""Good steps between growths. Every failure doubles the number, so that a size that keeps failing is tried less and
less; as many good steps at the full size reset it."""


class Throttle:
    """The throttle shrinks steps after one for which there was no memory, and grows them back slowly."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._set(limits.max_num_batched_tokens, limits.max_num_seqs)
        self._patience = PATIENCE
        self._good_steps = 0

    @property
    def is_least(self) -> bool:
        """True when no smaller step is left to try."""
        return self.rows == 1 and self.tokens <= LEAST_TOKENS

    def failed(self, plan: StepPlan) -> None:
        """Halve the tokens and requests of the next steps: there was no memory for this one."""
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
