"""Rows that sample, without an engine around them: what the sampler's tests on every device are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from weft.kernels import REFERENCE, Ops
from weft.plan import RowAdmission, StepPlan
from weft.types import SamplingParams
from weft.worker import sampler
from weft.worker.rows import RowTable
from weft.worker.sampler import SampledBatch


class Target(Struct, frozen=True):
    """A row whose next token follows `history`."""

    params: SamplingParams
    history: tuple[int, ...] = (0, 0, 0)
    num_prompt: int = 3
    stops: tuple[int, ...] = ()


def target(history: Sequence[int] = (0, 0, 0), num_prompt: int = 3, stops: Sequence[int] = (), **params: Any) -> Target:
    """Greedy unless `params` says otherwise."""
    chosen = SamplingParams(**({"temperature": 0.0, "seed": 0} | params))
    return Target(chosen, tuple(history), num_prompt, tuple(stops))


def table_of(targets: Sequence[Target], device: str = "cpu", length: int = 0, stale: int = 0) -> RowTable:
    """A row for each target. Behind its tokens a row holds the token `stale`, as if from an older request."""
    length = max(length, max(len(target.history) for target in targets) + 1)
    table = RowTable(len(targets), length, 1, torch.device(device))
    table.tokens.fill_(stale)
    admit = [
        RowAdmission(i, list(target.history), target.num_prompt, target.params, list(target.stops))
        for i, target in enumerate(targets)
    ]
    writes = table.take_in(StepPlan(0, [], admit, []))
    table.write(*(torch.from_numpy(column).to(device) for column in writes))
    return table


def sample(logits: Tensor, targets: Sequence[Target], ops: Ops = REFERENCE, stale: int = 0) -> SampledBatch:
    """One row of logits for each target."""
    table = table_of(targets, logits.device.type, stale=stale)
    return sample_rows(logits, table, list(range(len(targets))), [len(target.history) for target in targets], ops)


def sample_rows(
    logits: Tensor, table: RowTable, rows: list[int], positions: list[int], ops: Ops = REFERENCE
) -> SampledBatch:
    return sampler.sample(logits, *ops.greedy(logits), table, rows, positions, ops)


def draws(logits: Tensor, num_draws: int, *, seed: int = 7, ops: Ops = REFERENCE, **params: Any) -> list[int]:
    """Tokens of one seed at so many positions, all from the same logits."""
    chosen = target((), 0, **({"temperature": 1.0, "seed": seed} | params))
    table = table_of([chosen], logits.device.type, num_draws)
    batch = sample_rows(logits.expand(num_draws, -1), table, [0] * num_draws, list(range(num_draws)), ops)
    return [sampled.token_id for sampled in batch.read()]
