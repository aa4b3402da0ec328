"""The runner: one plan in, one forward pass, one sampled token for each row that asked for one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.plan import Row, StepPlan, StepResult
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import exact_shape, lay_out, to_device, views
from weft.worker.sampler import SampledBatch, sample
from weft.worker.step import Outcome, Stepper
from weft.worker.warmup import WarmUp


class Pending(NamedTuple):
    """A step that was launched. `result` waits for it."""

    plan: StepPlan
    sampling: list[Row]
    sampled: SampledBatch | None

    def result(self) -> StepResult:
        if self.sampled is None:
            return StepResult(self.plan.step_id, [])
        by_row = dict(zip((row.row for row in self.sampling), self.sampled.read(), strict=True))
        return StepResult(self.plan.step_id, [by_row[row.row] for row in self.plan.rows if row.samples])


class Runner:
    def __init__(self, stepper: Stepper, *, graphs: StepGraphs | None = None, warm_up: WarmUp | None = None) -> None:
        self.stepper = stepper
        self.graphs = graphs
        self.warm_up = warm_up

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        """Launch a step. What it samples is in the row table for the next step, read or not."""
        table = self.stepper.table
        exact = exact_shape(plan.rows)
        captured = self.graphs.shape_for(exact) if self.graphs is not None else None
        layout = lay_out(plan.rows, captured or exact, table.padding_row)
        packed, *writes = to_device([layout.packed, *table.take_in(plan)], table.device)
        table.write(*writes)
        if self.graphs is not None and captured is not None:
            outcome = self.graphs.replay(captured, packed)
        else:
            outcome = self.stepper.step(exact, views(packed, exact), layout.longest)
        return Pending(plan, layout.sampling, self._sampled(layout.sampling, outcome))

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do a piece of work that makes later steps faster; False when there is none left."""
        if self.warm_up is not None and self.warm_up.next():
            return True
        return self.graphs is not None and self.graphs.capture_next()

    def _sampled(self, rows: list[Row], outcome: Outcome) -> SampledBatch | None:
        """The likeliest tokens are in the table already; rows that want others get them now."""
        if not rows:
            return None
        logits, tokens, peaks = (of[: len(rows)] for of in outcome)
        numbers, positions = [row.row for row in rows], [row.start + row.count for row in rows]
        return sample(logits, tokens, peaks, self.stepper.table, numbers, positions, self.stepper.model.ops)
