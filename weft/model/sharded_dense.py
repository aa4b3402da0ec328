"""The dense decoder of one rank: its part of every layer, and the sums over all ranks that make the layers whole.

Each rank has the whole residual stream. There is one all-reduce after attention and one after the MLP, one of the
embeddings, as every token's is with one rank, and one gathering of the logits, which the first rank alone needs.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import InputEmbeds, Ops
from weft.kernels.batch import AdapterGroups
from weft.kernels.weights import DecoderWeights, SlotLowRank, Weight
from weft.model.dense import DenseConfig, DenseModel
from weft.model.shard import Shard


class Collectives(Protocol):
    """The collective operations of the ranks that hold one model, each called by all of them in the same order."""

    def all_reduce(self, tensor: Tensor, residual: Tensor | None = None) -> None:
        """Replace a tensor by the sum of all ranks' ones; or add that to a residual, and leave anything in it."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return all ranks' tensors of this shape, on the first rank; on others an empty list."""


class ShardedDense(DenseModel):
    def __init__(
        self,
        whole: DenseConfig,
        shard: Shard,
        weights: DecoderWeights,
        ops: Ops,
        ranks: Collectives,
        max_model_len: int,
    ) -> None:
        def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> None:
            ranks.all_reduce(ops.linear(x, weight, bias), residual)

        sums = ops._replace(linear_add=linear_add).with_mlp_in_parts()
        super().__init__(shard.config(whole), weights, sums, max_model_len)
        self.whole, self.shard = whole, shard
        self._ranks = ranks
        self._tokens = [shard.share(whole.vocab_size, rank) for rank in range(shard.size)]
        """The first token of each rank, and the one behind its last."""

    def embed(self, tokens: Tensor, input_embeds: InputEmbeds | None = None) -> Tensor:
        first, stop = self._tokens[self.shard.rank]
        is_other = (tokens < first) | (tokens >= stop)
        embedded = super().embed((tokens - first).masked_fill(is_other, 0))
        embedded.masked_fill_(is_other[:, None], 0)
        self._ranks.all_reduce(embedded)
        if input_embeds is not None:
            embedded[input_embeds.at] = input_embeds.values
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits on the first rank; on others something of another width."""
        return self.gathered(super().logits(hidden))

    def gathered(self, own: Tensor) -> Tensor:
        """Return the logits of all ranks side by side, on the first rank; on others their own."""
        sizes = [stop - first for first, stop in self._tokens]
        gathered = self._ranks.gather(F.pad(own, (0, max(sizes) - own.shape[1])).contiguous())
        return torch.cat([part[:, :size] for part, size in zip(gathered, sizes, strict=True)], 1) if gathered else own

    def all_reduce(self, tensor: Tensor) -> None:
        self._ranks.all_reduce(tensor)

    def add_adapted(
        self, x: Tensor, weight: Weight, bias: Tensor | None, added: SlotLowRank, groups: AdapterGroups, out: Tensor
    ) -> None:
        product = self.ops.linear(x, weight, bias)
        self.ops.lora_expand_add(self.ops.lora_shrink(x, added, groups), added, groups, product)
        self._ranks.all_reduce(product, out)
