"""Every op in plain torch: the specification, the fallback for any device, and the reference of parity tests.

A layer's cache is one tensor [blocks, block size, 2, kv heads, head dim]: a token's keys, then its values. It may be of
e4m3 numbers with scales.
Rotary pairs are neighbours in a head (dimensions 2i and 2i + 1), whatever the checkpoint's layout was.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.batch import AdapterGroups, AttentionBatch, HeadNorms, HeadShape
from weft.kernels.kv_cache import LayerCache, block_size_of
from weft.kernels.quantised import QuantisedWeight, finely_rounded, rounded
from weft.kernels.weights import SlotLowRank, Weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, QuantisedWeight):
        return F.linear(rounded(x), weight.dequantised().to(x.dtype), bias)
    return F.linear(x, weight if isinstance(weight, Tensor) else weight.dequantised().to(x.dtype), bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    normal = rms_norm(x, norm, eps)
    if isinstance(weight, QuantisedWeight):
        return F.linear(finely_rounded(normal), weight.dequantised().to(x.dtype), bias)
    return linear(normal, weight, bias)


def norm_gate_up(x: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor:
    """Compute the first half of a gated feed-forward layer; the weight's first rows are the gates."""
    return silu_mul(linear(rms_norm(x, norm, eps), weight))


def linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> None:
    """Add linear(x, weight, bias) to the residual in place."""
    residual.add_(linear(x, weight, bias))


def add_mlp(residual: Tensor, norm: Tensor, eps: float, gate_up: Weight, down: Weight) -> None:
    """Add a gated feed-forward layer of the residual's RMSNorm to the residual in place."""
    linear_add(norm_gate_up(residual, norm, eps, gate_up), down, None, residual)


def rotate_and_store(
    qkv: Tensor, heads: HeadShape, rotations: Tensor, kv: LayerCache, slots: Tensor, norms: HeadNorms | None = None
) -> None:
    """Normalise the queries' and keys' heads of qkv in place where the architecture does so, rotate them by `rotations`
    [tokens, head dim / 2] (complex), then write keys and values to their slots."""
    if norms is not None:
        norm_heads(qkv, heads, norms)
    tokens = qkv.shape[0]
    rotated = heads.q_size + heads.kv_size // 2
    pairs = qkv[:, :rotated].float().view(tokens, -1, heads.head_dim // 2, 2)
    turned = torch.view_as_real(torch.view_as_complex(pairs) * rotations[:, None])
    qkv[:, :rotated] = turned.flatten(1).to(qkv.dtype)
    keys_values = qkv[:, heads.q_size :]
    if isinstance(kv, Tensor):
        kv.view(-1, heads.kv_size)[slots] = keys_values.to(kv.dtype)
    else:
        kv.write(slots, keys_values.view(tokens, 2, heads.num_kv_heads, heads.head_dim))


def norm_heads(qkv: Tensor, heads: HeadShape, norms: HeadNorms) -> None:
    keys_end = heads.q_size + heads.kv_size // 2
    for part, weight in ((qkv[:, : heads.q_size], norms.query), (qkv[:, heads.q_size : keys_end], norms.key)):
        by_head = part.view(len(part), -1, heads.head_dim)
        by_head.copy_(rms_norm(by_head, weight, norms.eps))


def attention(qkv: Tensor, heads: HeadShape, kv: LayerCache, batch: AttentionBatch) -> Tensor:
    """Return the causal attention [tokens, heads * head dim] of each sequence's new tokens over its cached ones."""
    queries = qkv[:, : heads.q_size].view(-1, heads.num_heads, heads.head_dim)
    out = torch.empty_like(queries)
    block_size = block_size_of(kv)
    starts = batch.query_starts.tolist()
    for i, length in enumerate(batch.lengths.tolist()):
        start, stop = starts[i], starts[i + 1]
        blocks = batch.block_tables[i, : -(-length // block_size)]
        cached = (kv[blocks] if isinstance(kv, Tensor) else kv.read(blocks)).to(qkv.dtype)
        keys, values = cached.flatten(0, 1)[:length].permute(1, 2, 0, 3)
        count = stop - start
        mask = None
        if 1 < count < length:
            mask = torch.ones(count, length, dtype=torch.bool, device=qkv.device).tril(length - count)
        out[start:stop] = F.scaled_dot_product_attention(
            queries[start:stop].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=count == length > 1,
            enable_gqa=heads.num_heads != heads.num_kv_heads,
        )[0].transpose(0, 1)
    return out.flatten(1)


def gather_inputs(
    tokens: Tensor, blocks: Tensor, block_size: int, token_rows: Tensor, positions: Tensor, sequence_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens at these rows and positions of a table, their cache slots, and the blocks of the sequences'
    rows."""
    own = blocks[token_rows, positions.div(block_size, rounding_mode="floor")]
    return tokens[token_rows, positions], own * block_size + positions % block_size, blocks[sequence_rows]


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest token of each row and its logit, which is NaN for a row with a NaN."""
    peaks, tokens = logits.max(dim=-1)
    return tokens, peaks


def lora_shrink(x: Tensor, weight: SlotLowRank, groups: AdapterGroups) -> Tensor:
    """Return the products of rows and their slots' `shrink`, float32 [any, tokens, parts * rank], in the order of the
    groups. They are the sums over the first dimension; those of rows without an adapter are anything."""
    ranks = torch.zeros(1, len(x), weight.shrink.shape[1], device=x.device)
    for slot, group in _slots_in_use(groups):
        ranks[0, group] = F.linear(x[groups.order[group]].float(), weight.shrink[slot].float())
    return ranks


def lora_expand_add(ranks: Tensor, weight: SlotLowRank, groups: AdapterGroups, y: Tensor) -> None:
    """Add the products of what `lora_shrink` returned and the slots' `expand` to rows of y in place."""
    for slot, group in _slots_in_use(groups):
        of_parts = torch.split(ranks[:, group].sum(0).to(y.dtype), weight.rank, dim=1)
        outputs = [F.linear(of, weight.expand[slot, begin:end])
                   for of, (begin, end) in zip(of_parts, pairwise((0, *weight.ends)), strict=True)]  # fmt: skip
        y[groups.order[group]] += torch.cat(outputs, dim=1)


def lora_expand_gate(gate_up: Tensor, ranks: Tensor, weight: SlotLowRank, groups: AdapterGroups) -> Tensor:
    """Return silu_mul(gate_up) of all rows, with the low-rank products added before. It may overwrite gate_up."""
    lora_expand_add(ranks, weight, groups, gate_up)
    return silu_mul(gate_up)


def _slots_in_use(groups: AdapterGroups) -> Iterator[tuple[int, slice]]:
    """Yield each slot that tokens use, and its group in the order."""
    for slot, (begin, end) in enumerate(pairwise(groups.starts[1:].tolist())):
        if begin < end:
            yield slot, slice(begin, end)
