"""The tensors of a dense decoder, as every kernel and the model see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from weft.kernels.batch import HeadNorms
from weft.kernels.fp8 import Fp8Weight, ScaledRows
from weft.kernels.int_weights import IntWeight
from weft.kernels.quantised import QuantisedWeight

if TYPE_CHECKING:
    from weft.kernels.rotated import RotatedWeight

ScaledWeight: TypeAlias = "Fp8Weight | RotatedWeight"
PlainWeight: TypeAlias = "Tensor | ScaledWeight"
"""A weight, and below its inputs, whose rows lie one behind the other: floats, or eight bits with scales."""
PlainRows: TypeAlias = Tensor | ScaledRows
Weight: TypeAlias = "PlainWeight | QuantisedWeight | IntWeight"
"""The weight of a linear layer."""
Table: TypeAlias = Tensor | QuantisedWeight
"""Embeddings, or the weight of the head."""


def numbers_of(plain: PlainWeight | PlainRows) -> Tensor:
    return plain if isinstance(plain, Tensor) else plain.numbers


def scales_of(plain: PlainWeight | PlainRows) -> Tensor | None:
    return None if isinstance(plain, Tensor) else plain.scales


class LayerWeights(NamedTuple):
    """One decoder layer. `qkv` and `gate_up` are fused along their output dimension."""

    attention_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Weight
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight

    def head_norms(self, eps: float) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm, self.k_norm, eps)


class DecoderWeights(NamedTuple):
    """A whole decoder. `head` is `embedding` itself where the two are tied, or made of it where it is quantised."""

    embedding: Table
    layers: list[LayerWeights]
    norm: Tensor
    head: Weight
    rope_factors: Tensor | None = None
    """Divisors of the rotary frequencies, where the checkpoint has its own."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is not quantised."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for weight in self.all_weights() for tensor in _tensors(weight)]
        return sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in tensors}.values())

    def all_weights(self) -> list[Weight]:
        whole: list[Weight] = [self.embedding, self.norm, self.head]
        return [*whole, *(weight for layer in self.layers for weight in layer if weight is not None)]


class LowRank(NamedTuple):
    """The low-rank weights of an adapter for a linear layer: `expand` times `shrink` is added, its scale included."""

    shrink: Tensor
    """[rank, in]: the ranks of a fused weight's parts follow each other."""
    expand: tuple[Tensor, ...]
    """[out, rank] of each part; its rank is 0 where it is not adapted."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(part.shape[1] for part in self.expand)


class SlotLowRank(NamedTuple):
    """The low-rank weights of a linear layer for every slot of an adapter. The parts of a fused weight have as many
    ranks each, and what an adapter does not need of them is zero."""

    shrink: Tensor
    """[slots, parts * rank, in]."""
    expand: Tensor
    """[slots, out, rank]: an output has the ranks of the part that it belongs to."""
    ends: tuple[int, ...]
    """The outputs of each part end there."""

    @property
    def rank(self) -> int:
        return self.expand.shape[2]

    def write(self, slot: int, added: LowRank | None) -> None:
        """Copy an adapter's weights to a slot, or zeros."""
        self.shrink[slot].zero_()
        self.expand[slot].zero_()
        if added is None:
            return
        first = begin = 0
        for part, (expand, end) in enumerate(zip(added.expand, self.ends, strict=True)):
            rank, own = expand.shape[1], part * self.rank
            self.shrink[slot, own : own + rank] = added.shrink[first : first + rank]
            self.expand[slot, begin:end, :rank] = expand
            first, begin = first + rank, end


class AdaptedLayer(NamedTuple):
    """The low-rank weights of one decoder layer; None for a weight that is not adapted."""

    qkv: LowRank | None
    output: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


class AdapterWeights:
    """The weights of a whole adapter, for one model."""

    def __init__(self, layers: list[AdaptedLayer]) -> None:
        self.layers = layers

    @property
    def max_rank(self) -> int:
        """The most ranks that a layer's weight has, those of all its parts together."""
        return max((len(one.shrink) for layer in self.layers for one in layer if one is not None), default=0)

    @property
    def max_part_rank(self) -> int:
        return max((rank for layer in self.layers for one in layer if one is not None for rank in one.ranks), default=0)

    @property
    def num_bytes(self) -> int:
        added = [one for layer in self.layers for one in layer if one is not None]
        return sum(matrix.nbytes for one in added for matrix in (one.shrink, *one.expand))


class AdaptedRun(NamedTuple):
    """A run of a step's tokens that use one adapter."""

    weights: AdapterWeights
    first: int
    num_tokens: int


def _tensors(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else [held for held in weight if isinstance(held, Tensor)]
