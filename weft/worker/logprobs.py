"""Log probabilities, of sampled tokens and of a prompt's alike: worked out on the device, read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.types import MAX_LOGPROBS, TokenLogprob


def log_probabilities(logits: Tensor, chosen: Tensor, with_likeliest: bool) -> Tensor:
    """For each row of logits, side by side: the chosen token's log probability, those of the likeliest tokens, and
    the likeliest tokens' ids."""
    # Which of equal logits come first depends on how many are taken: always the same number, or none.
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]) if with_likeliest else 0)
    values = torch.cat([logits.gather(1, chosen[:, None]), values], 1) - logits.logsumexp(1, keepdim=True)
    # Ids below 2 ** 24 are exact.
    return torch.cat([values, ids.float()], 1)


def token_logprobs(read: Tensor, wanted: list[int]) -> list[TokenLogprob]:
    """What `log_probabilities` gave, once it is on the host; of each row so many of the likeliest."""
    num_top = (read.shape[1] - 1) // 2
    return [
        TokenLogprob(chosen, [(int(token), value) for value, token in zip(top[:count], top[num_top:], strict=False)])
        for count, (chosen, *top) in zip(wanted, read.tolist(), strict=True)
    ]
