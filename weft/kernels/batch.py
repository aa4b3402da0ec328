"""The inputs of a step, on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.payloads import BFLOAT16
from weft.payloads import Tensor as ClientTensor


class HeadShape(NamedTuple):
    """The layout of a fused qkv row: queries, then keys, then values, head after head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of the keys and the values of a token together."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class HeadNorms(NamedTuple):
    """The weights [head dim] of the RMSNorm of every head of the queries and of the keys."""

    query: Tensor
    key: Tensor
    eps: float


class AttentionBatch(NamedTuple):
    """The sequences of one step. Their new tokens follow each other in the step's token dimension.

    Sequences with one new token come first: `num_decodes` of them. A kernel may treat them as a batch. The others may
    have any number of new tokens, also none; the outputs of tokens behind the last sequence are unused, but finite.
    """

    num_decodes: int
    query_starts: Tensor
    """[sequences + 1] int64: where each sequence's new tokens begin, and where the last one's end."""
    lengths: Tensor
    """[sequences] int64: tokens of each sequence that are in the cache once this step's are written."""
    block_tables: Tensor
    """[sequences, blocks] int64: the blocks of each sequence, padded with the null block."""
    slots: Tensor
    """[tokens] int64: the cache slot (block * block size + offset) of each new token."""
    is_one_prompt: bool = False
    """True when the step is one sequence, from its first token on."""


class InputEmbeds(NamedTuple):
    """The input embeds are rows that enter the model in the place of the embeddings of some of a step's tokens."""

    at: Tensor
    """[rows] int64: their places among the step's tokens."""
    values: Tensor
    """[rows, hidden size], of the model's dtype."""


class AdapterGroups(NamedTuple):
    """The tokens of a step by the slots of their LoRA adapters; those without an adapter are the first group."""

    order: Tensor
    """[tokens] int64: the tokens, group after group."""
    starts: Tensor
    """[slots + 2] int64: where each group begins in `order`, and where the last one ends."""


def client_tensor(tensor: ClientTensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Return a client's tensor, or rows of it, on the host, in the dtype that it was sent in."""
    values = torch.from_numpy(tensor.array()[start:stop].copy())
    return values.view(torch.bfloat16) if tensor.dtype == BFLOAT16 else values
