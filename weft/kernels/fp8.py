"""Linear weights of eight-bit floats (e4m3), with a scale for each row of outputs, or for each 128 columns of it; and a
KV cache of such floats.

Checkpoints with one scale for a whole tensor, or for blocks of 128 x 128, are held so too: their scales are repeated.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

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


class Fp8Rows(NamedTuple):
    """The input of a linear layer as e4m3 numbers, with a scale for each row."""

    numbers: Tensor
    """e4m3, [rows, columns]."""
    scales: Tensor
    """float32, [rows, 1]."""


FloatWeight: TypeAlias = Tensor | Fp8Weight
FloatRows: TypeAlias = Tensor | Fp8Rows


def numbers_of(floats: FloatWeight | FloatRows) -> Tensor:
    return floats if isinstance(floats, Tensor) else floats.numbers


def scales_of(floats: FloatWeight | FloatRows) -> Tensor | None:
    return None if isinstance(floats, Tensor) else floats.scales


def quantise_rows(x: Tensor) -> Fp8Rows:
    """Return x [rows, columns] as e4m3. What is no number stays so."""
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(SMALLEST_SCALE)
    return Fp8Rows((wide / scales).to(E4M3), scales)


def rounded_rows(x: Tensor) -> Tensor:
    """Return x as kernels of several rows take it."""
    numbers, scales = quantise_rows(x)
    return (numbers.float() * scales).to(x.dtype)


def fp8_weight(weight: Tensor) -> Fp8Weight:
    """Return the nearest weight with one scale for each row of outputs."""
    numbers, scales = quantise_rows(weight)
    return Fp8Weight(numbers, scales.T.contiguous())


class Fp8Cache(NamedTuple):
    """The KV cache of a layer as e4m3 numbers. Every token has a scale for each head of its keys and its values, a
    power of two: to multiply by it rounds nothing."""

    numbers: Tensor
    """e4m3, [blocks, 2, kv heads, block size, head dim]: what a kernel reads of a block for one head is in one
    piece."""
    scales: Tensor
    """bfloat16, [blocks, kv heads, block size, 2]: of the key and of the value, which a kernel loads as one word."""

    def write(self, slots: Tensor, keys_values: Tensor) -> None:
        """Write keys and values [tokens, 2, kv heads, head dim] to their slots."""
        size = block_size_of(self)
        blocks, offsets = slots // size, slots % size
        numbers, scales = quantise_heads(keys_values)
        # Torch does not index e4m3 on every device.
        self.numbers.view(torch.uint8)[blocks, :, :, offsets] = numbers.view(torch.uint8)
        self.scales[blocks, :, offsets] = scales.transpose(1, 2)

    def read(self, blocks: Tensor) -> Tensor:
        """Return blocks as floats, [blocks, block size, 2, kv heads, head dim]."""
        numbers = self.numbers.view(torch.uint8)[blocks].view(E4M3).float()
        wide = numbers * self.scales[blocks].permute(0, 3, 1, 2)[..., None].float()
        return wide.permute(0, 3, 1, 2, 4)


LayerCache: TypeAlias = Tensor | Fp8Cache
"""The KV cache of a layer: a tensor [blocks, block size, 2, kv heads, head dim], or e4m3 numbers with scales."""
KvCache: TypeAlias = Tensor | list[Fp8Cache]
"""That of all layers: one tensor, or one cache for each."""


def block_size_of(cache: LayerCache) -> int:
    return cache.shape[1] if isinstance(cache, Tensor) else cache.numbers.shape[3]


def zero_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> KvCache:
    """Return a cache of zeros, of shape [layers, blocks, block size, 2, kv heads, head dim]."""
    if dtype != E4M3:
        return torch.zeros(shape, dtype=dtype, device=device)
    layers, blocks, size, parts, kv_heads, head_dim = shape
    numbers = torch.zeros(layers, blocks, parts, kv_heads, size, head_dim, dtype=torch.uint8, device=device).view(E4M3)
    scales = torch.zeros(layers, blocks, kv_heads, size, parts, dtype=torch.bfloat16, device=device)
    return [Fp8Cache(*layer) for layer in zip(numbers, scales, strict=True)]


E4M3_EXPONENT, ABOVE_LARGEST = 8, 0x1FFFFF
"""E4M3's largest number is 1.75 times 2**8. Added to the bits of a float32, the second raises the exponent of those
whose mantissa is above 1.75."""


def quantise_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads [..., head dim] as e4m3 numbers, and their scales [...]: the least powers of two in bfloat16 with
    which no quotient is too large for e4m3."""
    wide = x.float()
    bits = wide.abs().amax(-1).view(torch.int32)
    scales = ((((bits + ABOVE_LARGEST) >> 23) - E4M3_EXPONENT).clamp_min(1) << 23).view(torch.float32)
    return (wide / scales[..., None]).to(E4M3), scales.bfloat16()
