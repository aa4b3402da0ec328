"""What rows ask of their tokens besides the next one: the log probabilities of a prompt, or its hidden states, as one
vector or as the text of an image. Another kind of extra is a struct in `weft.plan`, a line in `ask` (of which tokens)
and one in `collect`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.plan import Gained, Held, Pooled, PromptLogprobs, Row
from weft.types import Pooling
from weft.worker.diffusion.denoiser import Denoiser
from weft.worker.forward_step import Asked, Given
from weft.worker.inputs import Layout, arrival_of, to_device, to_host
from weft.worker.rows import RowTable, runs
from weft.worker.sampler import log_probabilities, token_logprobs

NO_NUMBER = "The model's output for this request is not a number."


class Scored(NamedTuple):
    row: Row
    num_top: int
    num_scored: int
    """One for each of the row's tokens, but after a prompt's last one comes none of the prompt's."""


class Ask(NamedTuple):
    """What a step is asked for, in the order in which it is given."""

    scored: list[Scored]
    hidden: list[tuple[Row, Pooled | Held]]
    """Rows whose hidden states are given."""
    asked: Asked
    next_rows: Tensor
    next_positions: Tensor
    """Where in the row table the tokens stand that are scored."""

    @property
    def pooled(self) -> list[tuple[Row, Pooled]]:
        return [(row, extra) for row, extra in self.hidden if isinstance(extra, Pooled)]

    @property
    def held(self) -> list[Row]:
        return [row for row, extra in self.hidden if isinstance(extra, Held)]


class GainedBatch(NamedTuple):
    """What a step gave for its extras, on its way to the host; `read` waits for it."""

    ask: Ask
    logprobs: Tensor
    vectors: Tensor
    held_is_sound: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> dict[int, Gained]:
        """By row."""
        if self.arrived is not None:
            self.arrived.synchronize()
        gained = {row.row: Gained() for row, _ in self.ask.pooled}
        ends = [row.row for row, pooled in self.ask.pooled if pooled.is_end]
        for row, vector in zip(ends, self.vectors, strict=True):
            is_sound = bool(vector.isfinite().all())
            gained[row] = Gained(vector=vector.numpy().tobytes()) if is_sound else Gained(error=NO_NUMBER)
        for held, is_sound in zip(self.ask.held, self.held_is_sound.tolist(), strict=True):
            gained[held.row] = Gained(error="" if is_sound else NO_NUMBER)
        parts = torch.split(self.logprobs, [scored.num_scored for scored in self.ask.scored])
        for scored, part in zip(self.ask.scored, parts, strict=True):
            is_sound = bool(part[:, 0].isfinite().all())
            logprobs = token_logprobs(part, [scored.num_top] * scored.num_scored) if is_sound else []
            gained[scored.row.row] = Gained(logprobs, error="" if is_sound else NO_NUMBER)
        return gained


class Extras:
    def __init__(self, table: RowTable, denoiser: Denoiser | None) -> None:
        self._table = table
        self._denoiser = denoiser
        self._sums: dict[int, Tensor] = {}
        """Of rows whose hidden states are pooled: the sum of those so far, in float32."""

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self._sums.pop(row, None)

    def ask(self, layout: Layout) -> Ask:
        scored: list[Scored] = []
        hidden: list[tuple[Row, Pooled | Held]] = []
        logits_at, hidden_at = [], []
        for row, first in zip(layout.rows, layout.firsts.tolist(), strict=True):
            match row.extra:
                case PromptLogprobs(num_top=num_top):
                    scored.append(Scored(row, num_top, row.count - row.samples))
                    logits_at.append(first)
                case Pooled() | Held():
                    hidden.append((row, row.extra))
                    count = _num_states(row, row.extra)
                    hidden_at.append((first + row.count - count, count))
        counts = [one.num_scored for one in scored]
        arrays = [
            runs(logits_at, counts),
            runs([first for first, _ in hidden_at], [count for _, count in hidden_at]),
            np.repeat(np.array([one.row.row for one in scored], dtype=np.int64), counts),
            runs([one.row.start + 1 for one in scored], counts),
        ]
        logits, states, next_rows, next_positions = to_device(arrays, self._table.device)
        return Ask(scored, hidden, Asked(logits, states), next_rows, next_positions)

    def collect(self, ask: Ask, given: Given) -> GainedBatch:
        chosen = self._table.tokens[ask.next_rows, ask.next_positions]
        logprobs = log_probabilities(given.logits.float(), chosen, any(scored.num_top for scored in ask.scored))
        counts = [_num_states(row, extra) for row, extra in ask.hidden]
        ends: list[Tensor] = []
        is_sound: list[Tensor] = []
        for (row, extra), states in zip(ask.hidden, torch.split(given.hidden, counts), strict=True):
            if isinstance(extra, Pooled):
                ends += self._pooled(row, extra, states)
            elif self._denoiser is not None:
                self._denoiser.hold(extra, row.start, states)
                is_sound.append(states.isfinite().all())
        # A sum of vectors points where their mean does.
        vectors = torch.nn.functional.normalize(torch.stack(ends) if ends else given.hidden[:0].float())
        sound = to_host(torch.stack(is_sound) if is_sound else given.hidden[:0, 0].isfinite())
        return GainedBatch(ask, to_host(logprobs), to_host(vectors), sound, arrival_of(logprobs))

    def _pooled(self, row: Row, extra: Pooled, states: Tensor) -> list[Tensor]:
        """The sum of a prompt's hidden states, where the prompt ends."""
        total = states.float().sum(0)
        if extra.pooling is Pooling.MEAN and row.start > 0:
            total = total + self._sums[row.row]
        if extra.is_end:
            self._sums.pop(row.row, None)
            return [total]
        self._sums[row.row] = total
        return []


def _num_states(row: Row, extra: Pooled | Held) -> int:
    """How many of a row's hidden states are asked for, the last ones."""
    return 1 if isinstance(extra, Pooled) and extra.pooling is Pooling.LAST else row.count
