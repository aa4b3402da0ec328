"""The dense decoder: Llama, Mistral, DeepSeek-LLM, Qwen2, Qwen3 and SmolLM2. Their differences are data."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from weft.kernels import AttentionBatch, HeadShape, Ops
from weft.kernels.weights import DecoderWeights
from weft.model.rope import RopeScaling, rotations


class DenseConfig(Struct, frozen=True, kw_only=True):
    """The geometry of a dense decoder, and what its family does differently."""

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


class DenseModel:
    """The forward pass, over a paged cache: no state of its own but weights and rotations."""

    def __init__(self, config: DenseConfig, weights: DecoderWeights, ops: Ops, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        device = weights.embedding.device
        self.rotations = rotations(
            config.head_dim, config.rope_theta, config.rope_scaling, max_model_len, weights.rope_factors
        ).to(device)

    def forward(self, tokens: Tensor, positions: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> Tensor:
        """The final hidden states of the step's tokens. Writes their keys and values to the cache
        [layers, blocks, block size, 2, kv heads, head dim]."""
        ops, eps, heads = self.ops, self.config.norm_eps, self.config.heads
        rotation = self.rotations[positions]
        residual = self.weights.embedding[tokens]
        x = torch.zeros_like(residual)
        for layer, kv in zip(self.weights.layers, kv_cache, strict=True):
            x = ops.add_rms_norm(x, residual, layer.attention_norm, eps)
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
            if layer.q_norm is not None and layer.k_norm is not None:
                self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            ops.rotate_and_store(qkv, heads, rotation, kv, batch.slots)
            x = ops.linear(ops.attention(qkv, heads, kv, batch), layer.output, layer.output_bias)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up, None)), layer.down, None)
        return ops.add_rms_norm(x, residual, self.weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.weights.head, None)

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        heads = self.config.heads
        keys_end = heads.q_size + heads.kv_size // 2
        for part, weight in ((qkv[:, : heads.q_size], q_norm), (qkv[:, heads.q_size : keys_end], k_norm)):
            by_head = part.view(len(part), -1, heads.head_dim)
            by_head.copy_(self.ops.rms_norm(by_head, weight, self.config.norm_eps))
