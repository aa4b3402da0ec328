"""Steps that are computed before anybody asks for them, so that no request waits for a compiler.

Kernels are compiled when a kind of shape is first seen: few rows or many, a prompt that fills its tiles or does not,
decodes beside it or none. These are the kinds; the tokens are the padding row's, and go to the null block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.model.dense import DenseModel
from weft.plan import Row, StepPlan
from weft.worker.inputs import build_inputs
from weft.worker.rows import RowTable

SHAPES: tuple[tuple[int, ...], ...] = (
    (128,), (1,), (100,), (1, 1, 1, 1, 1, 100), (1,) * 16 + (128, 128), (512,), (1000,), (1, 1, 2000), (2048,),
)  # fmt: skip
"""Each a step: the new tokens of its sequences. The likeliest first request comes first."""


class WarmUp:
    def __init__(self, model: DenseModel, kv_cache: Tensor, table: RowTable) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._table = table
        self._left = list(reversed(SHAPES))

    def next(self) -> bool:
        """Compute one more of the shapes; False when all were."""
        if not self._left:
            return False
        longest = self._table.tokens.shape[1]
        rows = [Row(self._table.padding_row, 0, min(count, longest), [], True) for count in self._left.pop()]
        inputs = build_inputs(StepPlan(-1, [], [], rows), self._table)
        hidden = self._model.forward(inputs.tokens, inputs.positions, self._kv_cache, inputs.batch)
        self._model.ops.greedy(self._model.logits(hidden[inputs.sample_at]))
        torch.cuda.synchronize()
        return True
