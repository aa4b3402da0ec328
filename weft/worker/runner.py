"""The runner: one plan in, one forward pass, one sampled token for each row that asked for one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.kernels import AttentionBatch
from weft.model.dense import DenseModel
from weft.plan import Row, StepPlan, StepResult
from weft.worker.graphs import DecodeGraphs
from weft.worker.inputs import build_inputs
from weft.worker.rows import RowTable
from weft.worker.sampler import SampledBatch, Target, sample
from weft.worker.warmup import WarmUp


class FastStep(Protocol):
    """A whole step in native code."""

    def __call__(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor) -> Tensor:
        """The logits of the tokens at `rows`; writes the cache as the model's own forward pass does."""


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
    def __init__(
        self,
        model: DenseModel,
        kv_cache: Tensor,
        table: RowTable,
        *,
        fast_step: FastStep | None = None,
        graphs: DecodeGraphs | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.table = table
        self.fast_step = fast_step
        self.graphs = graphs
        self.warm_up = warm_up

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        """Launch a step. What it samples is in the row table for the next step, read or not."""
        if self.graphs is not None and self.graphs.accepts(plan):
            return self._finish(plan, plan.rows, *self.graphs.replay(plan))
        inputs = build_inputs(plan, self.table)
        if self.fast_step is not None:
            logits = self.fast_step(inputs.tokens, inputs.positions, inputs.batch, inputs.sample_at)
        else:
            hidden = self.model.forward(inputs.tokens, inputs.positions, self.kv_cache, inputs.batch)
            logits = self.model.logits(hidden[inputs.sample_at])
        if not inputs.sampling:
            return Pending(plan, [], None)
        tokens, peaks = self.model.ops.greedy(logits)
        self.table.tokens[inputs.sampling_rows, inputs.positions[inputs.sample_at] + 1] = tokens
        return self._finish(plan, inputs.sampling, logits, tokens, peaks)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do a piece of work that makes later steps faster; False when there is none left."""
        if self.warm_up is not None and self.warm_up.next():
            return True
        return self.graphs is not None and self.graphs.capture_next()

    def _finish(self, plan: StepPlan, rows: list[Row], logits: Tensor, tokens: Tensor, peaks: Tensor) -> Pending:
        """The likeliest tokens are in the table already; rows that want others get them now."""
        targets = [Target(self.table, row.row, row.start + row.count) for row in rows]
        return Pending(plan, rows, sample(logits, tokens, peaks, targets))
