"""CUDA graphs of decode steps: the whole step, from the row table to the sampled tokens in it, as one launch.

A graph is captured for a number of rows and serves every batch up to it; rows to spare are the table's padding row,
whose blocks are the null block. The server does not wait for graphs: a size is captured in the engine's idle gaps,
or when it has been wanted a few times; until then its steps run without one.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels import AttentionBatch
from weft.model.dense import DenseModel
from weft.plan import StepPlan
from weft.worker.inputs import slots_of, to_device
from weft.worker.rows import RowTable

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
WANTED_OFTEN = 3


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """[2, rows]: row numbers and positions; written before a replay."""
    logits: Tensor
    tokens: Tensor
    peaks: Tensor


class DecodeGraphs:
    def __init__(self, model: DenseModel, kv_cache: Tensor, table: RowTable, max_rows: int) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._table = table
        self._sizes = [size for size in SIZES if size < max_rows] + [max_rows]
        self._captured: dict[int, Captured] = {}
        self._wanted = dict.fromkeys(self._sizes, 0)
        self._pool = torch.cuda.graph_pool_handle()

    def accepts(self, plan: StepPlan) -> bool:
        """Whether a plan decodes only, and the graph for it is there."""
        if plan.admit or any(row.count != 1 or not row.samples for row in plan.rows):
            return False
        size = self._size_for(len(plan.rows))
        self._wanted[size] += 1
        if size not in self._captured and self._wanted[size] >= WANTED_OFTEN:
            self._capture(size)
        return size in self._captured

    def replay(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, likeliest tokens and largest logits of the plan's rows; the tokens are in the row table too."""
        num_rows = len(plan.rows)
        captured = self._captured[self._size_for(num_rows)]
        writes = self._table.take_in(plan)
        steps = np.zeros(captured.inputs.shape, dtype=np.int64)
        steps[0] = self._table.padding_row
        steps[:, :num_rows] = [[row.row for row in plan.rows], [row.start for row in plan.rows]]
        inputs, rows, positions, blocks = to_device(
            [steps.reshape(-1), writes.block_rows, writes.block_positions, writes.blocks], self._table.device
        )
        self._table.write_blocks(rows, positions, blocks)
        captured.inputs.copy_(inputs.view(captured.inputs.shape))
        captured.graph.replay()
        return captured.logits[:num_rows], captured.tokens[:num_rows].clone(), captured.peaks[:num_rows]

    def capture_next(self) -> bool:
        """Capture one size that is missing, the largest first: the others then fit in its memory."""
        for size in reversed(self._sizes):
            if size not in self._captured:
                self._capture(size)
                return True
        return False

    def _size_for(self, num_rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def _capture(self, size: int) -> None:
        # Triton is there only where CUDA is.
        from weft.kernels.triton.launch import overlapping_launches

        inputs = torch.zeros(2, size, dtype=torch.int64, device=self._table.device)
        inputs[0] = self._table.padding_row
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with overlapping_launches():
            with torch.cuda.stream(stream):
                self._step(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits, tokens, peaks = self._step(inputs)
        self._captured[size] = Captured(graph, inputs, logits, tokens, peaks)

    def _step(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        table, (rows, positions) = self._table, inputs
        size = len(rows)
        batch = AttentionBatch(
            num_decodes=size,
            query_starts=list(range(size + 1)),
            lengths=[],
            block_tables=table.blocks[rows],
            slots=slots_of(table, rows, positions),
            lengths_tensor=positions + 1,
        )
        hidden = self._model.forward(table.tokens[rows, positions], positions, self._kv_cache, batch)
        logits = self._model.logits(hidden)
        tokens, peaks = self._model.ops.greedy(logits)
        table.tokens[rows, positions + 1] = tokens
        return logits, tokens, peaks
