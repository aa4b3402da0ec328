"""Rotary position embeddings: the table of rotations of every position, scaled as the architecture needs."""

from __future__ import annotations

import math
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor


class RopeScaling(Struct, frozen=True, kw_only=True):
    """The scaling by which a model is extended past the context that it was first trained on."""

    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rotations(
    head_dim: int, theta: float, scaling: RopeScaling, num_positions: int, factors: Tensor | None = None
) -> Tensor:
    """Return [positions, head dim / 2] complex numbers: multiplied by one, a rotary pair is turned to that position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = _scaled(1.0 / (theta**exponents), scaling)
    if factors is not None:
        frequencies = frequencies / factors.float().cpu()
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_position / wavelengths
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        # 0 where a full turn is longer than the trained context (slow down), 1 where it is short (leave alone).
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return frequencies
