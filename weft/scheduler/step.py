"""The step that the scheduler is planning, and the events that a step's results become."""

from __future__ import annotations

from typing import NamedTuple

from weft.plan import Denoise, DenoiseAdmission, DenoiseOutput, Row, RowAdmission, Sampled
from weft.scheduler.cursors import Cursor, DenoiseCursor, RowCursor
from weft.types import Event, FinishReason, LatentCheckpoint

MAX_PROMPT_LOGPROBS = 256
"""Prompt tokens of a step whose log probabilities are computed: each takes a whole row of logits."""


class Promised(NamedTuple):
    """The cursors that a plan advances, in the plan's order."""

    rows: dict[RowCursor, int]
    """Each with the number of preemptions that it had when it was planned."""
    images: list[DenoiseCursor]
    planned_at: float
    launch_seconds: float = 0
    """A step that began at once, as the device was idle, was planned and launched in so long; 0: it waited."""


class Step:
    """A step's plan while it grows, and what is left of the step's budgets."""

    def __init__(self, budget: int, draft_budget: int, now: float) -> None:
        self.budget = budget
        self.draft_budget = draft_budget
        """Known tokens that the draft model may compute."""
        self.rows: list[Row] = []
        self.admit: list[RowAdmission] = []
        self.denoise: list[Denoise] = []
        self.admit_images: list[DenoiseAdmission] = []
        self.promised = Promised({}, [], now)
        self.decodes = 0
        self.draft_tokens = 0
        self.prefill_tokens = 0
        self.encode_tokens = 0
        """Those among them of prompts that become vectors or prompt embeds."""
        self.prefill_budget = 0
        """The step may have so many prefill tokens."""
        self.prefill_blocks = 0
        """Blocks that running prefills will still want."""
        self.prompt_logprobs_budget = MAX_PROMPT_LOGPROBS
        self.preempted = False

    def count(self, counts: dict[str, int]) -> None:
        """Count what the step takes of its budget, by kind of work."""
        decoded = self.decodes + self.draft_tokens
        counts["computed_tokens"] += decoded + self.prefill_tokens
        counts["decode_tokens"] += decoded
        counts["prefill_tokens"] += self.prefill_tokens - self.encode_tokens
        counts["encode_tokens"] += self.encode_tokens
        for unit in self.denoise:
            counts["encode_tokens" if unit.stage == "encode" else "denoise_tokens"] += unit.cost

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.denoise

    @property
    def prefill_left(self) -> int:
        return max(0, self.prefill_budget - self.prefill_tokens)


def token_event(
    cursor: RowCursor, sampled: list[Sampled], finish: FinishReason | None, num_drafted: int, num_accepted: int
) -> Event:
    is_first, cursor.reported = not cursor.reported, True
    wants_prompt = is_first and cursor.request.params.prompt_logprobs is not None
    return Event(
        request_id=cursor.id,
        token_ids=[token.token_id for token in sampled],
        logprobs=[token.logprob for token in sampled if token.logprob is not None] or None,
        cached_tokens=cursor.cached_tokens if is_first else None,
        finish=finish,
        stop_token_id=sampled[-1].token_id if finish is FinishReason.STOP else None,
        draft_tokens=num_drafted,
        accepted_tokens=num_accepted,
        prompt_logprobs=cursor.prompt_logprobs if wants_prompt else None,
        queue_seconds=cursor.queue_seconds if is_first else None,
    )


def vector_event(cursor: Cursor, vector: bytes) -> Event:
    return Event(
        request_id=cursor.id,
        cached_tokens=cursor.cached_tokens,
        finish=FinishReason.STOP,
        queue_seconds=cursor.queue_seconds,
        embedding=vector,
    )


def denoise_event(cursor: DenoiseCursor, unit: Denoise, output: DenoiseOutput) -> Event:
    is_first, cursor.reported = not cursor.reported, True
    step, kept = unit.steps_done, output.checkpoint
    return Event(
        request_id=cursor.id,
        cached_tokens=cursor.cached_tokens if is_first else None,
        finish=FinishReason.STOP if cursor.done == cursor.known else None,
        queue_seconds=cursor.queue_seconds if is_first else None,
        denoise_step=step,
        image=output.image,
        checkpoint=None if kept is None else LatentCheckpoint(step, kept),
    )


def failure_event(cursor: Cursor, error: str) -> Event:
    return Event(
        request_id=cursor.id,
        cached_tokens=None if cursor.reported else cursor.cached_tokens,
        finish=FinishReason.ERROR,
        error=error,
        queue_seconds=None if cursor.reported else cursor.queue_seconds,
    )
