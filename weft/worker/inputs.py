"""A step's inputs from its plan: one packed copy goes to the device, and the rest is gathered there.

A shape may be larger than a plan needs: spare sequences, tokens and samples are the table's padding row, whose blocks
are the null block. So one CUDA graph serves many plans.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels import InputEmbeds, client_tensor
from weft.plan import Row
from weft.worker.rows import Ints, RowTable, runs


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's copy on the device, without waiting for it."""
    if device.type == "cpu":
        return tensor
    return send_into(torch.empty(tensor.shape, dtype=tensor.dtype, device=device), tensor)


def send_into(there: Tensor, tensor: Tensor) -> Tensor:
    """Copy a host tensor into one on a GPU, without waiting for it."""
    # Pinned memory is allocated anew: the last copy may still be under way.
    return there.copy_(tensor.pin_memory(), non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor's copy on the host, which is complete when the event of `arrival_of` has come."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def arrival_of(tensor: Tensor) -> torch.cuda.Event | None:
    """Return the event after which all copies made so far are on the host; None: they are there already."""
    if not tensor.is_cuda:
        return None
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return arrived


class StepShape(NamedTuple):
    """The sizes of a step's inputs."""

    decodes: int
    """Sequences with one new token; they come first."""
    prompts: int
    """Sequences with more new tokens."""
    prompt_tokens: int
    samples: int
    slots: int = 0
    """Slots of LoRA adapters by which the tokens are grouped; 0 for a step without adapters."""

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    @property
    def num_sequences(self) -> int:
        return self.decodes + self.prompts

    @property
    def samples_all(self) -> bool:
        """True when every token is sampled from, in the order of the tokens."""
        return self.prompts == 0 and self.samples == self.decodes


class StepInputs(NamedTuple):
    """The inputs of a step: rows and positions in the row table."""

    token_rows: Tensor
    positions: Tensor
    sequence_rows: Tensor
    lengths: Tensor
    """Tokens of each sequence that are in the cache once this step's are written; 0 for a spare sequence."""
    query_starts: Tensor
    """[sequences + 1]: where each sequence's tokens begin. Spare tokens come after the last."""
    sample_rows: Tensor
    sample_at: Tensor
    """Places of the step's tokens that are sampled from."""
    sample_ends: Tensor
    """The positions behind them, where sampled tokens go."""
    slot_order: Tensor
    slot_starts: Tensor
    """The fields of AdapterGroups; empty in a step without adapters."""


def section_sizes(shape: StepShape) -> list[int]:
    """Return the length of each field of StepInputs in a step of this shape."""
    tokens, sequences, samples = shape.num_tokens, shape.num_sequences, shape.samples
    grouped = [tokens, shape.slots + 2] if shape.slots else [0, 0]
    return [tokens, tokens, sequences, sequences, sequences + 1, samples, samples, samples, *grouped]


class Layout(NamedTuple):
    """A step's inputs on the host."""

    shape: StepShape
    packed: Ints
    """The fields of StepInputs, one after the other."""
    rows: list[Row]
    """The rows in the order of their tokens."""
    firsts: Ints
    """The place of each row's first token."""
    sampling: list[Row]
    """The rows that sample, in the order of the samples."""
    longest: int

    @property
    def sections(self) -> list[Ints]:
        sizes = section_sizes(self.shape)
        return [self.packed[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def decode_rows(rows: list[Row]) -> list[Row]:
    """Return rows in which each token of one with a draft is a row of its own. Each is computed as it would be in a
    step of one token, to the last bit where the kernels keep rows apart: keys and values of all tokens are written
    before any of them is attended to."""
    if not any(row.draft for row in rows):
        return rows
    return [
        one
        for row in rows
        for one in ([Row(row.row, row.start + i, 1, [], True) for i in range(row.count)] if row.draft else [row])
    ]


def exact_shape(rows: list[Row]) -> StepShape:
    counts = [row.count for row in rows]
    decodes = counts.count(1)
    samples = sum(row.samples for row in rows)
    return StepShape(decodes, len(rows) - decodes, sum(counts) - decodes, samples)


def lay_out(
    rows: list[Row], shape: StepShape, padding_row: int, slot_of: Callable[[int], int] = lambda row: -1
) -> Layout:
    """Lay out rows as the inputs of a step. `slot_of` returns the slot of a row's adapter, or -1."""
    # Of sequences with one new token those that sample come first: a captured step samples from its first tokens.
    rows = sorted(rows, key=lambda row: (row.count > 1, row.count == 1 and not row.samples))
    table = np.array([(row.row, row.start, row.count, row.samples) for row in rows], dtype=np.int64)
    numbers, starts, counts, samples = table.T
    num_decodes = int((counts == 1).sum())
    # Prefills begin where the shape's decodes end.
    spare = shape.decodes - num_decodes
    at = np.cumsum(counts) - counts + np.where(counts > 1, spare, 0)
    sequences = np.arange(len(rows)) + np.where(counts > 1, spare, 0)
    token_at = runs(at, counts)

    packed = np.zeros(sum(section_sizes(shape)), dtype=np.int64)
    layout = Layout(shape, packed, rows, at, [row for row in rows if row.samples], int((starts + counts).max()))
    token_rows, positions, sequence_rows, lengths, query_starts, *sampled, slot_order, slot_starts = layout.sections
    sample_rows, sample_at, sample_ends = sampled
    for section in (token_rows, sequence_rows, sample_rows):
        section[:] = padding_row
    token_rows[token_at] = np.repeat(numbers, counts)
    positions[token_at] = token_at + np.repeat(starts - at, counts)
    sequence_rows[sequences] = numbers
    lengths[sequences] = starts + counts
    query_starts[: shape.decodes] = np.arange(shape.decodes)
    query_starts[shape.decodes :] = shape.decodes + counts[num_decodes:].sum()
    query_starts[sequences] = at
    sampling = samples.astype(bool)
    num_samples = len(layout.sampling)
    sample_rows[:num_samples] = numbers[sampling]
    sample_at[:num_samples] = (at + counts - 1)[sampling]
    sample_ends[:num_samples] = (starts + counts)[sampling]
    if shape.slots:
        groups = np.zeros(shape.num_tokens, dtype=np.int64)
        groups[token_at] = np.repeat([slot_of(row.row) + 1 for row in rows], counts)
        slot_order[:] = np.argsort(groups, kind="stable")
        slot_starts[1:] = np.cumsum(np.bincount(groups, minlength=shape.slots + 1))
    return layout


def to_device(arrays: list[Ints], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on the device, by one copy that is not waited for."""
    packed = sent(torch.from_numpy(np.concatenate(arrays)), device)
    return list(torch.split(packed, [len(array) for array in arrays]))


def views(packed: Tensor, shape: StepShape) -> StepInputs:
    return StepInputs(*torch.split(packed, section_sizes(shape)))


def input_embeds_of(layout: Layout, table: RowTable, dtype: torch.dtype) -> InputEmbeds:
    """Return the prompt embeds at the positions that a step computes, and their places among its tokens."""
    firsts, parts = list[int](), list[Tensor]()
    for row, first in zip(layout.rows, layout.firsts.tolist(), strict=True):
        for start, stop, segment in table.embeds_within(row):
            firsts.append(first + start - row.start)
            parts.append(client_tensor(segment.embeds, start - segment.start, stop - segment.start).to(dtype))
    (at,) = to_device([runs(firsts, [len(part) for part in parts])], table.device)
    return InputEmbeds(at, sent(torch.cat(parts), table.device))
