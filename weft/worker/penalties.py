"""What changes logits before a token is chosen. Every function works in place, on float32, and only on the rows `at`;
none waits for the device.

Histories are rows of the table, cut at the longest. What one holds past its own length is an old request's: it may be
written, since the penalty of a token depends on nothing but the token, and to write a logit twice is to write it once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add(logits: Tensor, places: Tensor, sums: Tensor) -> None:
    """Add sums to logits; the places count through all rows."""
    logits.view(-1).scatter_add_(0, places, sums)


def penalise_repetition(logits: Tensor, at: Tensor, histories: Tensor, lengths: Tensor, penalties: Tensor) -> None:
    """Divide the positive logits of the tokens in a history by its penalty, and multiply the others. No history is
    empty."""
    inside = torch.arange(histories.shape[1], device=logits.device) < lengths[:, None]
    tokens = torch.where(inside, histories, histories[:, :1])
    rows, by = at[:, None], penalties[:, None]
    before = logits[rows, tokens]
    logits[rows, tokens] = torch.where(before > 0, before / by, before * by)


def penalise_counts(
    logits: Tensor,
    at: Tensor,
    histories: Tensor,
    num_prompt: Tensor,
    lengths: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Of the tokens in a history behind its prompt: take `presence` from their logits, and `frequency` as often as
    each of them is there."""
    place = torch.arange(histories.shape[1], device=logits.device)
    answered = (place >= num_prompt[:, None]) & (place < lengths[:, None])
    counts = torch.zeros(len(at), logits.shape[1], dtype=torch.int32, device=logits.device)
    times = counts.scatter_add_(1, histories, answered.int()).gather(1, histories)
    logits[at[:, None], histories] -= presence[:, None] * (times > 0) + frequency[:, None] * times
