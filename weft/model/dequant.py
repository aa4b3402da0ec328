"""Reads GGUF's block formats, in torch: the whole numbers that a file holds, or the floats that they stand for, which
are equal to the bit with the format's definition.

A tensor is a run of blocks; a block holds `block_size` weights as packed integers and the half-precision scales
that turn them back. A product and a sum are rounded one after the other: a fused multiply-add would differ in the last
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from weft.errors import ModelError

CHUNK_WEIGHTS = 1 << 20
"""Weights decoded at a time, which bounds the scratch memory to a few megabytes."""


class Groups(NamedTuple):
    """Weights as whole numbers: each is its number times the scale of its group of neighbours, plus their minimum."""

    numbers: Tensor
    """uint8, [blocks, block size]; in pairs, [blocks, block size / 2]."""
    scales: Tensor
    """float32, [blocks, groups]."""
    minima: Tensor
    zero: int = 0
    """The number that stands for 0, which the minima follow from; 0 where they are the file's own."""
    in_pairs: bool = False
    """True for two numbers in a byte: the low bits of a block's bytes are its first half, the high ones the second."""

    def decode_into(self, out: Tensor) -> None:
        groups = out.copy_(_nibbles(self.numbers) if self.in_pairs else self.numbers).view(*self.scales.shape, -1)
        if self.zero:
            groups.sub_(self.zero).mul_(self.scales.unsqueeze(2))
        else:
            groups.mul_(self.scales.unsqueeze(2)).add_(self.minima.unsqueeze(2))


class BlockFormat(Struct, frozen=True):
    """A block format, and how its blocks, (blocks, block_bytes) of uint8, are read."""

    block_size: int
    block_bytes: int
    unpack: Callable[[Tensor], Groups] | None = None
    floats: torch.dtype = torch.float32
    """The type of weights that are no whole numbers."""
    bits: int = 8
    """The size of the numbers, four or eight."""
    group_size: int = 32
    half_scales: bool = True
    """True where scales and minima are half-precision floats to the bit."""

    def decode(self, blocks: Tensor, out: Tensor) -> None:
        """Fill a (blocks, block_size) tensor of float32."""
        if self.unpack is None:
            out.copy_(blocks.view(self.floats))
        else:
            self.unpack(blocks).decode_into(out)


def block_format(type_name: str) -> BlockFormat:
    known = FORMATS.get(type_name)
    if known is None:
        raise ModelError(f"Weights of type {type_name} are not supported; supported: {', '.join(FORMATS)}.")
    return known


def blocks_of(raw: Tensor, type_name: str, shape: Sequence[int]) -> Tensor:
    """Return the blocks of a tensor, uint8 as in the file, after a check that they are as many as its shape needs."""
    known = block_format(type_name)
    num_blocks, rest = divmod(math.prod(shape), known.block_size)
    if rest or raw.dtype != torch.uint8 or raw.numel() != num_blocks * known.block_bytes:
        raise ModelError(
            f"{raw.numel()} bytes of {raw.dtype} cannot be {type_name} weights of shape {tuple(shape)}: "
            f"{known.block_size} weights take {known.block_bytes} bytes."
        )
    return raw.reshape(num_blocks, known.block_bytes)


def unpack(raw: Tensor, type_name: str, shape: Sequence[int]) -> Groups:
    """Return the whole numbers that `raw` (uint8, as in the file) encodes, all at once. Raises ModelError for a type of
    floats."""
    known, blocks = block_format(type_name), blocks_of(raw, type_name, shape)
    if known.unpack is None:
        raise ModelError(f"Weights of type {type_name} are no whole numbers.")
    return known.unpack(blocks)


def dequantise(raw: Tensor, type_name: str, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """Return the weights that `raw` (uint8, as in the file) encodes: float32, or rounded into `out`'s type.

    Scratch memory is bounded by CHUNK_WEIGHTS, whatever the size of the tensor. `out` is contiguous.
    """
    known, blocks = block_format(type_name), blocks_of(raw, type_name, shape)
    if out is None:
        out = torch.empty(tuple(shape), dtype=torch.float32, device=raw.device)
    elif tuple(out.shape) != tuple(shape) or not out.is_contiguous() or not out.is_floating_point():
        raise ModelError(f"out is {out.dtype} {tuple(out.shape)}; it must be contiguous floats of {tuple(shape)}.")

    target = out.view(len(blocks), known.block_size)
    chunk = CHUNK_WEIGHTS // known.block_size
    for start in range(0, len(blocks), chunk):
        part, into = blocks[start : start + chunk], target[start : start + chunk]
        if out.dtype == torch.float32:
            known.decode(part, into)
        else:
            scratch = torch.empty(into.shape, dtype=torch.float32, device=into.device)
            known.decode(part, scratch)
            into.copy_(scratch)
    return out


def _q8_0(blocks: Tensor) -> Groups:
    return _around(blocks[:, 2:] ^ 128, _half(blocks, 0), 128)


def _q4_0(blocks: Tensor) -> Groups:
    return _around(blocks[:, 2:], _half(blocks, 0), 8)._replace(in_pairs=True)


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(blocks[:, 4:], _half(blocks, 0), _half(blocks, 2), in_pairs=True)


def _q5_0(blocks: Tensor) -> Groups:
    return _around(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), 16)


def _q5_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: Tensor) -> Groups:
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    return _scaled(blocks, torch.stack([packed & 15, packed >> 4], dim=2))


def _q5_k(blocks: Tensor) -> Groups:
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    high = (blocks[:, 16:48].unsqueeze(1) >> _shifts(0, 1, 2, 3, 4, 5, 6, 7, like=blocks).view(1, 8, 1) & 1) << 4
    return _scaled(blocks, torch.stack([packed & 15 | high[:, 0::2], packed >> 4 | high[:, 1::2]], dim=2))


def _q6_k(blocks: Tensor) -> Groups:
    # Two halves of 128 weights: four runs of 32, the low 4 bits from 64 bytes, the high 2 bits from 32 bytes.
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> _shifts(0, 4, like=blocks).view(1, 1, 2, 1) & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(0, 2, 4, 6, like=blocks).view(1, 1, 4, 1) & 3
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    return _around(low.view(-1, 256) | high.view(-1, 256) << 4, scales, 32)


def _around(numbers: Tensor, scales: Tensor, zero: int) -> Groups:
    """Return numbers that stand around a zero. Their minima are exact."""
    return Groups(numbers, scales, scales * -zero, zero)


def _scaled(blocks: Tensor, numbers: Tensor) -> Groups:
    """Read the eight 6-bit scales and minima of a Q4_K or Q5_K block, packed in bytes 4 to 16."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=1).float().mul_(_half(blocks, 0))
    minima = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=1).float().mul_(_half(blocks, 2))
    return Groups(numbers.view(-1, 256), scales, minima.neg_())


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 32 numbers: the low halves of 16 bytes are the first 16, the high halves the others."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the fifth bits of a block's 32 weights, as 0 or 16: bit i is that of weight i."""
    bits = packed.unsqueeze(2) >> _shifts(0, 1, 2, 3, 4, 5, 6, 7, like=packed) & 1
    return bits.view(-1, 32) << 4


def _shifts(*bits: int, like: Tensor) -> Tensor:
    return torch.tensor(bits, dtype=torch.uint8, device=like.device)


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4),
    "F16": BlockFormat(1, 2, floats=torch.float16),
    "BF16": BlockFormat(1, 2, floats=torch.bfloat16),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0, bits=4),
    "Q4_1": BlockFormat(32, 20, _q4_1, bits=4),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q4_K": BlockFormat(256, 144, _q4_k, bits=4, half_scales=False),
    "Q5_K": BlockFormat(256, 176, _q5_k, half_scales=False),
    "Q6_K": BlockFormat(256, 210, _q6_k, group_size=16, half_scales=False),
}
