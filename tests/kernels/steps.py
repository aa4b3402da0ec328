"""Random models and random steps of them, for kernels to be tried on."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels import AttentionBatch
from weft.kernels.weights import DecoderWeights, LayerWeights
from weft.model.dense import DenseConfig

MAX_MODEL_LEN = 512


class Step(NamedTuple):
    tokens: Tensor
    positions: Tensor
    batch: AttentionBatch

    @property
    def last_rows(self) -> Tensor:
        return self.batch.query_starts[1:] - 1


def config(**changes: object) -> DenseConfig:
    defaults = {
        "family": "llama", "hidden_size": 48, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32,
        "intermediate_size": 80, "vocab_size": 101, "max_position": MAX_MODEL_LEN, "norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }  # fmt: skip
    return DenseConfig(**{**defaults, **changes})  # type: ignore[arg-type]


def random_weights(c: DenseConfig, seed: int = 0) -> DecoderWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    heads = c.heads
    layers = [
        LayerWeights(
            attention_norm=norm(c.hidden_size),
            qkv=matrix(heads.q_size + heads.kv_size, c.hidden_size),
            qkv_bias=matrix(heads.q_size + heads.kv_size) if c.qkv_bias else None,
            q_norm=norm(c.head_dim) if c.qk_norm else None,
            k_norm=norm(c.head_dim) if c.qk_norm else None,
            output=matrix(c.hidden_size, heads.q_size),
            output_bias=matrix(c.hidden_size) if c.output_bias else None,
            mlp_norm=norm(c.hidden_size),
            gate_up=matrix(2 * c.intermediate_size, c.hidden_size),
            down=matrix(c.hidden_size, c.intermediate_size),
        )
        for _ in range(c.num_layers)
    ]
    embedding = matrix(c.vocab_size, c.hidden_size)
    head = embedding if c.tied_embeddings else matrix(c.vocab_size, c.hidden_size)
    return DecoderWeights(embedding, layers, norm(c.hidden_size), head)


def random_cache(c: DenseConfig, num_blocks: int, block_size: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(c.num_layers, num_blocks, block_size, 2, c.num_kv_heads, c.head_dim, generator=generator)


def random_step(c: DenseConfig, news: list[int], lengths: list[int], cache: Tensor, seed: int = 2) -> Step:
    """Sequences with so many new tokens each, at such lengths, in shuffled blocks of the cache."""
    rng = random.Random(seed)
    num_blocks, block_size = cache.shape[1:3]
    free = rng.sample(range(1, num_blocks), num_blocks - 1)
    tables = [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
    positions, slots, starts = [], [], [0]
    for new, length, table in zip(news, lengths, tables, strict=True):
        starts.append(starts[-1] + new)
        for position in range(length - new, length):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
    # One column more than any sequence needs, so that every table is padded with the null block.
    width = max(map(len, tables)) + 1
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    batch = AttentionBatch(
        num_decodes=sum(new == 1 for new in news),
        query_starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        block_tables=padded,
        slots=torch.tensor(slots),
    )
    tokens = torch.tensor([rng.randrange(c.vocab_size) for _ in positions])
    return Step(tokens, torch.tensor(positions), batch)
