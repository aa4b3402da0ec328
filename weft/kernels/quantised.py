"""Linear weights as whole numbers of four or eight bits, interleaved so that a vector register holds several rows.

A panel is `lanes` rows, one for each number of a vector register. Along the columns it is cut into blocks of 32: first
the numbers, four neighbours of a row after four of the next; then the scales of the rows, and then their minima. A
block is what a kernel reads at a time, and all of a weight is read in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
"""Columns of a block."""
INPUT_GROUP = 16
"""Columns of an input that share a scale: half a block. With a whole one SmolLM2's perplexity was 0.7 % above that of
floats, with half of one it is 0.3 %."""


class PanelFormat(NamedTuple):
    """The numbers of a weight, and how fine its scales are."""

    bits: int
    group_size: int = 32
    half_scales: bool = False
    """True for scales and minima of half precision, else float32."""

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float16 if self.half_scales else torch.float32

    @property
    def scale_bytes(self) -> int:
        return self.scale_type.itemsize

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row in a block."""
        return BLOCK * self.bits // 8 + 2 * self.scale_bytes * BLOCK // self.group_size


FORMATS = (
    PanelFormat(4, half_scales=True),
    PanelFormat(4),
    PanelFormat(8, half_scales=True),
    PanelFormat(8, group_size=16),
)
"""Those that kernels know, each of which can hold what those before it can with as many bits."""


class PanelLayout(NamedTuple):
    """The layout that a processor's kernels read."""

    lanes: int
    """Rows of a panel."""
    is_signed: bool = False
    """True where they know no unsigned numbers of eight bits."""


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
        stored = self.panels[..., size:].contiguous().view(self.format.scale_type)
        laid = stored.view(num_panels, num_blocks, 2, BLOCK // group_size, lanes).float().permute(2, 0, 4, 1, 3)
        scale, minimum = laid.reshape(2, num_rows, -1).repeat_interleave(group_size, dim=2)
        return values.mul_(scale).add_(minimum)[: self.num_rows]

    def rows(self, at: Tensor) -> Tensor:
        """Return some rows as floats."""
        lanes = self.layout.lanes
        found = self._replace(panels=self.panels[at // lanes], num_rows=len(at) * lanes).dequantised()
        return found.view(len(at), lanes, -1)[torch.arange(len(at)), at % lanes]


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


def format_for(bits: int, group_size: int, *, half_scales: bool) -> PanelFormat:
    """Return the smallest format that holds such numbers exactly."""
    return next(
        known
        for known in FORMATS
        if known.bits >= bits and known.group_size <= group_size and known.half_scales <= half_scales
    )


def pack(numbers: Tensor, scales: Tensor, minima: Tensor, wanted: PanelFormat, layout: PanelLayout) -> QuantisedWeight:
    """Interleave numbers, uint8 [rows, columns], and the float32 scales and minima of their groups, [rows, groups].
    The columns are whole blocks.

    Raises OverflowError where a scale does not fit half precision, which the format asks for.
    """
    num_rows, num_columns = numbers.shape
    lanes, is_signed = layout
    if more := -num_rows % lanes:
        numbers, scales, minima = (F.pad(one, (0, 0, 0, more)) for one in (numbers, scales, minima))
    num_panels, num_blocks = (num_rows + more) // lanes, num_columns // BLOCK
    if is_signed and numbers.max() > 127:
        # The minima of such numbers are 128 scales below 0, and become 0.
        numbers, minima = numbers ^ 128, minima + scales * 128
    words = numbers.view(num_panels, lanes, num_blocks, -1, 4).permute(0, 2, 3, 1, 4)
    if wanted.bits == 4:
        low, high = words.chunk(2, dim=2)
        words = low | high << 4
    panels = torch.empty(num_panels, num_blocks, lanes * wanted.bytes_per_row, dtype=torch.uint8)
    size = lanes * BLOCK * wanted.bits // 8
    panels[..., :size] = words.reshape(num_panels, num_blocks, size)
    fine = BLOCK // wanted.group_size
    both = torch.stack([scales, minima]).repeat_interleave(fine * num_blocks // scales.shape[1], dim=2)
    stored = both.view(2, num_panels, lanes, num_blocks, fine).permute(1, 3, 0, 4, 2).to(wanted.scale_type)
    if not torch.isfinite(stored).all() and torch.isfinite(both).all():
        raise OverflowError("A scale is too large for half precision.")
    panels[..., size:] = stored.reshape(num_panels, num_blocks, -1).contiguous().view(torch.uint8)
    return QuantisedWeight(panels, wanted, layout, num_rows)
