"""The draft model: a smaller model of the same vocabulary guesses the tokens that the model then verifies.

It has a KV cache of its own, with the blocks of the model's: block ids, block tables and tokens are those of the row
table, so nothing is allocated twice. What it guesses is sampled as the model samples, with the parameters, the seed and
the position of the row: where both have the same distribution they sample the same token.
"""

from __future__ import annotations

import torch

from weft.plan import DraftPrefill, Row
from weft.worker.forward_step import Stepper
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import exact_shape, lay_out, to_device, views
from weft.worker.sampler import sample_draft

FEW_TOKENS = 8
"""So many tokens of a row, at most, are computed as rows of their own: captured steps have only such."""


class DraftModel:
    """The draft model computes what rows lack in its cache, and writes their drafts to the row table."""

    def __init__(self, stepper: Stepper, graphs: StepGraphs | None = None) -> None:
        self.stepper = stepper
        self.graphs = graphs

    @torch.inference_mode()
    def draft(self, rows: list[Row]) -> None:
        """Draft for the rows of a plan. The first token comes from the last one known, each other from the one before
        it."""
        prefills = [(row, row.draft_prefill) for row in rows if row.draft_prefill is not None]
        if prefills:
            self._step([one for row, prefill in prefills for one in prefill_rows(row, prefill)])
        for done in range(1, max((len(row.draft) for row, _ in prefills), default=0)):
            self._step([Row(row.row, row.start + done, 1, [], True) for row, _ in prefills if len(row.draft) > done])

    def _step(self, rows: list[Row]) -> None:
        stepper, table = self.stepper, self.stepper.table
        exact = exact_shape(rows)
        captured = self.graphs.shape_for(exact) if self.graphs is not None else None
        layout = lay_out(rows, captured or exact, table.padding_row)
        if self.graphs is not None and captured is not None:
            output = self.graphs.replay(captured, layout.packed)
        else:
            (packed,) = to_device([layout.packed], table.device)
            output = stepper.step(exact, views(packed, exact), layout.longest)
        sample_draft(output.logits, output.tokens, output.peaks, table, layout.sampling, stepper.model.ops)


def prefill_rows(row: Row, prefill: DraftPrefill) -> list[Row]:
    """Return the rows of the tokens that the draft model computes before it drafts; the last samples, if it is to."""
    if prefill.count > FEW_TOKENS:
        return [Row(row.row, prefill.start, prefill.count, [], bool(row.draft))]
    last = prefill.stop - 1
    return [
        Row(row.row, position, 1, [], bool(row.draft) and position == last)
        for position in range(prefill.start, prefill.stop)
    ]
