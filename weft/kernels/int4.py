"""Linear weights of four bits, with a scale and a zero for each group of columns, in the order of matrix units.

A tile is 64 rows and a block 128 columns of it: 2,048 words of 16 bits, which a program reads at once. A word has
the numbers of one row in the same place of the block's four quarters, the first in its lowest bits. The words lie as
the 128 threads of a matrix instruction hold them, so that they are unpacked where they are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE, BLOCK, QUARTERS = 64, 128, 4
GROUP = 128
"""Columns that share a scale in weights that are quantised here."""
MIDDLE = 8
"""The zero of weights without zeros of their own."""
MOST = 15


class Int4Groups(NamedTuple):
    """The weight of a linear layer as numbers of four bits: (number - zero) * scale."""

    numbers: Tensor
    """uint8, [rows, columns]. Columns of a group are neighbours."""
    scales: Tensor
    """[rows, groups]."""
    zeros: Tensor | None
    """As `scales`; None where all are MIDDLE."""
    group_size: int
    order: Tensor | None = None
    """The place of each column in the checkpoint, where columns of a group are not neighbours there."""

    def dequantised(self) -> Tensor:
        """Return the weight as floats, [rows, columns]."""
        zeros = MIDDLE if self.zeros is None else self._by_column(self.zeros)
        weight = (self.numbers.float() - zeros) * self._by_column(self.scales)
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _by_column(self, by_group: Tensor) -> Tensor:
        return by_group.float().repeat_interleave(self.group_size, dim=1)[:, : self.numbers.shape[1]]


class Int4Weight(NamedTuple):
    """Such a weight as kernels take it."""

    numbers: Tensor
    """int16, [tiles, blocks, 2048]."""
    scales: Tensor
    """[tiles, groups, 64], of the model's type. The rows of a tile are in the order of its words."""
    zeros: Tensor | None
    group_size: int
    shape: tuple[int, int]
    order: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weight as floats, [out, in]."""
        num_rows, num_columns = self.shape
        num_tiles, num_blocks, _ = self.numbers.shape
        words = self.numbers.view(num_tiles, num_blocks, 2, 4, 8, 4, 2, 2, 2)
        quarters = torch.stack([(words >> 4 * at & MOST).byte() for at in range(QUARTERS)], dim=-1)
        numbers = quarters.permute(0, 3, 6, 4, 1, 9, 2, 7, 5, 8).reshape(num_tiles * TILE, -1)
        zeros = None if self.zeros is None else _by_row(self.zeros)[:num_rows]
        scales = _by_row(self.scales)[:num_rows]
        return Int4Groups(numbers[:num_rows, :num_columns], scales, zeros, self.group_size, self.order).dequantised()


def is_multiplied(group_size: int, num_columns: int) -> bool:
    """Return whether kernels support groups of this size."""
    return group_size in (BLOCK // 4, BLOCK // 2) or group_size % BLOCK == 0 or group_size >= num_columns


def pack(groups: Int4Groups, dtype: torch.dtype) -> Int4Weight:
    """Lay a weight out for kernels, its scales and zeros of this type."""
    numbers, scales, zeros, group_size, order = groups
    num_rows, num_columns = numbers.shape
    more_rows, more_columns = -num_rows % TILE, -num_columns % BLOCK
    padded = F.pad(numbers, (0, more_columns, 0, more_rows))
    num_tiles, num_blocks = padded.shape[0] // TILE, padded.shape[1] // BLOCK
    split = padded.view(num_tiles, 4, 2, 8, num_blocks, QUARTERS, 2, 2, 4, 2).permute(0, 4, 6, 1, 3, 8, 2, 7, 9, 5)
    words = split[..., 0].to(torch.int32)
    for at in range(1, QUARTERS):
        words = words | split[..., at].to(torch.int32) << 4 * at
    more_groups = max(0, padded.shape[1] // group_size - scales.shape[1])

    def laid(by_row: Tensor) -> Tensor:
        rows = F.pad(by_row.to(dtype), (0, more_groups, 0, more_rows)).view(num_tiles, 4, 2, 8, -1)
        return rows.permute(0, 4, 1, 3, 2).reshape(num_tiles, -1, TILE).contiguous()

    return Int4Weight(
        words.to(torch.int16).reshape(num_tiles, num_blocks, -1),
        laid(scales),
        None if zeros is None else laid(zeros),
        group_size,
        (num_rows, num_columns),
        order,
    )


def _by_row(laid: Tensor) -> Tensor:
    num_tiles, num_groups, _ = laid.shape
    return laid.view(num_tiles, num_groups, 4, 8, 2).permute(0, 2, 4, 3, 1).reshape(-1, num_groups)


def quantised_groups(weight: Tensor) -> Int4Groups:
    """Return the nearest numbers of a weight, [out, in], in groups of GROUP columns. The range of a group is not cut:
    with the range of the least squared error, of 0.8 to 1, SmolLM2's perplexity was 31.4, and is 27.5 so."""
    num_rows, num_columns = weight.shape
    groups = F.pad(weight.float(), (0, -num_columns % GROUP)).view(num_rows, -1, GROUP)
    least, most = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((most - least) / MOST).to(weight.dtype).float()
    inverse = 1 / scales.where(scales > 0, 1)
    zeros = (-least * inverse).round().clamp(0, MOST)
    numbers = (groups * inverse[..., None] + zeros[..., None]).round_().clamp_(0, MOST).to(torch.uint8)
    return Int4Groups(numbers.view(num_rows, -1)[:, :num_columns], scales, zeros, GROUP)
