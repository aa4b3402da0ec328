"""The sampler turns logits into tokens. A token depends on the logits, the parameters, the seed and the position: never
on the batch, the step or the process. Parameters that no row uses cost nothing, and nothing here waits for the device.

What a row's parameters do to its logits, in this order:

- logit_bias is added, and tokens that would end an answer shorter than min_tokens are ruled out;
- repetition_penalty divides the positive logits of the tokens in prompt and answer, and multiplies the others;
- presence_penalty is taken from the logits of the answer's tokens, frequency_penalty as often as each is in it;
- tokens that the answer's grammar does not go on with are ruled out;
- temperature 0 takes the first of the largest logits. Any other divides them, and
- min_p, top_k and top_p, each of what the one before left, rule out the least likely: tokens of equal logits stay
  together, so top_k may keep more than k (see `weft.kernels.sampling.keep_thresholds`);
- the token is the largest of logit + noise, a sample of what is left. The noise is a hash of the seed, the position
  and the token.

Log probabilities are of the model's own distribution, before all that. A row whose logits are not numbers is BROKEN;
the others are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels import Ops
from weft.plan import Row, RowAdmission, Sampled
from weft.types import MAX_LOGPROBS, SamplingParams, TokenLogprob
from weft.worker.grammar_masks import Masks, rule_out
from weft.worker.inputs import arrival_of, to_device, to_host
from weft.worker.rows import RowTable
from weft.worker.sampling_rows import NUM_FLOAT_COLUMNS, StepSettings


def log_probabilities(logits: Tensor, chosen: Tensor, with_likeliest: bool) -> Tensor:
    """Return for each row of logits, side by side, the chosen token's log probability, those of the likeliest tokens,
    and the likeliest tokens' ids."""
    # Which of equal logits come first depends on how many are taken: always the same number, or none.
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]) if with_likeliest else 0)
    values = torch.cat([logits.gather(1, chosen[:, None]), values], 1) - logits.logsumexp(1, keepdim=True)
    # Ids below 2 ** 24 are exact.
    return torch.cat([values, ids.float()], 1)


def token_logprobs(read: Tensor, wanted: list[int]) -> list[TokenLogprob]:
    """Convert what `log_probabilities` returned, once it is on the host; `wanted` is each row's number of top
    tokens."""
    num_top = (read.shape[1] - 1) // 2
    return [
        TokenLogprob(chosen, tuple(zip(map(int, top[num_top:]), top[:count], strict=False)))
        for count, (chosen, *top) in zip(wanted, read.tolist(), strict=True)
    ]


def add(logits: Tensor, places: Tensor, sums: Tensor) -> None:
    """Add sums to logits; the places count through all rows."""
    logits.view(-1).scatter_add_(0, places, sums)


def penalise_repetition(logits: Tensor, at: Tensor, histories: Tensor, lengths: Tensor, penalties: Tensor) -> None:
    """Divide the positive logits of the tokens in a history by its penalty, and multiply the others. No history is
    empty; where it has NO_TOKEN, there is nothing to penalise."""
    inside = (torch.arange(histories.shape[1], device=logits.device) < lengths[:, None]) & (histories >= 0)
    first = inside.int().argmax(1, keepdim=True)
    tokens = torch.where(inside, histories, histories.gather(1, first)).clamp(min=0)
    rows, by = at[:, None], torch.where(inside.any(1), penalties, 1)[:, None]
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
    """Subtract `presence` from the logits of the tokens in a history behind its prompt, and `frequency` as often as
    each of them is there."""
    place = torch.arange(histories.shape[1], device=logits.device)
    answered = (place >= num_prompt[:, None]) & (place < lengths[:, None])
    counts = torch.zeros(len(at), logits.shape[1], dtype=torch.int32, device=logits.device)
    histories = histories.clamp(min=0)  # NO_TOKEN stands in prompts alone, which do not count
    times = counts.scatter_add_(1, histories, answered.int()).gather(1, histories)
    logits[at[:, None], histories] -= presence[:, None] * (times > 0) + frequency[:, None] * times


BROKEN = -1
_WARM_UP_PARAMS = (
    SamplingParams(temperature=1, seed=0),
    SamplingParams(temperature=1, seed=0, top_p=0.5, logprobs=1),
    SamplingParams(temperature=1, seed=0, logit_bias={0: 1.0}),
    SamplingParams(temperature=1, seed=0, top_k=1, repetition_penalty=2.0, presence_penalty=1.0),
)


class DraftedTokens(NamedTuple):
    """The drafted tokens of a step, with their places in the row table, which the likeliest tokens will take."""

    rows: Tensor
    positions: Tensor
    tokens: Tensor
    here: Tensor
    """The tokens, on their way to the host."""
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, table: RowTable, rows: Tensor, positions: Tensor) -> DraftedTokens:
        tokens = table.tokens[rows, positions]
        return cls(rows, positions, tokens, to_host(tokens), arrival_of(tokens))

    def read(self, rows: list[Row]) -> dict[int, list[int]]:
        """Wait for the drafts of a plan's rows, and return them by row."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = iter(self.here.tolist())
        return {row.row: [next(tokens) for _ in row.draft] for row in rows if row.draft}


class SampledBatch(NamedTuple):
    """The tokens that a step sampled, on their way to the host; `read` waits for them."""

    tokens: Tensor
    peaks: Tensor
    """The largest logit of each row: not finite if the row is BROKEN."""
    logprobs: Tensor | None
    """The output of `log_probabilities` for the rows that want log probabilities."""
    num_top: dict[int, int]
    """How many top tokens each of these rows wants, by place."""
    arrived: torch.cuda.Event | None
    """The event after which the tensors are on the host; None: they are there already."""

    def read(self) -> list[Sampled]:
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, sound = self.tokens.tolist(), self.peaks.isfinite().tolist()
        read = [Sampled(token) for token in tokens]
        if self.logprobs is not None:
            logprobs = token_logprobs(self.logprobs, list(self.num_top.values()))
            for i, logprob in zip(self.num_top, logprobs, strict=True):
                read[i] = Sampled(tokens[i], logprob)
        for i, is_sound in enumerate(sound):
            if not is_sound:
                read[i] = Sampled(BROKEN, error="The model's output for this request is not a number.")
        return read


def sample(
    logits: Tensor, tokens: Tensor, peaks: Tensor, table: RowTable, rows: list[int], positions: list[int], ops: Ops,
    masks: Masks | None = None, drafts: DraftedTokens | None = None,
) -> SampledBatch:  # fmt: skip
    """Sample one token for each of these rows of the table, at these positions, from logits [rows, vocabulary] and the
    likeliest token and the largest logit of each row. The likeliest are in the table already; others are written there.
    Rows that have a grammar have a mask. A row that has a draft is there once for each position."""
    if table.settings.rows_needing_sampler.isdisjoint(rows):
        return _sent(tokens, peaks)
    wanted = table.settings.of(rows, positions, logits.shape[1])
    there = _on_device(wanted, logits.device)
    chosen = _chosen(logits, tokens, peaks, table, wanted, there, ops, masks, drafts)
    if not len(wanted.scored):
        return _sent(chosen, peaks)
    num_top = dict(zip(wanted.scored.tolist(), wanted.num_top.tolist(), strict=True))
    logprobs = log_probabilities(logits[there.scored].float(), chosen[there.scored], any(num_top.values()))
    return _sent(chosen, peaks, logprobs, num_top)


def sample_draft(logits: Tensor, tokens: Tensor, peaks: Tensor, table: RowTable, sampling: list[Row], ops: Ops) -> None:
    """Sample the next token of a draft for each of these rows, as the model would, and write it to the table. Where
    the likeliest are wanted they are there already."""
    rows, positions = [row.row for row in sampling], [row.start + row.count for row in sampling]
    if table.settings.rows_needing_sampler.isdisjoint(rows):
        return
    logits, tokens, peaks = (of[: len(rows)] for of in (logits, tokens, peaks))
    wanted = table.settings.of(rows, positions, logits.shape[1])
    _chosen(logits, tokens, peaks, table, wanted, _on_device(wanted, logits.device), ops, None, None)


def _chosen(
    logits: Tensor, tokens: Tensor, peaks: Tensor, table: RowTable, wanted: StepSettings[NDArray[Any]],
    there: StepSettings[Tensor], ops: Ops, masks: Masks | None, drafts: DraftedTokens | None,
) -> Tensor:  # fmt: skip
    """Return the sampled tokens, which are in the table then."""
    scores, chosen, best = logits, tokens, peaks
    if masks is not None or len(wanted.edit_places) or len(wanted.repeating) or len(wanted.counting):
        if drafts is not None:
            # Penalties of later positions count them, and the likeliest tokens stand in their places.
            table.tokens[drafts.rows, drafts.positions] = drafts.tokens
        scores = _adjusted(logits, table.tokens, wanted, there)
        if masks is not None:
            places, words = to_device([masks.places, masks.words.ravel()], logits.device)
            rule_out(scores, places, words)
        chosen, best = ops.greedy(scores)
    if (wanted.temperature > 0).any():
        thresholds = None
        if (wanted.top_k > 0).any() or (wanted.top_p < 1).any() or np.isfinite(wanted.min_p_reach).any():
            thresholds = ops.keep_thresholds(
                scores, best, there.temperature, there.min_p_reach, there.top_k, there.top_p
            )
        chosen = ops.gumbel_sample(scores, best, there.temperature, there.seed, there.positions, thresholds)
    if chosen is not tokens:
        table.tokens[there.rows, there.positions] = chosen
    return chosen


def warm_up_sampler(logits: Tensor, ops: Ops) -> None:
    """Sample in every way that has a kernel of its own, so that no request waits for a compiler."""
    logits = logits[:1]
    for params in _WARM_UP_PARAMS:
        table = RowTable(1, 2, 1, logits.device)
        table.settings.admit(RowAdmission(0, [0], 1, params, []))
        sample(logits, *ops.greedy(logits), table, [0], [1], ops).read()


def _on_device(wanted: StepSettings[NDArray[Any]], device: torch.device) -> StepSettings[Tensor]:
    """Copy the settings to the device, without waiting for it; floats become single precision."""
    floats, ints = wanted[:NUM_FLOAT_COLUMNS], wanted[NUM_FLOAT_COLUMNS:]
    packed, *int_columns = to_device([np.concatenate(floats).view(np.int64), *ints], device)
    float_columns = torch.split(packed.view(torch.float64).float(), [len(column) for column in floats])
    return StepSettings(*float_columns, *int_columns)


def _adjusted(
    logits: Tensor, tokens: Tensor, wanted: StepSettings[NDArray[Any]], there: StepSettings[Tensor]
) -> Tensor:
    """Return the logits in float32 after all that comes before the temperature; `tokens` are the table's."""
    adjusted = logits.to(torch.float32, copy=True)
    if len(wanted.edit_places):
        add(adjusted, there.edit_places, there.edit_sums)
    if len(wanted.repeating):
        histories = tokens[there.repeating_rows, : wanted.repeating_lengths.max()]
        penalise_repetition(adjusted, there.repeating, histories, there.repeating_lengths, there.repetition)
    if len(wanted.counting):
        histories = tokens[there.counting_rows, : wanted.counting_lengths.max()]
        penalise_counts(
            adjusted, there.counting, histories, there.counting_prompts, there.counting_lengths,
            there.presence, there.frequency,
        )  # fmt: skip
    return adjusted


def _sent(
    tokens: Tensor, peaks: Tensor, logprobs: Tensor | None = None, num_top: dict[int, int] | None = None
) -> SampledBatch:
    here = to_host(tokens), to_host(peaks), None if logprobs is None else to_host(logprobs)
    return SampledBatch(*here, num_top or {}, arrival_of(tokens))
