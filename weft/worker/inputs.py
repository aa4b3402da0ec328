"""From a plan to the tensors that the model takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels import AttentionBatch
from weft.plan import Row, StepPlan
from weft.worker.rows import RowTable


class StepInputs(NamedTuple):
    tokens: Tensor
    positions: Tensor
    batch: AttentionBatch
    rows: list[Row]
    """The plan's rows in the order of the batch: those with one token first."""
    sampling: list[Row]
    """Those of `rows` that sample, in the same order."""
    sample_at: Tensor
    """Where the last tokens of `sampling` stand among the step's tokens."""

    @property
    def only_decodes(self) -> bool:
        """Every row has one token and samples: the step of a batch that is all answers and no prompts."""
        return self.batch.num_decodes == len(self.rows) == len(self.sampling)


def build_inputs(plan: StepPlan, table: RowTable) -> StepInputs:
    """One packed copy to the device (row and position of every token), everything else is gathered there."""
    rows = sorted(plan.rows, key=lambda row: row.count > 1)
    counts = np.array([row.count for row in rows])
    starts = np.concatenate(([0], np.cumsum(counts)))
    packed = np.empty((2, starts[-1]), dtype=np.int64)
    packed[0] = np.repeat([row.row for row in rows], counts)
    packed[1] = np.arange(starts[-1]) + np.repeat([row.start for row in rows] - starts[:-1], counts)
    device = table.tokens.device
    token_rows, positions = torch.from_numpy(packed).to(device)
    lengths = [row.start + row.count for row in rows]
    row_ids = torch.tensor([row.row for row in rows], device=device)
    widest = -(-max(lengths) // table.block_size)
    batch = AttentionBatch(
        num_decodes=sum(row.count == 1 for row in rows),
        query_starts=starts.tolist(),
        lengths=lengths,
        block_tables=table.blocks[row_ids, :widest],
        slots=table.blocks[token_rows, positions // table.block_size] * table.block_size + positions % table.block_size,
        lengths_tensor=torch.tensor(lengths, device=device),
    )
    sample_at = [int(starts[i + 1]) - 1 for i, row in enumerate(rows) if row.samples]
    return StepInputs(
        tokens=table.tokens[token_rows, positions],
        positions=positions,
        batch=batch,
        rows=rows,
        sampling=[row for row in rows if row.samples],
        sample_at=torch.tensor(sample_at, dtype=torch.int64, device=device),
    )
