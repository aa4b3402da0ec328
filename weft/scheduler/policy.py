"""Policies: the order of a step, its budgets, preemption victims, and the throttle after steps without memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from weft.plan import ImageLimits, Limits, StepPlan
from weft.scheduler.cursors import RowCursor

MIN_PREFILL_BUDGET = 128
LEAST_MIXED_TOKENS = 256
"""Tokens of a step with prefills and decodes whose time is bounded. Larger steps have this number times a power of two,
or half as many more, as the tiles of matrix products and attention do on a GPU: with a few tokens more it would compute
one more round."""


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


MOST_DECODES = 1 / 4
"""A step of which more tokens are decodes does not tell what a prompt's token costs: each decode reads a context of its
own, and the time is theirs."""
LEAST_TOKENS = 16
FIRST_TOKENS = 32
"""Tokens of the first step whose time is bounded, when it is not known how long one takes."""
FIRST_GROWTH = 1 / 1024
FITTED_SPREAD = 256
"""Contexts must lie so far apart, as a standard deviation, before costs tell how they grow with it; until then a token
is taken to cost twice as much behind 1,024 others as behind none."""
MEMORY = 0.98
"""The weight of what was known, with each new step: some 50 steps are remembered."""
MOST_RISE = 1.5
"""After one step on a GPU a token costs at most so much more, as a multiple of before."""
MOSTLY = 0.9
"""A step of which launching took so large a share took no longer than that."""
CHEAPER = 15 / 16
"""After such a step a token is taken to cost so much, as a share of before."""


class StepPace:
    """The pace sizes the prefills of a step by the time that steps take, so that none lasts longer than a goal: running
    requests then wait no longer for a token, nor does a new one for its turn.

    A token costs the more the longer its context is, as attention reads all of it. The last steps tell what a token
    costs, and how that grows with the context, by a line through them.

    On a GPU steps are launched ahead, kernel by kernel, which takes as long for few tokens as for many. Where that is
    what takes the time, smaller steps would not be shorter."""

    def __init__(
        self, most: int, goal: float, least: int = LEAST_TOKENS, *, first: int = 0, growth: float = FIRST_GROWTH,
        on_gpu: bool = False,
    ) -> None:  # fmt: skip
        """Find the `least` to `most` tokens that a step can compute in `goal` seconds, in whole multiples of the least;
        on a GPU in powers of two of them, or half as many more. Without a goal they are the most, and `first`, if
        given, before any step is known. The `growth` with the context is what is assumed until costs tell."""
        self._most = most
        self._goal = goal
        self._least = least
        self._first = min(first or most, most)
        self._on_gpu = on_gpu
        self._launch_seconds = 0.0
        """To launch a step takes so long: its tokens may take as long, whatever the goal."""
        self._cost = 0.0
        """Seconds of a token, at the context where that was seen last."""
        self._context = 0.0
        self._growth = growth
        """What a token of the context adds to the cost of one without any, as a share of that."""
        self._sums = [0.0] * 5

    def tokens_at(self, context: float = 0) -> int:
        """Return how many tokens a step may have that begins behind so many others."""
        if not self._goal:
            return self._most
        if not self._sums[0]:
            return self._first
        tokens = self._within_goal(context)
        lots = max(1, int(self._within_goal(context + tokens / 2)) // self._least)
        if self._on_gpu:
            power = 1 << lots.bit_length() - 1
            lots = power * 3 // 2 if lots >= power * 3 // 2 else power
        return self._least * lots

    def _within_goal(self, context: float) -> float:
        seconds = max(self._goal, self._launch_seconds)
        return seconds / max(self._cost_at(context), seconds / self._most)

    def took(self, num_tokens: int, seconds: float, context: float = 0) -> None:
        """Take in a step of so many tokens, behind so many others on average. Short ones tell nothing: most of their
        time is the reading of weights."""
        if not self._goal or num_tokens < self._least:
            return
        cost = seconds / num_tokens
        known = self._cost_at(context)
        # A rise is followed at once, and a fall by halves. On a GPU something else may have held a single step up.
        most = MOST_RISE * known if self._on_gpu and known else cost
        self._cost = (known + cost) / 2 if cost < known else min(cost, most)
        self._context = context
        self._sums = [
            MEMORY * held + new
            for held, new in zip(self._sums, (1, context, cost, context * context, context * cost), strict=True)
        ]
        self._growth = self._fitted_growth()

    def launch_took(self, seconds: float, *, is_exact: bool) -> None:
        """Take in how long a step was launched. It is not exact where that had to wait for the step before it."""
        self._launch_seconds = seconds if is_exact else min(seconds, self._launch_seconds)

    def took_no_longer_than_launching(self) -> None:
        """Take in a step that had ended when it was launched. What its tokens cost is not known; more of them are tried
        until it is."""
        self._cost *= CHEAPER

    def _cost_at(self, context: float) -> float:
        """A longer context costs more. But on a CPU a shorter one is not trusted to cost less before it was seen to:
        what looks like growth may be a machine that became slower meanwhile."""
        if context <= self._context and not self._on_gpu:
            return self._cost
        return self._cost * (1 + self._growth * context) / (1 + self._growth * self._context)

    def _fitted_growth(self) -> float:
        """The slope of the line through costs by context, over its height without context."""
        count, contexts, costs, squares, products = self._sums
        spread = count * squares - contexts * contexts
        if spread <= (FITTED_SPREAD * count) ** 2:
            return self._growth
        slope = max(0.0, (count * products - contexts * costs) / spread)
        mean = costs / count
        # Noise may put the line's height at or below zero.
        return slope / max(mean - slope * contexts / count, mean / 8) if slope else 0.0


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
