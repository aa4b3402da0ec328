"""The greatest element of each row, read once from end to end by a vectorised loop."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.kernels.cpu.jit import entry, types
from weft.kernels.cpu.memory import at, floats, ints

# Floats compared before a row's winner so far is looked at again.
_RUN = 256


@entry((types.int64, types.int64, types.int64, types.int64))
def _argmax(logits: int, num_rows: int, size: int, out: int) -> None:
    for row in range(num_rows):
        x = at(floats(logits), row * size)
        best, where = np.float32(-np.inf), 0
        for start in range(0, size, _RUN):
            run = at(x, start)
            count = min(_RUN, size - start)
            # Whether any is greater, or a NaN, without a branch.
            beaten = 0
            for i in range(count):
                beaten += not (run[i] <= best)
            if beaten:
                for i in range(count):
                    if run[i] > best or run[i] != run[i]:
                        best, where = run[i], start + i
                        if best != best:
                            break
                if best != best:
                    break
        ints(out)[row] = where


def argmax_rows(logits: Tensor) -> Tensor:
    """[rows] int64: where each row's greatest element is, the first of equals; its first NaN where it has one."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _argmax(logits.data_ptr(), logits.shape[0], logits.shape[1], out.data_ptr())
    return out
