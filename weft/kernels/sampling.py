"""The reference of the sampling ops, `keep_thresholds` and `gumbel_sample`, in plain torch. They work row by row: a
row's token does not depend on the others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST_CANDIDATES = 1024
"""Likeliest tokens among which top_p looks before it sorts the whole vocabulary."""


def keep_thresholds(
    logits: Tensor, peaks: Tensor, temperatures: Tensor, min_p_reaches: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Return [rows] float32: tokens whose logits are below these are never sampled. Three rules apply in turn:

    - min_p: a logit is at least the row's largest (`peaks`) plus `min_p_reaches`: temperature * log(min_p), or -inf;
    - top_k: it is at least the k-th largest; 0 keeps all;
    - top_p: of what is left by now, the fewest of the largest whose probabilities, at the row's temperature, reach
      top_p of the whole, and at least one; 1 keeps all.

    Equal logits are kept together or not at all. A row of temperature 0 has none of the rules.
    """
    rules = (peaks, temperatures, min_p_reaches, top_k, top_p)
    thresholds = [
        _keep_threshold(row.float(), *rule)
        for row, *rule in zip(logits, *(column.tolist() for column in rules), strict=True)
    ]
    return torch.tensor(thresholds, dtype=torch.float32, device=logits.device)


def _keep_threshold(
    logits: Tensor, peak: float, temperature: float, min_p_reach: float, top_k: int, top_p: float
) -> float:
    threshold, largest = peak + min_p_reach, logits
    if 0 < top_k < len(logits):
        largest = logits.topk(top_k + 1).values
        threshold = max(threshold, largest[-2].item())
    if top_p >= 1:
        return threshold
    # More than top_k are left where the next one is as large.
    kept = largest if largest[-1] < threshold else logits
    if threshold > -math.inf:
        kept = kept[~(kept < threshold)]

    def masses(of: Tensor) -> Tensor:
        return ((of - peak) / temperature).exp().double()

    wanted = top_p * masses(kept).sum()
    candidates = kept.topk(min(FIRST_CANDIDATES, len(kept))).values
    reached = masses(candidates).cumsum(0)
    if reached[-1] < wanted:
        candidates = kept.sort(descending=True).values
        reached = masses(candidates).cumsum(0)
    return candidates[torch.searchsorted(reached, wanted).clamp_max(len(candidates) - 1)].item()


def gumbel_sample(
    logits: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Return [rows] int64: of each row's logits that are not below its threshold a sample of softmax(logits /
    temperature), or the first of the largest where the temperature is 0. `peaks` are the rows' largest logits,
    `positions` those of the sampled tokens."""
    if thresholds is None:
        thresholds = torch.full_like(temperatures, -math.inf)
    draws = (peaks, temperatures, seeds, positions, thresholds)
    tokens = [
        _draw(row.float(), *draw) for row, *draw in zip(logits, *(column.tolist() for column in draws), strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _draw(logits: Tensor, peak: float, temperature: float, seed: int, position: int, threshold: float) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if threshold == -math.inf:
        ids = torch.arange(len(logits), device=logits.device)
    else:
        ids = (~(logits < threshold)).nonzero()[:, 0]
        logits = logits[ids]
    scores = (logits - peak) / temperature + gumbel_noise(seed, position, ids)
    return int(ids[scores.argmax()])


def gumbel_noise(seed: int, position: int, ids: Tensor) -> Tensor:
    """Return noise for each token id, without state: the largest of logits + noise is a sample of their softmax."""
    key = _mixed(_mixed(seed & 0xFFFFFFFFFFFFFFFF) ^ position)
    bits = ids * 0x9E3779B1 + (key & 0xFFFFFFFF)
    bits = (bits ^ (bits >> 16) ^ (key >> 32)) & 0xFFFFFFFF
    bits = (bits * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    uniform = (bits.to(torch.float64) + 0.5) / 2**32
    return -(-uniform.log()).log().to(torch.float32)


def _mixed(word: int) -> int:
    """Permute 64-bit words so that every bit of the result depends on every bit of the word."""
    word = (word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
