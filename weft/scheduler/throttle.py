"""How large a step may be. A step for which there was no memory halves it; steps that go well let it grow back."""

from __future__ import annotations

from weft.plan import Limits, StepPlan

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
