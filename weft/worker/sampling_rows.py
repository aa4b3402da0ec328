"""The sampling settings of every row, on the host. They are computed once, when a request is admitted, so that a step
only gathers those of its rows. A step whose rows all want the likeliest token gathers none.
"""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from weft.plan import RowAdmission
from weft.types import SamplingParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Column = TypeVar("Column")


class Record(NamedTuple):
    """The settings of one row; as they are here where it wants the likeliest token and nothing else."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    num_prompt: int = 0
    num_top: int = -1
    """So many of the likeliest tokens' log probabilities are wanted; -1: no log probabilities at all."""
    temperature: float = 0.0
    min_p_reach: float = -math.inf
    """By min_p a logit may be so far below the largest, a number of at most 0."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


RECORDS = np.dtype([(name, np.float64 if kind is float else np.int64) for name, kind in get_type_hints(Record).items()])
LOWEST_TEMPERATURE = 1e-30
"""The lowest temperature: differences of logits, divided by it, are still finite."""


class StepSettings(NamedTuple, Generic[Column]):
    """The settings of a batch: arrays on the host, tensors on the device. The float columns come first."""

    temperature: Column
    min_p_reach: Column
    top_p: Column
    """These three are of every row."""
    edit_sums: Column
    """Sums added to single logits: biases, and -inf for tokens that would end an answer too early."""
    repetition: Column
    """The penalties of rows that have one."""
    presence: Column
    frequency: Column
    """These two are of rows that have one of the two penalties."""

    rows: Column
    positions: Column
    seed: Column
    top_k: Column
    """These four are of every row: where its token goes, and how it is sampled."""
    edit_places: Column
    """Places of `edit_sums`, counted through all the logits of the batch."""
    repeating: Column
    repeating_rows: Column
    repeating_lengths: Column
    """Rows with a repetition penalty: their places in the batch, their rows, and the tokens they have."""
    counting: Column
    counting_rows: Column
    counting_prompts: Column
    counting_lengths: Column
    """Rows with a presence or frequency penalty: the same, and how many of their tokens are prompt."""
    scored: Column
    num_top: Column
    """Rows that want log probabilities: their places in the batch, and of how many likely tokens."""


NUM_FLOAT_COLUMNS = StepSettings._fields.index("rows")


class Edits(NamedTuple):
    """The sums added to single logits of a row: its biases; and, while it may not end yet, its biases and -inf for the
    tokens that would end it."""

    ids: Ints
    sums: Floats
    early_ids: Ints
    early_sums: Floats
    shortest: int
    """Tokens, the prompt's included, that the row must have before it may end."""

    def at(self, position: int) -> tuple[Ints, Floats]:
        """Return the ids and the sums for the token at a position."""
        if position < self.shortest:
            return self.early_ids, self.early_sums
        return self.ids, self.sums


class SamplingSettings:
    """The sampling settings of all rows."""

    def __init__(self, num_rows: int) -> None:
        self.rows_needing_sampler: set[int] = set()
        """Rows that want more than the likeliest token, or another one."""
        self._records = np.full(num_rows, np.array(Record(), dtype=RECORDS))
        self._edits: dict[int, Edits] = {}

    def admit(self, admission: RowAdmission) -> None:
        self.release(admission.row)
        params, num_prompt = admission.params, admission.num_prompt_tokens
        record = _record(params, num_prompt)
        edits = _edits(params, num_prompt, admission.stop_token_ids)
        if len(edits.early_ids):
            self._edits[admission.row] = edits
        if len(edits.early_ids) or record != Record(num_prompt=num_prompt) or params.grammar:
            self.rows_needing_sampler.add(admission.row)
        self._records[admission.row] = record

    def release(self, row: int) -> None:
        self._edits.pop(row, None)
        self.rows_needing_sampler.discard(row)

    def of(self, rows: list[int], positions: list[int], vocabulary: int) -> StepSettings[NDArray[Any]]:
        """Return the settings for the tokens that these rows sample at these positions."""
        numbers, lengths = np.array(rows, dtype=np.int64), np.array(positions, dtype=np.int64)
        records = self._records[numbers]
        repeating = np.flatnonzero(records["repetition"] != 1)
        counting = np.flatnonzero((records["presence"] != 0) | (records["frequency"] != 0))
        scored = np.flatnonzero(records["num_top"] >= 0)
        edit_places, edit_sums = self._edits_of(rows, positions, vocabulary)
        return StepSettings(
            temperature=records["temperature"],
            min_p_reach=records["min_p_reach"],
            top_p=records["top_p"],
            edit_sums=edit_sums,
            repetition=records["repetition"][repeating],
            presence=records["presence"][counting],
            frequency=records["frequency"][counting],
            rows=numbers,
            positions=lengths,
            seed=records["seed"],
            top_k=records["top_k"],
            edit_places=edit_places,
            repeating=repeating,
            repeating_rows=numbers[repeating],
            repeating_lengths=lengths[repeating],
            counting=counting,
            counting_rows=numbers[counting],
            counting_prompts=records["num_prompt"][counting],
            counting_lengths=lengths[counting],
            scored=scored,
            num_top=records["num_top"][scored],
        )

    def _edits_of(self, rows: list[int], positions: list[int], vocabulary: int) -> tuple[Ints, Floats]:
        firsts, ids, sums = [0], [np.empty(0, np.int64)], [np.empty(0)]
        for i, row in enumerate(rows if self._edits else []):
            if row in self._edits:
                some_ids, some_sums = self._edits[row].at(positions[i])
                firsts.append(i * vocabulary)
                ids.append(some_ids)
                sums.append(some_sums)
        places = np.concatenate(ids) + np.repeat(firsts, [len(some) for some in ids])
        return places, np.concatenate(sums)


def _record(params: SamplingParams, num_prompt: int) -> Record:
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    num_top = -1 if params.logprobs is None else params.logprobs
    if params.temperature <= 0:
        return Record(*penalties, num_prompt, num_top)
    assert params.seed is not None
    temperature = max(params.temperature, LOWEST_TEMPERATURE)
    reach = temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
    return Record(*penalties, num_prompt, num_top, temperature, reach, params.top_p, params.top_k, params.seed)


def _edits(params: SamplingParams, num_prompt: int, stop_token_ids: list[int]) -> Edits:
    ids, sums = list(params.logit_bias), list(params.logit_bias.values())
    stops = stop_token_ids if params.min_tokens else []
    return Edits(
        np.array(ids, dtype=np.int64),
        np.array(sums, dtype=np.float64),
        np.array([*ids, *stops], dtype=np.int64),
        np.array([*sums, *[-math.inf] * len(stops)], dtype=np.float64),
        num_prompt + params.min_tokens,
    )
