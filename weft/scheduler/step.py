"""A plan in the making."""

from __future__ import annotations

from typing import NamedTuple

from weft.plan import Admission, Denoise, DenoiseAdmission, Row
from weft.scheduler.cursors import DenoiseCursor, RowCursor

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
