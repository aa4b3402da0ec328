"""From a plan to the tensors that the model takes: one packed copy to the device, the rest is gathered there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels import AttentionBatch
from weft.plan import Row, StepPlan
from weft.worker.rows import Ints, RowTable, runs


class StepInputs(NamedTuple):
    tokens: Tensor
    positions: Tensor
    batch: AttentionBatch
    sampling: list[Row]
    """The rows that sample, in the order of the batch: rows with one token first."""
    sampling_rows: Tensor
    """Their numbers."""
    sample_at: Tensor
    """Where their last tokens stand among the step's tokens."""


def build_inputs(plan: StepPlan, table: RowTable) -> StepInputs:
    rows = sorted(plan.rows, key=lambda row: row.count > 1)
    counts = [row.count for row in rows]
    starts = [0, *np.cumsum(counts).tolist()]
    numbers = np.array([row.row for row in rows], dtype=np.int64)
    lengths = [row.start + row.count for row in rows]
    samples = np.array([row.samples for row in rows])
    writes = table.take_in(plan)
    token_rows, positions, numbers_there, lengths_there, sample_at, sampling_rows, *written = to_device(
        [
            np.repeat(numbers, counts),
            runs([row.start for row in rows], counts),
            numbers,
            np.array(lengths, dtype=np.int64),
            np.array(starts[1:], dtype=np.int64)[samples] - 1,
            numbers[samples],
            writes.token_rows,
            writes.token_positions,
            writes.tokens,
            writes.block_rows,
            writes.block_positions,
            writes.blocks,
        ],
        table.device,
    )
    table.write(*written)
    widest = -(-max(lengths) // table.block_size)
    batch = AttentionBatch(
        num_decodes=counts.count(1),
        query_starts=starts,
        lengths=lengths,
        block_tables=table.blocks[numbers_there, :widest],
        slots=slots_of(table, token_rows, positions),
        lengths_tensor=lengths_there,
    )
    return StepInputs(
        tokens=table.tokens[token_rows, positions],
        positions=positions,
        batch=batch,
        sampling=[row for row in rows if row.samples],
        sampling_rows=sampling_rows,
        sample_at=sample_at,
    )


def slots_of(table: RowTable, rows: Tensor, positions: Tensor) -> Tensor:
    """The cache slots of tokens, by row and position."""
    return table.blocks[rows, positions // table.block_size] * table.block_size + positions % table.block_size


def to_device(arrays: list[Ints], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on the device, by one copy that nobody waits for."""
    packed = torch.from_numpy(np.concatenate(arrays))
    if device.type != "cpu":
        # Pinned memory is fresh every step: the copy of the last one may still be under way.
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(torch.split(packed, [len(array) for array in arrays]))
