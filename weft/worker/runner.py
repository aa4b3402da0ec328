"""The runner: one plan in, one forward pass, one sampled token for each row that asked for one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.kernels import AttentionBatch
from weft.model.dense import DenseModel
from weft.plan import StepPlan, StepResult
from weft.worker.inputs import StepInputs, build_inputs
from weft.worker.rows import RowTable
from weft.worker.sampler import SampledBatch, Target, sample


class FastStep(Protocol):
    """A whole step that was prepared beforehand, for steps up to a size: native code, a captured graph."""

    max_rows: int

    def __call__(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor) -> Tensor:
        """The logits of the tokens at `rows`; writes the cache as the model's own forward pass does."""


class Pending(NamedTuple):
    """A step that was launched. `result` waits for it."""

    plan: StepPlan
    inputs: StepInputs
    sampled: SampledBatch | None

    def result(self) -> StepResult:
        if self.sampled is None:
            return StepResult(self.plan.step_id, [])
        by_row = dict(zip((row.row for row in self.inputs.sampling), self.sampled.read(), strict=True))
        return StepResult(self.plan.step_id, [by_row[row.row] for row in self.plan.rows if row.samples])


class Runner:
    def __init__(self, model: DenseModel, kv_cache: Tensor, table: RowTable, fast_step: FastStep | None) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.table = table
        self.fast_step = fast_step

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        """Launch a step. What it samples is in the row table for the next step, read or not."""
        self.table.update(plan)
        inputs = build_inputs(plan, self.table)
        logits = self._logits(inputs)
        if not inputs.sampling:
            return Pending(plan, inputs, None)
        targets = [self._target(row.row, row.start + row.count) for row in inputs.sampling]
        sampled = sample(logits, targets, self.model.ops.greedy)
        rows = torch.tensor([row.row for row in inputs.sampling], device=logits.device)
        self.table.tokens[rows, inputs.positions[inputs.sample_at] + 1] = sampled.tokens
        return Pending(plan, inputs, sampled)

    def _logits(self, inputs: StepInputs) -> Tensor:
        fast = self.fast_step
        if fast is not None and len(inputs.tokens) <= fast.max_rows:
            return fast(inputs.tokens, inputs.positions, inputs.batch, inputs.sample_at)
        hidden = self.model.forward(inputs.tokens, inputs.positions, self.kv_cache, inputs.batch)
        return self.model.logits(hidden[inputs.sample_at])

    def _target(self, row: int, position: int) -> Target:
        return Target(self.table.states[row], self.table.tokens[row, :position], position)
