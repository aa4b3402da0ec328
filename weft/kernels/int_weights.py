"""Linear weights of four or eight bits, with a scale and a zero or minimum for each group of columns, in the order of
matrix units.

A tile is 64 rows and a block 128 columns of it: 2,048 words of 16 bits, which a program reads at once. A word has
the numbers of one row in the same place of the block's four quarters, the first in its lowest bits. The words lie as
the 128 threads of a matrix instruction hold them, so that they are unpacked where they are multiplied. Numbers of eight
bits have twice as many words: those of the first two quarters, then those of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.fp8 import E4M3_MAX, SMALLEST_SCALE, largest

TILE, BLOCK, QUARTERS = 64, 128, 4
GROUP = 128
"""Columns that share a scale in weights that are quantised here."""
MIDDLE = 8
"""The zero of weights of four bits without zeros of their own."""
MOST = 15
MOST_INT8 = 127
_SMALLEST = torch.finfo(torch.float32).tiny
"""In the place of the scale of a group of zeros."""


class IntGroups(NamedTuple):
    """The weight of a linear layer as whole numbers: (number - zero) * scale, or number * scale + minimum."""

    numbers: Tensor
    """uint8 of four bits, or int8, [rows, columns]. Columns of a group are neighbours."""
    scales: Tensor
    """[rows, groups]."""
    zeros: Tensor | None
    """As `scales`; None where all are MIDDLE, or the numbers are int8."""
    group_size: int
    order: Tensor | None = None
    """The place of each column in the checkpoint, where columns of a group are not neighbours there."""
    minima: Tensor | None = None
    """As `scales`, in the place of zeros that are no whole numbers; the numbers count from 0 then."""

    def dequantised(self) -> Tensor:
        """Return the weight as floats, [rows, columns]."""
        scales = self._by_column(self.scales)
        if self.minima is not None:
            return self.numbers.float() * scales + self._by_column(self.minima)
        middle = 0 if self.numbers.dtype == torch.int8 else MIDDLE
        zeros = middle if self.zeros is None else self._by_column(self.zeros)
        weight = (self.numbers.float() - zeros) * scales
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _by_column(self, by_group: Tensor) -> Tensor:
        return by_group.float().repeat_interleave(self.group_size, dim=1)[:, : self.numbers.shape[1]]


class IntWeight(NamedTuple):
    """Such a weight as kernels take it."""

    numbers: Tensor
    """int16, [tiles, blocks, 2048], or 4096 words of eight bits."""
    scales: Tensor
    """[tiles, groups, 64], of the model's type. The rows of a tile are in the order of its words. Where a block has
    several groups, [tiles, blocks, 64 * groups]: those of a row are neighbours, which a thread loads at once."""
    zeros: Tensor | None
    group_size: int
    shape: tuple[int, int]
    order: Tensor | None = None
    minima: Tensor | None = None
    row_scales: Tensor | None = None
    """float32, [1, rows]: with them many inputs are multiplied as e4m3, and rounded to it; None: as they are."""

    @property
    def bits(self) -> int:
        return self.numbers.shape[2] * 16 // (TILE * BLOCK)

    @property
    def num_groups(self) -> int:
        return self.scales[0].numel() // TILE

    def for_fp8_inputs(self) -> IntWeight:
        """Return a weight of four bits with scales for its rows, by which no number is too large for e4m3."""
        scales = _by_row(self.scales).float()
        zeros = torch.full_like(scales, MIDDLE) if self.zeros is None else _by_row(self.zeros).float()
        most = (scales * torch.maximum(zeros, MOST - zeros)).amax(1)[: self.shape[0]]
        return self._replace(row_scales=(most / E4M3_MAX).clamp_min(SMALLEST_SCALE)[None])

    def dequantised(self) -> Tensor:
        """Return the weight as floats, [out, in]."""
        num_rows, num_columns = self.shape
        num_tiles, num_blocks, _ = self.numbers.shape
        bits, planes = self.bits, self.bits // 4
        words = self.numbers.view(num_tiles, num_blocks, planes, 2, 4, 8, 4, 2, 2, 2)
        parts = [words >> bits * at & (1 << bits) - 1 for at in range(16 // bits)]
        quarters = torch.stack(parts, dim=-1).to(torch.uint8 if bits == 4 else torch.int8)
        numbers = quarters.permute(0, 4, 7, 5, 1, 2, 10, 3, 8, 6, 9).reshape(num_tiles * TILE, -1)
        scales, zeros, minima = (
            None if laid is None else _by_row(laid)[:num_rows] for laid in (self.scales, self.zeros, self.minima)
        )
        assert scales is not None
        held = numbers[:num_rows, :num_columns]
        return IntGroups(held, scales, zeros, self.group_size, self.order, minima).dequantised()


def is_multiplied(group_size: int, num_columns: int) -> bool:
    """Return whether kernels support groups of this size."""
    return group_size in (BLOCK // 4, BLOCK // 2) or group_size % BLOCK == 0 or group_size >= num_columns


def pack(groups: IntGroups, dtype: torch.dtype) -> IntWeight:
    """Lay a weight out for kernels, its scales, zeros and minima of this type."""
    numbers, scales, zeros, group_size, order, minima = groups
    num_rows, num_columns = numbers.shape
    if group_size >= num_columns:
        # Kernels know groups that divide a block, or are no smaller than one.
        group_size = max(group_size, BLOCK)
    more_rows, more_columns = -num_rows % TILE, -num_columns % BLOCK
    bits = 8 if numbers.dtype == torch.int8 else 4
    padded = F.pad(numbers.view(torch.uint8), (0, more_columns, 0, more_rows))
    num_tiles, num_blocks = padded.shape[0] // TILE, padded.shape[1] // BLOCK
    split = padded.view(num_tiles, 4, 2, 8, num_blocks, bits // 4, 16 // bits, 2, 2, 4, 2)
    split = split.permute(0, 4, 5, 7, 1, 3, 9, 2, 8, 10, 6)
    words = split[..., 0].to(torch.int32)
    for at in range(1, 16 // bits):
        words = words | split[..., at].to(torch.int32) * (1 << bits * at)
    more_groups = max(0, padded.shape[1] // group_size - scales.shape[1])

    def laid(by_row: Tensor | None) -> Tensor | None:
        if by_row is None:
            return None
        rows = F.pad(by_row.to(dtype), (0, more_groups, 0, more_rows))
        together = max(1, BLOCK // group_size)
        rows = rows.view(num_tiles, 4, 2, 8, -1, together).permute(0, 4, 1, 3, 2, 5)
        return rows.reshape(num_tiles, -1, TILE * together).contiguous()

    held = laid(scales)
    assert held is not None
    return IntWeight(
        words.to(torch.int16).reshape(num_tiles, num_blocks, -1),
        held,
        laid(zeros),
        group_size,
        (num_rows, num_columns),
        order,
        laid(minima),
    )


def joined(parts: list[IntGroups]) -> IntGroups:
    """Return parts whose numbers have the same bits, groups and order as one weight, one below the other."""
    numbers, scales = torch.cat([one.numbers for one in parts]), torch.cat([one.scales for one in parts])
    middle = 0 if numbers.dtype == torch.int8 else MIDDLE
    zeros = minima = None
    if any(one.minima is not None for one in parts):
        minima = torch.cat([one.scales * -middle if one.minima is None else one.minima for one in parts])
    elif any(one.zeros is not None for one in parts):
        zeros = torch.cat([torch.full_like(one.scales, middle) if one.zeros is None else one.zeros for one in parts])
        zeros = None if bool((zeros == middle).all()) else zeros
    return IntGroups(numbers, scales, zeros, parts[0].group_size, parts[0].order, minima)


def _by_row(laid: Tensor) -> Tensor:
    num_tiles, num_groups, _ = laid.shape
    rows = laid.view(num_tiles, num_groups, 4, 8, 2, -1).permute(0, 2, 4, 3, 1, 5)
    return rows.reshape(num_tiles * TILE, -1)


def quantised_groups(weight: Tensor) -> IntGroups:
    """Return the nearest numbers of a weight, [out, in], in groups of GROUP columns. The range of a group is not cut:
    with the range of the least squared error, of 0.8 to 1, SmolLM2's perplexity was 31.4, and is 27.5 so."""
    num_rows, num_columns = weight.shape
    groups = F.pad(weight.float(), (0, -num_columns % GROUP)).view(num_rows, -1, GROUP)
    least, most = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((most - least) / MOST).to(weight.dtype).float()
    inverse = 1 / scales.clamp_min(_SMALLEST)
    zeros = (-least * inverse).round().clamp(0, MOST)
    numbers = (groups * inverse[..., None] + zeros[..., None]).round_().clamp_(0, MOST).to(torch.uint8)
    return IntGroups(numbers.view(num_rows, -1)[:, :num_columns], scales, zeros, GROUP)


def int8_rows(weight: Tensor, group_size: int = 0, dtype: torch.dtype | None = None) -> IntGroups:
    """Return the nearest numbers of eight bits of a weight, [out, in], with a scale of this type, or its own, for each
    row, or group of it."""
    num_rows, num_columns = weight.shape
    size = group_size or num_columns
    groups = weight.float().view(num_rows, -1, size)
    scales = (largest(groups) / MOST_INT8).to(dtype or weight.dtype).float()
    inverse = 1 / scales.clamp_min(_SMALLEST)
    numbers = (groups * inverse[..., None]).round_().clamp_(-MOST_INT8, MOST_INT8).to(torch.int8)
    return IntGroups(numbers.view(num_rows, -1), scales, None, size)
