"""What the scheduler promises for one step, and what the worker returns for it.

The worker hears of a request in full once, when it is admitted to a row. After that a plan carries
only what is new: how far to go, and which blocks were added.
"""

from __future__ import annotations

from msgspec import Struct

from weft.types import Pooling, SamplingParams, TokenLogprob


class Limits(Struct, frozen=True, kw_only=True):
    """The numbers that scheduler and worker both work within, all of them resolved."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_mixed_prefill: int
    logits_width: int
    enable_prefix_caching: bool = True
    max_preemptions: int = 3
    force_preempt_every: int = 0


class Admission(Struct, frozen=True):
    """A request takes a row of the worker, until `StepPlan.release` names that row."""

    row: int
    token_ids: list[int]
    """Everything known: the prompt, then the tokens sampled before a preemption or a restart."""
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: list[int]


class PromptLogprobs(Struct, frozen=True):
    """The log probabilities of the prompt tokens that follow a row's tokens, and of so many of the likeliest ones."""

    num_top: int


class Pooled(Struct, frozen=True):
    """The hidden states of a prompt's tokens as one vector of length one."""

    pooling: Pooling
    """The mean is of all tokens since the row's start: the worker keeps their sum from step to step."""
    is_end: bool
    """These are the prompt's last tokens: the vector comes back."""


Extra = PromptLogprobs | Pooled
"""What a row may ask of its tokens besides the next one. Steps with such a row are not as fast as others."""


class Row(Struct, frozen=True):
    """Compute the known tokens at positions start .. start + count - 1 of one row."""

    row: int
    start: int
    count: int
    new_blocks: list[int]
    """Block ids to append to the row's table before the step."""
    samples: bool
    """The last of these tokens is the last one known: sample the token that follows it."""
    extra: Extra | None = None


class StepPlan(Struct, frozen=True):
    step_id: int
    release: list[int]
    """Rows to forget before anything else; after a step that failed, also rows that the worker may not know."""
    admit: list[Admission]
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Sampled(Struct, frozen=True):
    """What sampling gave one row; `error` instead of a token when its logits were no numbers."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str = ""


class Gained(Struct, frozen=True):
    """What a row got of the extra that it asked for; `error` when it were no numbers."""

    logprobs: list[TokenLogprob] = []
    vector: bytes | None = None
    """float32."""
    error: str = ""


class StepResult(Struct, frozen=True):
    step_id: int
    sampled: list[Sampled]
    """One for every row of the plan that samples, in the plan's order."""
    gained: list[Gained] = []
    """One for every row of the plan that asks for an extra, in the plan's order."""
