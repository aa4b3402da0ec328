"""Dequantises GGUF's block formats, in torch, equal to the bit with the format's definition.

A tensor is a run of blocks; a block holds `block_size` weights as packed integers and the half-precision scales
that turn them back. Each decoder fills a (blocks, block_size) float32 tensor from a (blocks, block_bytes) uint8
tensor. A product and a sum are rounded one after the other: a fused multiply-add would differ in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from weft.errors import ModelError

Decoder = Callable[[Tensor, Tensor], None]

CHUNK_WEIGHTS = 1 << 20
"""Weights decoded at a time, which bounds the scratch memory to a few megabytes."""


class BlockFormat(Struct, frozen=True):
    """A block format, and its decoder."""

    block_size: int
    block_bytes: int
    decode: Decoder


def dequantise(raw: Tensor, type_name: str, shape: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """Return the weights that `raw` (uint8, as in the file) encodes: float32, or rounded into `out`'s type.

    Scratch memory is bounded by CHUNK_WEIGHTS, whatever the size of the tensor. `out` is contiguous.
    """
    block_format = FORMATS.get(type_name)
    if block_format is None:
        raise ModelError(f"Weights of type {type_name} are not supported; supported: {', '.join(FORMATS)}.")
    num_weights = math.prod(shape)
    num_blocks, rest = divmod(num_weights, block_format.block_size)
    if rest or raw.dtype != torch.uint8 or raw.numel() != num_blocks * block_format.block_bytes:
        raise ModelError(
            f"{raw.numel()} bytes of {raw.dtype} cannot be {type_name} weights of shape {tuple(shape)}: "
            f"{block_format.block_size} weights take {block_format.block_bytes} bytes."
        )
    if out is None:
        out = torch.empty(tuple(shape), dtype=torch.float32, device=raw.device)
    elif tuple(out.shape) != tuple(shape) or not out.is_contiguous() or not out.is_floating_point():
        raise ModelError(f"out is {out.dtype} {tuple(out.shape)}; it must be contiguous floats of {tuple(shape)}.")

    blocks = raw.reshape(num_blocks, block_format.block_bytes)
    target = out.view(num_blocks, block_format.block_size)
    chunk = CHUNK_WEIGHTS // block_format.block_size
    for start in range(0, num_blocks, chunk):
        part, into = blocks[start : start + chunk], target[start : start + chunk]
        if out.dtype == torch.float32:
            block_format.decode(part, into)
        else:
            scratch = torch.empty(into.shape, dtype=torch.float32, device=into.device)
            block_format.decode(part, scratch)
            into.copy_(scratch)
    return out


def _float32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _float16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bfloat16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    groups = out.view(-1, 4, 2, 32)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    groups[:, :, 0] = packed & 15
    groups[:, :, 1] = packed >> 4
    _scale_groups(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    groups = out.view(-1, 4, 2, 32)
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    high = (blocks[:, 16:48].unsqueeze(1) >> _shifts(0, 1, 2, 3, 4, 5, 6, 7, like=blocks).view(1, 8, 1) & 1) << 4
    groups[:, :, 0] = packed & 15 | high[:, 0::2]
    groups[:, :, 1] = packed >> 4 | high[:, 1::2]
    _scale_groups(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    # Two halves of 128 weights: four runs of 32, the low 4 bits from 64 bytes, the high 2 bits from 32 bytes.
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> _shifts(0, 4, like=blocks).view(1, 1, 2, 1) & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(0, 2, 4, 6, like=blocks).view(1, 1, 4, 1) & 3
    out.copy_((low.view(-1, 256) | high.view(-1, 256) << 4).view(torch.int8) - 32)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _scale_groups(blocks: Tensor, out: Tensor) -> None:
    """Apply the eight 6-bit scales and minima of a Q4_K or Q5_K block, packed in bytes 4 to 16."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=1).float().mul_(_half(blocks, 0))
    minima = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=1).float().mul_(_half(blocks, 2))
    out.view(-1, 8, 32).mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2))


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Unpack 32 weights: the low halves of 16 bytes are the first 16, the high halves the others."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the fifth bits of a block's 32 weights, as 0 or 16: bit i is that of weight i."""
    bits = packed.unsqueeze(2) >> _shifts(0, 1, 2, 3, 4, 5, 6, 7, like=packed) & 1
    return bits.view(-1, 32) << 4


def _shifts(*bits: int, like: Tensor) -> Tensor:
    return torch.tensor(bits, dtype=torch.uint8, device=like.device)


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, _float32),
    "F16": BlockFormat(1, 2, _float16),
    "BF16": BlockFormat(1, 2, _bfloat16),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}
