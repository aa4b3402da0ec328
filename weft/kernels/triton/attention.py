"""A step's attention: its decodes to the kernel that reads fast, its prompts to the one that multiplies fast; a long
prompt that has the step for itself to the library, which multiplies faster still."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.kernels.batch import AttentionBatch, HeadShape
from weft.kernels.triton.decode_attention import decode_attention
from weft.kernels.triton.prefill_attention import prefill_attention
from weft.switches import is_on

_LIBRARY_TOKENS = range(1024, 8193, 256)
"""Lengths at which the library pays. It plans every length anew, for some 40 ms: so not every length."""


def attention(qkv: Tensor, heads: HeadShape, kv: Tensor, batch: AttentionBatch) -> Tensor:
    """Causal attention of each sequence's new tokens over its cached ones; [tokens, heads * head dim]. Launches depend
    on shapes only: a captured step may be replayed with other tables, lengths and starts."""
    if batch.is_one_prompt and len(qkv) in _LIBRARY_TOKENS and qkv.dtype.itemsize == 2 and is_on("library-attention"):
        return _prompt_attention(qkv, heads)
    decodes, tables, lengths = batch.num_decodes, batch.block_tables, batch.lengths
    out = torch.empty(qkv.shape[0], heads.q_size, dtype=qkv.dtype, device=qkv.device)
    if decodes:
        decode_attention(qkv[:decodes], heads, kv, tables[:decodes], lengths[:decodes], out[:decodes])
    if decodes < len(tables):
        starts = batch.query_starts[decodes:]
        prefill_attention(qkv[decodes:], heads, kv, tables[decodes:], lengths[decodes:], starts, out[decodes:])
    return out


def _prompt_attention(qkv: Tensor, heads: HeadShape) -> Tensor:
    """Of one prompt over itself: the cache is not read."""
    sizes = [heads.q_size, heads.kv_size // 2, heads.kv_size // 2]
    query, key, value = (
        part.view(1, len(qkv), -1, heads.head_dim).transpose(1, 2) for part in torch.split(qkv, sizes, dim=1)
    )
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=heads.num_heads != heads.num_kv_heads
        )
    return out.transpose(1, 2).reshape(len(qkv), heads.q_size)
