"""The tensors of a dense decoder, as every kernel and the model see them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.kernels.batch import HeadNorms


class LayerWeights(NamedTuple):
    """One decoder layer. `qkv` and `gate_up` are fused along their output dimension."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def head_norms(self, eps: float) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm, self.k_norm, eps)


class DecoderWeights(NamedTuple):
    """A whole decoder. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    rope_factors: Tensor | None = None
    """Divisors of the rotary frequencies, where the checkpoint brings its own."""

    @property
    def num_bytes(self) -> int:
        tensors = [self.embedding, self.norm, self.head]
        tensors += [tensor for layer in self.layers for tensor in layer if tensor is not None]
        return sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in tensors}.values())
