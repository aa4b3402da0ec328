"""The forward pass of a step in which some tokens have LoRA adapters, for every kernel table.

All tokens go through the model's own linear layers, in the ops of any other step; then the low-rank products of those
with an adapter are added. Only their feed-forward gates are computed twice: the gate's input is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from weft.kernels import AttentionBatch, GivenRows
from weft.kernels.fp8 import KvCache
from weft.kernels.reference import silu_mul
from weft.kernels.weights import AdapterWeights, LowRank
from weft.model.dense import DenseModel


class AdaptedTokens(NamedTuple):
    """Tokens of a step that have one adapter."""

    weights: AdapterWeights
    at: Tensor
    """Their places among the step's tokens."""


def forward_adapted(
    model: DenseModel,
    tokens: Tensor,
    positions: Tensor,
    kv_cache: KvCache,
    batch: AttentionBatch,
    adapted: Sequence[AdaptedTokens],
    given: GivenRows | None = None,
) -> Tensor:
    """Compute `DenseModel.forward` with adapters."""
    ops, eps, heads = model.ops, model.config.norm_eps, model.config.heads
    rotation = model.rotations[positions]
    residual = model.embed(tokens, given)
    for i, (layer, kv) in enumerate(zip(model.weights.layers, kv_cache, strict=True)):
        parts = [(one.at, one.weights.layers[i]) for one in adapted]
        qkv = ops.norm_linear(residual, layer.attention_norm, eps, layer.qkv, layer.qkv_bias)
        for at, added in parts:
            if added.qkv is not None:
                _add(qkv, at, ops.rms_norm(residual[at], layer.attention_norm, eps), added.qkv)
        ops.rotate_and_store(qkv, heads, rotation, kv, batch.slots, layer.head_norms(eps))
        attended = ops.attention(qkv, heads, kv, batch)
        ops.linear_add(attended, layer.output, layer.output_bias, residual)
        for at, added in parts:
            if added.output is not None:
                _add(residual, at, attended[at], added.output)
        hidden = ops.norm_gate_up(residual, layer.mlp_norm, eps, layer.gate_up)
        for at, added in parts:
            if added.gate_up is not None:
                normal = ops.rms_norm(residual[at], layer.mlp_norm, eps)
                hidden[at] = silu_mul(ops.linear(normal, layer.gate_up, None) + _product(normal, added.gate_up))
        ops.linear_add(hidden, layer.down, None, residual)
        for at, added in parts:
            if added.down is not None:
                _add(residual, at, hidden[at], added.down)
    return ops.rms_norm(residual, model.weights.norm, eps)


def _product(x: Tensor, added: LowRank) -> Tensor:
    return F.linear(F.linear(x, added.shrink), added.expand)


def _add(y: Tensor, at: Tensor, x: Tensor, added: LowRank) -> None:
    y.index_add_(0, at, _product(x, added))
