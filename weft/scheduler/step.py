"""A plan in the making."""

from __future__ import annotations

from typing import NamedTuple

from weft.plan import Admission, Denoise, DenoiseAdmission, Drawn, Row, Sampled
from weft.scheduler.cursors import Cursor, DenoiseCursor, RowCursor
from weft.types import Event, FinishReason

MAX_SCORED_TOKENS = 256
"""Prompt tokens of a step that are computed for their log probabilities: each takes a whole row of logits."""


class Promised(NamedTuple):
    """To whom a plan promised something, in its order."""

    rows: dict[RowCursor, int]
    """Each with the number of preemptions it had when the promise was made."""
    images: list[DenoiseCursor]


class Step:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self.admit: list[Admission] = []
        self.denoise: list[Denoise] = []
        self.admit_images: list[DenoiseAdmission] = []
        self.promised = Promised({}, [])
        self.decodes = 0
        self.prompt_tokens = 0
        """Tokens of rows that do not decode."""
        self.prompt_room = 0
        """How many there may be beside decodes."""
        self.scoring_room = MAX_SCORED_TOKENS
        self.preempted = False

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.denoise


def token_event(cursor: RowCursor, sampled: Sampled, finish: FinishReason | None) -> Event:
    is_first, cursor.reported = not cursor.reported, True
    wants_prompt = is_first and cursor.request.params.prompt_logprobs is not None
    return Event(
        request_id=cursor.id,
        token_ids=[sampled.token_id],
        logprobs=None if sampled.logprob is None else [sampled.logprob],
        cached_tokens=cursor.cached_tokens if is_first else None,
        finish=finish,
        stop_token_id=sampled.token_id if finish is FinishReason.STOP else None,
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


def denoise_event(cursor: DenoiseCursor, drawn: Drawn) -> Event:
    is_first, cursor.reported = not cursor.reported, True
    return Event(
        request_id=cursor.id,
        cached_tokens=cursor.cached_tokens if is_first else None,
        finish=FinishReason.STOP if cursor.done == cursor.known else None,
        queue_seconds=cursor.queue_seconds if is_first else None,
        denoise_step=cursor.done,
        image=drawn.image,
    )


def failure_event(cursor: Cursor, error: str) -> Event:
    return Event(
        request_id=cursor.id,
        cached_tokens=None if cursor.reported else cursor.cached_tokens,
        finish=FinishReason.ERROR,
        error=error,
        queue_seconds=None if cursor.reported else cursor.queue_seconds,
    )
