"""The KV cache: floats of any type, or eight-bit numbers with a scale for each head of a token's keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from weft.kernels.fp8 import E4M3


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


class Int8Cache(NamedTuple):
    """The KV cache of a layer as whole numbers from -127 to 127, on a CPU."""

    numbers: Tensor
    """int8, [blocks, block size, 2, kv heads, head dim + INT8_SCALE_BYTES]: a head's numbers, then the bytes of its
    scale, a float32."""

    def write(self, slots: Tensor, keys_values: Tensor) -> None:
        """Write keys and values [tokens, 2, kv heads, head dim] to their slots. A head with what is no number, or
        infinite, has a scale that is no number."""
        wide = keys_values.float()
        most = wide.abs().amax(-1, keepdim=True)
        numbers = (wide * (127 / most.clamp_min(1e-37)) + 0.5).floor().nan_to_num(0).clamp(-127, 127).to(torch.int8)
        scales = most / 127 + (wide * 0).sum(-1, keepdim=True)
        self.numbers.view(-1, *self.numbers.shape[2:])[slots] = torch.cat((numbers, scales.view(torch.int8)), dim=-1)

    def read(self, blocks: Tensor) -> Tensor:
        """Return blocks as floats, [blocks, block size, 2, kv heads, head dim]."""
        rows = self.numbers[blocks]
        numbers, scales = rows[..., :-INT8_SCALE_BYTES], rows[..., -INT8_SCALE_BYTES:].contiguous()
        return numbers.float() * scales.view(torch.float32)


INT8_SCALE_BYTES = 4

LayerCache: TypeAlias = Tensor | Fp8Cache | Int8Cache
"""The KV cache of a layer: a tensor [blocks, block size, 2, kv heads, head dim], or numbers with scales."""
KvCache: TypeAlias = Tensor | list[Fp8Cache] | list[Int8Cache]
"""That of all layers: one tensor, or one cache for each."""


def block_size_of(cache: LayerCache) -> int:
    match cache:
        case Fp8Cache():
            return cache.numbers.shape[3]
        case Int8Cache():
            return cache.numbers.shape[1]
    return cache.shape[1]


def numbers_in(cache: LayerCache) -> Tensor:
    """Return the floats, or the e4m3 numbers, of a cache that GPUs have kernels for."""
    match cache:
        case Fp8Cache():
            return cache.numbers
        case Int8Cache():
            raise TypeError("GPUs have no kernels for a KV cache of int8.")
    return cache


def zero_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> KvCache:
    """Return a cache of zeros, of shape [layers, blocks, block size, 2, kv heads, head dim]."""
    if dtype != E4M3:
        return cache_in(torch.zeros(cache_bytes(shape, dtype), dtype=torch.uint8, device=device), shape, dtype)
    layers, blocks, size, parts, kv_heads, head_dim = shape
    numbers = torch.zeros(layers, blocks, parts, kv_heads, size, head_dim, dtype=torch.uint8, device=device).view(E4M3)
    scales = torch.zeros(layers, blocks, kv_heads, size, parts, dtype=torch.bfloat16, device=device)
    return [Fp8Cache(*layer) for layer in zip(numbers, scales, strict=True)]


def cache_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a cache of floats, or of int8."""
    *rows, head_dim = shape
    return math.prod(rows) * (head_dim * dtype.itemsize + (INT8_SCALE_BYTES if dtype == torch.int8 else 0))


def cache_in(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | list[Int8Cache]:
    """Return the cache of floats, or of int8, that these bytes are."""
    if dtype != torch.int8:
        return memory.view(dtype).view(shape)
    *rows, head_dim = shape
    return [Int8Cache(layer) for layer in memory.view(dtype).view(*rows, head_dim + INT8_SCALE_BYTES)]


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
