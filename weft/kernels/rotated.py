"""Linear weights of eight-bit whole numbers whose columns are rotated.

Inputs are rotated alike, which leaves the products as they are, and spreads what is large in one column over 64: eight
bits with one scale are enough for a row of inputs then, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.fp8 import SMALLEST_SCALE, ScaledRows, largest

SIDE = 64
"""Columns that are rotated together, by a Hadamard matrix, which is its own inverse."""
MOST = 127
_ROWS_AT_ONCE = 1 << 14


class RotatedWeight(NamedTuple):
    numbers: Tensor
    """int8, [out, in]."""
    scales: Tensor
    """float32, [1, out]."""

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_columns = self.numbers.shape
        return num_rows, num_columns

    def dequantised(self) -> Tensor:
        """Return the weight as floats, [out, in]."""
        return rotated(self.numbers * self.scales.T)


def rotated(x: Tensor) -> Tensor:
    """Rotate the columns of x [rows, columns]; there are a multiple of SIDE."""
    signs = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(signs) < SIDE:
        signs = torch.cat([torch.cat([signs, signs], dim=1), torch.cat([signs, -signs], dim=1)])
    return torch.matmul(x.reshape(len(x), -1, SIDE), signs * SIDE**-0.5).view(x.shape)


def rotated_rows(x: Tensor) -> ScaledRows:
    """Return the rows of x, rotated, as int8. A row with what is no number, or infinite, has a scale that is none."""
    wide = rotated(x.float())
    scales = (largest(wide)[:, None] / MOST).clamp_min(SMALLEST_SCALE) + (wide * 0).sum(1, keepdim=True)
    return ScaledRows(torch.round(wide / scales).to(torch.int8), scales)


def rotated_weight(weight: Tensor) -> RotatedWeight:
    """Return the nearest such weight."""
    # In parts: as float32 the whole of a head may be too large.
    numbers, scales = zip(*(rotated_rows(part) for part in torch.split(weight, _ROWS_AT_ONCE)), strict=True)
    return RotatedWeight(torch.cat(numbers), torch.cat(scales).T.contiguous())
