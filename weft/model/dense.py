"""The dense decoder runs Llama, Mistral, DeepSeek-LLM, Qwen2, Qwen3 and SmolLM2: their differences are data."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct
from torch import Tensor

from weft.kernels import AttentionBatch, HeadShape, InputEmbeds, Ops
from weft.kernels.batch import AdapterGroups
from weft.kernels.kv_cache import KvCache
from weft.kernels.weights import DecoderWeights, SlotLowRank, Weight
from weft.model.rope import RopeScaling, rotations


class DenseConfig(Struct, frozen=True, kw_only=True):
    """The geometry of a dense decoder, and what its architecture does differently."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim)


class LastTokens(NamedTuple):
    """Tokens of a step, each the last one of its sequence so far."""

    at: Tensor
    """Their places among the step's tokens."""
    batch: AttentionBatch
    """Their sequences, each with this one as its new token."""


class DenseModel:
    """The forward pass over a paged KV cache; its only state is the weights and the rotations."""

    def __init__(self, config: DenseConfig, weights: DecoderWeights, ops: Ops, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        device = weights.device
        self.rotations = rotations(
            config.head_dim, config.rope_theta, config.rope_scaling, max_model_len, weights.rope_factors
        ).to(device)

    def embed(self, tokens: Tensor, input_embeds: InputEmbeds | None = None) -> Tensor:
        """Return the embeddings of tokens, and the input embeds in the place of some."""
        embedding = self.weights.embedding
        embedded = embedding[tokens] if isinstance(embedding, Tensor) else embedding.rows(tokens)
        if input_embeds is not None:
            embedded[input_embeds.at] = input_embeds.values
        return embedded

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv_cache: KvCache,
        batch: AttentionBatch,
        last: LastTokens | None = None,
        input_embeds: InputEmbeds | None = None,
    ) -> Tensor:
        """Return the final hidden states of the step's tokens, or of the `last` ones only: the last layer then computes
        no others. Writes the keys and values of all tokens to the cache [layers, blocks, block size, 2, kv heads, head
        dim]."""
        ops, eps, heads = self.ops, self.config.norm_eps, self.config.heads
        rotation = self.rotations[positions]
        residual = self.embed(tokens, input_embeds)
        slots = batch.slots
        for layer, kv in zip(self.weights.layers, kv_cache, strict=True):
            qkv = ops.norm_linear(residual, layer.attention_norm, eps, layer.qkv, layer.qkv_bias)
            ops.rotate_and_store(qkv, heads, rotation, kv, slots, layer.head_norms(eps))
            if last is not None and layer is self.weights.layers[-1]:
                qkv, residual, batch = qkv[last.at], residual[last.at], last.batch
            ops.linear_add(ops.attention(qkv, heads, kv, batch), layer.output, layer.output_bias, residual)
            ops.add_mlp(residual, layer.mlp_norm, eps, layer.gate_up, layer.down)
        return ops.rms_norm(residual, self.weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.weights.head, None)

    def add_adapted(
        self, x: Tensor, weight: Weight, bias: Tensor | None, added: SlotLowRank, groups: AdapterGroups, out: Tensor
    ) -> None:
        """Add linear(x, weight, bias), with what the slots' adapters add to it, to `out` in place."""
        ranks = self.ops.lora_shrink(x, added, groups)
        self.ops.linear_add(x, weight, bias, out)
        self.ops.lora_expand_add(ranks, added, groups, out)
