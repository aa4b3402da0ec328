"""A step's attention: its decodes to the kernel that reads fast, its prompts to the one that multiplies fast."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.batch import AttentionBatch, HeadShape
from weft.kernels.triton.decode_attention import decode_attention
from weft.kernels.triton.prefill_attention import prefill_attention

_latest: tuple[list[int], Tensor] | None = None


def attention(qkv: Tensor, heads: HeadShape, kv: Tensor, batch: AttentionBatch) -> Tensor:
    """Causal attention of each sequence's new tokens over its cached ones; [tokens, heads * head dim]."""
    decodes, starts = batch.num_decodes, batch.query_starts
    out = torch.empty(qkv.shape[0], heads.q_size, dtype=qkv.dtype, device=qkv.device)
    if decodes:
        decode_attention(
            qkv[:decodes], heads, kv, batch.block_tables[:decodes], batch.lengths_tensor[:decodes], out[:decodes]
        )
    if decodes < len(starts) - 1:
        most = max(stop - start for start, stop in zip(starts[decodes:], starts[decodes + 1 :], strict=False))
        prefill_attention(
            qkv, heads, kv, batch.block_tables[decodes:], batch.lengths_tensor[decodes:],
            _on_device(starts, qkv.device)[decodes:], most, out,
        )  # fmt: skip
    return out


def _on_device(starts: list[int], device: torch.device) -> Tensor:
    """One copy for all layers of a step: they pass the same list. Not for capture, which would freeze the values."""
    global _latest
    if _latest is None or _latest[0] is not starts or _latest[1].device != device:
        host = torch.tensor(starts, dtype=torch.int32, pin_memory=device.type == "cuda")
        _latest = (starts, host.to(device, non_blocking=True))
    return _latest[1]
