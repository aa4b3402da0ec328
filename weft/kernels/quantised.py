"""Linear weights as whole numbers of four or eight bits, interleaved so that a vector register holds several rows: in
panels, see `panel_format`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.panel_format import BLOCK, INPUT_GROUP, PanelFormat, PanelLayout


class QuantisedWeight(NamedTuple):
    """The weight of a linear layer in panels."""

    panels: Tensor
    """uint8, [panels, blocks, bytes]."""
    format: PanelFormat
    layout: PanelLayout
    num_rows: int
    """The last panel may have more."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.panels.shape[1] * BLOCK

    def dequantised(self) -> Tensor:
        """Return the weight as floats, [rows, columns]."""
        bits, group_size, _ = self.format
        lanes, is_signed = self.layout
        num_panels, num_blocks, _ = self.panels.shape
        num_rows = num_panels * lanes
        size = lanes * BLOCK * bits // 8
        packed = self.panels[..., :size].view(num_panels, num_blocks, -1, lanes, 4)
        halves = [packed & 15, packed >> 4] if bits == 4 else [packed]
        numbers = torch.cat(halves, dim=2).permute(0, 3, 1, 2, 4).reshape(num_rows, -1)
        values = numbers.view(torch.int8).float() if is_signed else numbers.float()
        stored = self.panels[..., size:].contiguous().view(_scale_type(self.format))
        laid = stored.view(num_panels, num_blocks, 2, BLOCK // group_size, lanes).float().permute(2, 0, 4, 1, 3)
        scale, minimum = laid.reshape(2, num_rows, -1).repeat_interleave(group_size, dim=2)
        return values.mul_(scale).add_(minimum)[: self.num_rows]

    def rows(self, at: Tensor) -> Tensor:
        """Return some rows as floats."""
        lanes = self.layout.lanes
        found = self._replace(panels=self.panels[at // lanes], num_rows=len(at) * lanes).dequantised()
        return found.view(len(at), lanes, -1)[torch.arange(len(at)), at % lanes]


def _scale_type(panel_format: PanelFormat) -> torch.dtype:
    return torch.float16 if panel_format.half_scales else torch.float32


def rounded(x: Tensor) -> Tensor:
    """Return an input as kernels take it: whole numbers of eight bits times the scale of their group."""
    groups = x.float().reshape(-1, INPUT_GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    whole = torch.floor(groups / scales.where(scales > 0, 1) + 0.5)
    return (whole * scales).view(x.shape).to(x.dtype)


def finely_rounded(x: Tensor) -> Tensor:
    """Return an input as kernels take it for queries, keys and values: what the first rounding leaves is rounded too.
    Most of the error of one rounding came from there: scores of attention are large, and an exponent."""
    first = rounded(x)
    return first + rounded(x - first)


def pack(
    numbers: Tensor,
    scales: Tensor,
    minima: Tensor,
    wanted: PanelFormat,
    layout: PanelLayout,
    *,
    in_pairs: bool = False,
) -> QuantisedWeight:
    """Interleave numbers, uint8 [rows, columns], and the float32 scales and minima of their groups, [rows, groups].
    The columns are whole blocks. With `in_pairs`, a byte has a number of a block's first half in its low bits and one
    of its second half in the others: [rows, columns / 2].

    Raises OverflowError where a scale does not fit half precision, which the format asks for.
    """
    if in_pairs and wanted.bits == 8:
        pairs = numbers.reshape(len(numbers), -1, BLOCK // 2)
        numbers, in_pairs = torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1), False
    num_rows, num_bytes = numbers.shape
    lanes, is_signed = layout
    if more := -num_rows % lanes:
        numbers, scales, minima = (F.pad(one, (0, 0, 0, more)) for one in (numbers, scales, minima))
    num_panels, num_blocks = (num_rows + more) // lanes, num_bytes * (2 if in_pairs else 1) // BLOCK
    if is_signed and wanted.bits == 8 and numbers.max() > 127:
        # The minima of such numbers are 128 scales below 0, and become 0.
        numbers, minima = numbers ^ 128, minima + scales * 128
    if wanted.bits == 4 and not in_pairs:
        low, high = numbers.view(len(numbers), num_blocks, 2, -1).unbind(2)
        numbers = low | high << 4
    # Four neighbours are moved as one.
    words = numbers.contiguous().view(torch.int32).view(num_panels, lanes, num_blocks, -1).permute(0, 2, 3, 1)
    panels = torch.empty(num_panels, num_blocks, lanes * wanted.bytes_per_row, dtype=torch.uint8)
    size = lanes * BLOCK * wanted.bits // 8
    panels.view(torch.int32)[..., : size // 4].view(words.shape).copy_(words)
    fine = BLOCK // wanted.group_size
    both = torch.stack([scales, minima]).repeat_interleave(fine * num_blocks // scales.shape[1], dim=2)
    stored = both.view(2, num_panels, lanes, num_blocks, fine).permute(1, 3, 0, 4, 2).to(_scale_type(wanted))
    if not torch.isfinite(stored).all() and torch.isfinite(both).all():
        raise OverflowError("A scale is too large for half precision.")
    panels[..., size:] = stored.reshape(num_panels, num_blocks, -1).contiguous().view(torch.uint8)
    return QuantisedWeight(panels, wanted, layout, num_rows)
