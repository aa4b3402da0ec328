"""The forward pass of a step in which some tokens have LoRA adapters, for every kernel table.

Adapters are in slots, whose addresses do not change: a CUDA graph of such a step is valid whichever adapters are in
them. All tokens go through the model's own linear layers, and the low-rank products of those with an adapter are added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.kernels import AttentionBatch, InputEmbeds
from weft.kernels.batch import AdapterGroups
from weft.kernels.kv_cache import KvCache
from weft.kernels.weights import AdapterWeights, SlotLowRank
from weft.model.dense import DenseModel


class SlotLayer(NamedTuple):
    """The low-rank weights of one decoder layer for every slot."""

    qkv: SlotLowRank
    output: SlotLowRank
    gate_up: SlotLowRank
    down: SlotLowRank


class AdapterSlots:
    """The slots hold adapters of a model on its device, up to a rank."""

    def __init__(self, model: DenseModel, count: int, rank: int) -> None:
        heads, hidden, middle = model.config.heads, model.config.hidden_size, model.config.intermediate_size
        keys_end = heads.q_size + heads.kv_size // 2

        def empty(ends: tuple[int, ...], inputs: int) -> SlotLowRank:
            kind: dict[str, Any] = {"dtype": model.weights.dtype, "device": model.weights.device}
            shrink = torch.zeros(count, len(ends) * rank, inputs, **kind)
            return SlotLowRank(shrink, torch.zeros(count, ends[-1], rank, **kind), ends)

        self.count = count
        self.rank = rank
        self.layers = [
            SlotLayer(
                qkv=empty((heads.q_size, keys_end, heads.q_size + heads.kv_size), hidden),
                output=empty((hidden,), heads.q_size),
                gate_up=empty((middle, 2 * middle), hidden),
                down=empty((hidden,), middle),
            )
            for _ in model.weights.layers
        ]

    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Copy an adapter to a slot, in the place of what was there."""
        for ours, theirs in zip(self.layers, weights.layers, strict=True):
            for weight, added in zip(ours, theirs, strict=True):
                weight.write(slot, added)


def forward_adapted(
    model: DenseModel,
    tokens: Tensor,
    positions: Tensor,
    kv_cache: KvCache,
    batch: AttentionBatch,
    slots: AdapterSlots,
    groups: AdapterGroups,
    input_embeds: InputEmbeds | None = None,
) -> Tensor:
    """Compute `DenseModel.forward` with adapters."""
    ops, eps, heads = model.ops, model.config.norm_eps, model.config.heads
    rotation = model.rotations[positions]
    residual = model.embed(tokens, input_embeds)
    for layer, added, kv in zip(model.weights.layers, slots.layers, kv_cache, strict=True):
        normal = ops.rms_norm(residual, layer.attention_norm, eps)
        ranks = ops.lora_shrink(normal, added.qkv, groups)
        qkv = ops.linear(normal, layer.qkv, layer.qkv_bias)
        ops.lora_expand_add(ranks, added.qkv, groups, qkv)
        ops.rotate_and_store(qkv, heads, rotation, kv, batch.slots, layer.head_norms(eps))
        attended = ops.attention(qkv, heads, kv, batch)
        model.add_adapted(attended, layer.output, layer.output_bias, added.output, groups, residual)
        normal = ops.rms_norm(residual, layer.mlp_norm, eps)
        ranks = ops.lora_shrink(normal, added.gate_up, groups)
        hidden = ops.lora_expand_gate(ops.linear(normal, layer.gate_up, None), ranks, added.gate_up, groups)
        model.add_adapted(hidden, layer.down, None, added.down, groups, residual)
    return ops.rms_norm(residual, model.weights.norm, eps)
