"""Steps that are computed before anybody asks for them, so that no request waits for a compiler.

Kernels are compiled when a kind of shape is first seen: few rows or many, a prompt that fills its tiles or does not,
decodes beside it or none. These are the kinds; the tokens are the padding row's, and go to the null block.
"""

from __future__ import annotations

import torch

from weft.plan import Row
from weft.worker.inputs import exact_shape, lay_out, to_device, views
from weft.worker.sampler import rehearse
from weft.worker.step import Stepper

SHAPES: tuple[tuple[int, ...], ...] = (
    (128,), (1,), (16,), (100,), (1, 1, 1, 1, 1, 100), (1,) * 16 + (128, 128), (512,), (1, 1, 2000), (2048,), (1024,),
)  # fmt: skip
"""Each a step: the new tokens of its sequences. The likeliest first request comes first."""


class WarmUp:
    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._left = list(reversed(SHAPES))

    def next(self) -> bool:
        """Compute one more of the shapes; False when all were."""
        if not self._left:
            return False
        table = self._stepper.table
        longest = table.tokens.shape[1]
        rows = [Row(table.padding_row, 0, min(count, longest - 1), [], True) for count in self._left.pop()]
        shape = exact_shape(rows)
        layout = lay_out(rows, shape, table.padding_row)
        (packed,) = to_device([layout.packed], table.device)
        outcome = self._stepper.step(shape, views(packed, shape), layout.longest)
        rehearse(outcome.logits, self._stepper.model.ops)
        torch.cuda.synchronize()
        return True
