"""The worker's row table: the state of each admitted request from one step to the next.

A request keeps its row until it ends or is preempted. Tokens and block tables stay on the device: a step gathers
its inputs from them, so the next step can be launched before the tokens of this one are read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.payloads import EmbedsSegment
from weft.plan import Row, StepPlan
from weft.worker.grammar_masks import Constraints
from weft.worker.sampling_rows import SamplingSettings

Ints = NDArray[np.int64]

NO_TOKEN = -1
"""The token of a position in the table at which a row of prompt embeds stands."""


class RowWrites(NamedTuple):
    """The writes of a plan to the table: the place and the value of each new token and block. Drafted tokens are the
    last of the tokens."""

    token_rows: Ints
    token_positions: Ints
    tokens: Ints
    block_rows: Ints
    block_positions: Ints
    blocks: Ints


class RowTable:
    """The tokens and block tables of all rows, on the device, and their sampling settings, on the host."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.padding_row = num_rows
        """The row that no request has: its blocks are the null block."""
        self.tokens = torch.zeros(num_rows + 1, max_model_len, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(num_rows + 1, -(-max_model_len // block_size), dtype=torch.int64, device=device)
        self.num_blocks: dict[int, int] = {}
        """Number of blocks of every admitted row."""
        self.settings = SamplingSettings(num_rows + 1)
        self.constraints = Constraints()
        self.embeds: dict[int, list[EmbedsSegment]] = {}
        """The prompt embeds of the rows that have some."""

    def take_in(self, plan: StepPlan) -> RowWrites:
        """Take in a plan's releases and admissions; the writes must reach the device before its step is computed."""
        for released in plan.release:
            self.num_blocks.pop(released, None)
            self.settings.release(released)
            self.constraints.release(released)
            self.embeds.pop(released, None)
        drafted = [row for row in plan.rows if row.draft]
        owners = [admission.row for admission in plan.admit] + [row.row for row in drafted]
        written = [admission.token_ids for admission in plan.admit] + [row.draft for row in drafted]
        lengths = [len(token_ids) for token_ids in written]
        tokens = _ints([token for token_ids in written for token in token_ids])
        first = 0
        for admission, length in zip(plan.admit, lengths, strict=False):
            self.num_blocks[admission.row] = 0
            self.settings.admit(admission)
            self.constraints.admit(admission)
            self.embeds.pop(admission.row, None)
            if admission.embeds:
                self.embeds[admission.row] = admission.embeds
            for segment in admission.embeds:
                tokens[first + segment.start : first + segment.stop] = NO_TOKEN
            first += length
        grown = [row for row in plan.rows if row.new_blocks]
        counts = [len(row.new_blocks) for row in grown]
        firsts = []
        for row in grown:
            firsts.append(self.num_blocks[row.row])
            self.num_blocks[row.row] += len(row.new_blocks)
        return RowWrites(
            token_rows=np.repeat(_ints(owners), lengths),
            token_positions=runs([0] * len(plan.admit) + [row.start + 1 for row in drafted], lengths),
            tokens=tokens,
            block_rows=np.repeat(_ints([row.row for row in grown]), counts),
            block_positions=runs(firsts, counts),
            blocks=_ints([block for row in grown for block in row.new_blocks]),
        )

    def embeds_within(self, row: Row) -> list[tuple[int, int, EmbedsSegment]]:
        """Return the prompt embeds at the positions that a row computes, each with the first of its positions
        there and the one behind the last."""
        end = row.start + row.count
        runs = [(max(row.start, part.start), min(end, part.stop), part) for part in self.embeds.get(row.row, ())]
        return [(start, stop, part) for start, stop, part in runs if start < stop]

    def has_embeds(self, rows: list[Row]) -> bool:
        """Return whether a step of these rows computes prompt embeds."""
        return bool(self.embeds) and any(self.embeds_within(row) for row in rows)

    def write(
        self, token_rows: Tensor, token_positions: Tensor, tokens: Tensor, block_rows: Tensor, block_positions: Tensor,
        blocks: Tensor,
    ) -> None:  # fmt: skip
        """Carry out writes, on the device."""
        if len(tokens):
            self.tokens[token_rows, token_positions] = tokens
        if len(blocks):
            self.blocks[block_rows, block_positions] = blocks


def runs(firsts: list[int] | Ints, counts: list[int] | Ints) -> Ints:
    """Return first, first + 1, … for every first, each run as long as its count, one after the other."""
    lengths = _ints(counts)
    begins = np.cumsum(lengths) - lengths
    values: Ints = np.arange(lengths.sum()) + np.repeat(_ints(firsts) - begins, lengths)
    return values


def _ints(values: list[int] | Ints) -> Ints:
    return np.array(values, dtype=np.int64)
