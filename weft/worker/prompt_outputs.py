"""Outputs of prompt tokens that rows request besides sampling: the log probabilities of a prompt, or its hidden states,
pooled into a vector or kept as prompt embeds. Another kind of request is a struct in `weft.plan`, a case in
`PromptOutputs.request` (of which tokens) and one in `collect`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.plan import KeptHiddenStates, Pooled, PromptLogprobs, Row, RowOutput
from weft.types import Pooling
from weft.worker.diffusion.denoiser import Denoiser
from weft.worker.forward_step import RequestedStates, RequestedTokens
from weft.worker.inputs import Layout, arrival_of, to_device, to_host
from weft.worker.rows import RowTable, runs
from weft.worker.sampler import log_probabilities, token_logprobs

NO_NUMBER = "The model's output for this request is not a number."


class ScoredRow(NamedTuple):
    """A row that requests log probabilities of prompt tokens."""

    row: Row
    num_top: int
    num_scored: int
    """Its tokens that another token of the prompt follows."""


class PromptRequests(NamedTuple):
    """The requests of a step's rows, in the order of the outputs."""

    scored: list[ScoredRow]
    hidden: list[tuple[Row, Pooled | KeptHiddenStates]]
    """Rows that request hidden states."""
    tokens: RequestedTokens
    next_rows: Tensor
    next_positions: Tensor
    """Places in the row table of the tokens that are scored."""

    @property
    def pooled(self) -> list[tuple[Row, Pooled]]:
        return [(row, request) for row, request in self.hidden if isinstance(request, Pooled)]

    @property
    def kept(self) -> list[Row]:
        return [row for row, request in self.hidden if isinstance(request, KeptHiddenStates)]


class RowOutputBatch(NamedTuple):
    """The outputs of a step's requests, on their way to the host; `read` waits for them."""

    requests: PromptRequests
    logprobs: Tensor
    vectors: Tensor
    kept_is_finite: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> dict[int, RowOutput]:
        """Return the outputs by row."""
        if self.arrived is not None:
            self.arrived.synchronize()
        outputs = {row.row: RowOutput() for row, _ in self.requests.pooled}
        ends = [row.row for row, pooled in self.requests.pooled if pooled.is_end]
        for row, vector in zip(ends, self.vectors, strict=True):
            is_finite = bool(vector.isfinite().all())
            outputs[row] = RowOutput(vector=vector.numpy().tobytes()) if is_finite else RowOutput(error=NO_NUMBER)
        for kept, is_finite in zip(self.requests.kept, self.kept_is_finite.tolist(), strict=True):
            outputs[kept.row] = RowOutput(error="" if is_finite else NO_NUMBER)
        parts = torch.split(self.logprobs, [scored.num_scored for scored in self.requests.scored])
        for scored, part in zip(self.requests.scored, parts, strict=True):
            is_finite = bool(part[:, 0].isfinite().all())
            logprobs = token_logprobs(part, [scored.num_top] * scored.num_scored) if is_finite else []
            outputs[scored.row.row] = RowOutput(logprobs, error="" if is_finite else NO_NUMBER)
        return outputs


class PromptOutputs:
    """The requests of rows, and the sums of hidden states that are pooled over several steps."""

    def __init__(self, table: RowTable, denoiser: Denoiser | None) -> None:
        self._table = table
        self._denoiser = denoiser
        self._sums: dict[int, Tensor] = {}
        """Sums of the hidden states so far, by row; in float64, so that where prompts are cut makes no difference."""

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self._sums.pop(row, None)

    def request(self, layout: Layout) -> PromptRequests:
        """Return the requests of a step's rows."""
        scored: list[ScoredRow] = []
        hidden: list[tuple[Row, Pooled | KeptHiddenStates]] = []
        logits_at, hidden_at = [], []
        for row, first in zip(layout.rows, layout.firsts.tolist(), strict=True):
            match row.request:
                case PromptLogprobs(num_top=num_top):
                    scored.append(ScoredRow(row, num_top, row.count - row.samples))
                    logits_at.append(first)
                case Pooled() | KeptHiddenStates():
                    hidden.append((row, row.request))
                    count = _num_states(row, row.request)
                    hidden_at.append((first + row.count - count, count))
        counts = [one.num_scored for one in scored]
        arrays = [
            runs(logits_at, counts),
            runs([first for first, _ in hidden_at], [count for _, count in hidden_at]),
            np.repeat(np.array([one.row.row for one in scored], dtype=np.int64), counts),
            runs([one.row.start + 1 for one in scored], counts),
        ]
        logits, states, next_rows, next_positions = to_device(arrays, self._table.device)
        return PromptRequests(scored, hidden, RequestedTokens(logits, states), next_rows, next_positions)

    def collect(self, requests: PromptRequests, states: RequestedStates) -> RowOutputBatch:
        """Return the outputs of requests from the states that the step computed for them."""
        chosen = self._table.tokens[requests.next_rows, requests.next_positions]
        logprobs = log_probabilities(states.logits.float(), chosen, any(scored.num_top for scored in requests.scored))
        counts = [_num_states(row, request) for row, request in requests.hidden]
        ends: list[Tensor] = []
        is_finite: list[Tensor] = []
        for (row, request), hidden in zip(requests.hidden, torch.split(states.hidden, counts), strict=True):
            if isinstance(request, Pooled):
                ends += self._pooled(row, request, hidden)
            elif self._denoiser is not None:
                self._denoiser.keep_hidden_states(request, row.start, hidden)
                is_finite.append(hidden.isfinite().all())
        # A sum of vectors has the direction of their mean.
        vectors = torch.nn.functional.normalize(torch.stack(ends) if ends else states.hidden[:0].double()).float()
        finite = to_host(torch.stack(is_finite) if is_finite else states.hidden[:0, 0].isfinite())
        return RowOutputBatch(requests, to_host(logprobs), to_host(vectors), finite, arrival_of(logprobs))

    def _pooled(self, row: Row, request: Pooled, states: Tensor) -> list[Tensor]:
        """Return the sum of a prompt's hidden states where the prompt ends, and an empty list before."""
        total = states.sum(0, dtype=torch.float64)
        if request.pooling is Pooling.MEAN and row.start > 0:
            total = total + self._sums[row.row]
        if request.is_end:
            self._sums.pop(row.row, None)
            return [total]
        self._sums[row.row] = total
        return []


def _num_states(row: Row, request: Pooled | KeptHiddenStates) -> int:
    """Return how many of a row's last hidden states are requested."""
    return 1 if isinstance(request, Pooled) and request.pooling is Pooling.LAST else row.count
