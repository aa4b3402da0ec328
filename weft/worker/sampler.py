"""From logits to tokens. A token depends on the logits, the parameters, the seed and the position: never on the
batch, the step or the process. Parameters that nobody uses cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.plan import Sampled
from weft.types import SamplingParams, TokenLogprob
from weft.worker.rows import RowState, RowTable

BROKEN = -1
FIRST_CANDIDATES = 1024
"""top_p looks at so many of the likeliest tokens before it sorts the whole vocabulary."""


class Target(NamedTuple):
    """A row that samples, and the position of the token that it samples."""

    table: RowTable
    row: int
    position: int

    @property
    def state(self) -> RowState:
        return self.table.states[self.row]

    @property
    def history(self) -> Tensor:
        """The tokens before the sampled one."""
        return self.table.tokens[self.row, : self.position]


class SampledBatch(NamedTuple):
    """What a step sampled, on its way to the host; `read` waits for it."""

    tokens: Tensor
    """On the host, once `arrived`: the sampled tokens, and BROKEN for a row whose logits are no numbers."""
    arrived: torch.cuda.Event | None
    logprobs: list[tuple[Tensor, Tensor, Tensor] | None]
    """For rows that asked: the chosen token's log probability, and the likeliest ids with theirs."""

    def read(self) -> list[Sampled]:
        if self.arrived is not None:
            self.arrived.synchronize()
        read = []
        for token, logprob in zip(self.tokens.tolist(), self.logprobs, strict=True):
            if token == BROKEN:
                read.append(Sampled(token, error="The model's output for this request is not a number."))
            elif logprob is None:
                read.append(Sampled(token))
            else:
                chosen, ids, values = logprob
                top = list(zip(ids.tolist(), values.tolist(), strict=True))
                read.append(Sampled(token, TokenLogprob(chosen.item(), top)))
        return read


def sample(logits: Tensor, tokens: Tensor, peaks: Tensor, targets: list[Target]) -> SampledBatch:
    """From logits [rows, vocabulary] and the likeliest token and the largest logit of each row: one token a row.
    Rows that do not want the likeliest one get theirs written to the row table."""
    logprobs: list[tuple[Tensor, Tensor, Tensor] | None] = []
    for i, target in enumerate(targets):
        wanted = target.state.params.logprobs
        if not _is_plain_greedy(target):
            tokens[i] = _choose(logits[i].float(), target)
            target.table.tokens[target.row, target.position] = tokens[i]
        logprobs.append(None if wanted is None else _logprobs(logits[i].float(), tokens[i], wanted))
    return _on_the_way(torch.where(peaks.isfinite(), tokens, BROKEN), logprobs)


def _on_the_way(tokens: Tensor, logprobs: list[tuple[Tensor, Tensor, Tensor] | None]) -> SampledBatch:
    if tokens.device.type == "cpu":
        return SampledBatch(tokens, None, logprobs)
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return SampledBatch(host, arrived, logprobs)


def _is_plain_greedy(target: Target) -> bool:
    params = target.state.params
    return params.temperature == 0 and not (
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or _too_short_to_stop(target)
    )


def _choose(logits: Tensor, target: Target) -> Tensor:
    params = target.state.params
    logits = _adjusted(logits.clone(), target)
    if params.temperature == 0:
        return logits.argmax()
    # From the largest down, and not by less than 1e-30: the quotients stay numbers.
    logits = (logits - logits.max()) / max(params.temperature, 1e-30)
    if params.min_p > 0:
        logits[logits < logits.max() + torch.tensor(params.min_p).log()] = float("-inf")
    if params.top_k > 0 or params.top_p < 1:
        kept_logits, ids = _likeliest(logits, params)
    else:
        kept_logits, ids = logits, torch.arange(len(logits), device=logits.device)
    assert params.seed is not None
    return ids[(kept_logits + gumbel_noise(params.seed, target.position, ids)).argmax()]


def _adjusted(logits: Tensor, target: Target) -> Tensor:
    params, history = target.state.params, target.history
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.repetition_penalty != 1:
        seen = torch.unique(history)
        logits[seen] = torch.where(
            logits[seen] > 0, logits[seen] / params.repetition_penalty, logits[seen] * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        written, counts = torch.unique(history[target.state.num_prompt :], return_counts=True)
        logits[written] -= params.presence_penalty + params.frequency_penalty * counts
    if _too_short_to_stop(target):
        logits[target.state.stop_token_ids] = float("-inf")
    return logits


def _too_short_to_stop(target: Target) -> bool:
    written = target.position - target.state.num_prompt
    return written < target.state.params.min_tokens and bool(target.state.stop_token_ids)


def _likeliest(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The logits and ids that top_k and top_p keep, the likeliest first."""
    if 0 < params.top_k < len(logits):
        logits, ids = logits.topk(params.top_k)
        return _nucleus(logits, ids, logits.logsumexp(0), params.top_p)
    total = logits.logsumexp(0)
    first, ids = logits.topk(min(FIRST_CANDIDATES, len(logits)))
    if (first - total).exp().sum() < params.top_p:
        first, ids = logits.sort(descending=True)
    return _nucleus(first, ids, total, params.top_p)


def _nucleus(logits: Tensor, ids: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest of the sorted tokens whose probabilities reach top_p: at least one."""
    if top_p >= 1:
        return logits, ids
    probabilities = (logits - total).exp()
    before = probabilities.cumsum(0) - probabilities
    kept = before < top_p
    kept[0] = True
    return logits[kept], ids[kept]


def gumbel_noise(seed: int, position: int, ids: Tensor) -> Tensor:
    """Noise for each token id: the largest of logits + noise is a sample of their softmax. Stateless."""
    key = _mixed(_mixed(seed & 0xFFFFFFFFFFFFFFFF) ^ position)
    bits = ids * 0x9E3779B1 + (key & 0xFFFFFFFF)
    bits = (bits ^ (bits >> 16) ^ (key >> 32)) & 0xFFFFFFFF
    bits = (bits * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    uniform = (bits.to(torch.float64) + 0.5) / 2**32
    return -(-uniform.log()).log().to(torch.float32)


def _mixed(word: int) -> int:
    """A permutation of 64-bit words under which every bit of the result depends on every bit of the word."""
    word = (word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)


def _logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the model's own distribution, before penalties and temperature."""
    total = logits.logsumexp(0)
    values, ids = logits.topk(num_top)
    return logits[chosen] - total, ids, values - total
