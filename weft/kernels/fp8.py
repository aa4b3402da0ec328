"""Linear weights of eight-bit floats (e4m3), with a scale for each row of outputs, or for each 128 columns of it.

Checkpoints with one scale for a whole tensor, or for blocks of 128 x 128, are held so too: their scales are repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
GROUP = 128
"""Columns that share a scale, where a row has several."""
SMALLEST_SCALE = 1e-12


class Fp8Weight(NamedTuple):
    """The weight of a linear layer as e4m3 numbers."""

    numbers: Tensor
    """e4m3, [out, in]."""
    scales: Tensor
    """float32, [groups, out]: one group, or one for each GROUP columns."""

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_columns = self.numbers.shape
        return num_rows, num_columns

    def dequantised(self) -> Tensor:
        """Return the weight as floats, [out, in]."""
        size = self.numbers.shape[1]
        by_column = self.scales.T.repeat_interleave(GROUP, dim=1)[:, :size] if len(self.scales) > 1 else self.scales.T
        return self.numbers.float() * by_column


class ScaledRows(NamedTuple):
    """The input of a linear layer as numbers of eight bits, with a scale for each row."""

    numbers: Tensor
    """e4m3, or int8 where the columns are rotated; [rows, columns]."""
    scales: Tensor
    """float32, [rows, 1]."""


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value of each row."""
    least, most = x.aminmax(dim=-1)
    return torch.maximum(most, -least)


def quantise_rows(x: Tensor) -> ScaledRows:
    """Return x [rows, columns] as e4m3. What is no number stays so."""
    wide = x.float()
    scales = (largest(wide)[..., None] / E4M3_MAX).clamp_min(SMALLEST_SCALE)
    return ScaledRows((wide / scales).to(E4M3), scales)


def rounded_rows(x: Tensor) -> Tensor:
    """Return x as kernels of several rows take it."""
    numbers, scales = quantise_rows(x)
    return (numbers.float() * scales).to(x.dtype)


def fp8_weight(weight: Tensor) -> Fp8Weight:
    """Return the nearest weight with one scale for each row of outputs."""
    numbers, scales = quantise_rows(weight)
    return Fp8Weight(numbers, scales.T.contiguous())
