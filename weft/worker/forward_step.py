"""The forward step on the device: from the row table, through the model, to the likeliest tokens back in the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.kernels import AttentionBatch, InputEmbeds
from weft.kernels.batch import AdapterGroups
from weft.kernels.kv_cache import KvCache
from weft.kernels.weights import AdaptedRun, AdapterWeights
from weft.model.dense import DenseModel, LastTokens
from weft.model.dense_lora import AdapterSlots, forward_adapted
from weft.switches import is_on
from weft.worker.inputs import StepInputs, StepShape
from weft.worker.rows import RowTable


class FastStep(Protocol):
    """A fast step computes a whole step in native code."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        adapted: Sequence[AdaptedRun] = (),
        input_embeds: InputEmbeds | None = None,
    ) -> Tensor:
        """Return the logits of the tokens at `rows`, and write the cache as the model's own forward pass does."""

    def with_hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        hidden_rows: Tensor,
        adapted: Sequence[AdaptedRun] = (),
        input_embeds: InputEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the same, and the final hidden states of the tokens at `hidden_rows`."""

    def lay_out(self, adapter: AdapterWeights) -> None:
        """Lay out an adapter as native code reads it, before the first step that has it; from any thread."""


class RequestedTokens(NamedTuple):
    """The places, among the step's tokens, of those whose logits or hidden states rows request."""

    logits_at: Tensor
    """Tokens that are not sampled from."""
    hidden_at: Tensor


class RequestedStates(NamedTuple):
    """The logits and hidden states that rows request."""

    logits: Tensor
    hidden: Tensor


class ForwardOutput(NamedTuple):
    """The output of a step for each of its samples, on the device."""

    logits: Tensor
    tokens: Tensor
    """The likeliest tokens."""
    peaks: Tensor
    """Their logits; not finite where a row's logits are not numbers."""
    requested: RequestedStates | None = None


class Stepper:
    """The stepper runs a model over its KV cache and its row table."""

    def __init__(
        self, model: DenseModel, kv_cache: KvCache, table: RowTable, *, fast_step: FastStep | None = None
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.table = table
        self.fast_step = fast_step

    def step(
        self,
        shape: StepShape,
        inputs: StepInputs,
        longest: int,
        requested: RequestedTokens | None = None,
        adapted: Sequence[AdaptedRun] = (),
        input_embeds: InputEmbeds | None = None,
        slots: AdapterSlots | None = None,
    ) -> ForwardOutput:
        """Compute a step in which no sequence is longer than `longest`. Tokens have the adapters of `adapted` in
        native code, else those of `slots`. It neither waits for the device nor reads from it."""
        table, positions = self.table, inputs.positions
        width = -(-longest // table.block_size)
        tokens, cache_slots, block_tables = self.model.ops.gather_inputs(
            table.tokens, table.blocks[:, :width], table.block_size, inputs.token_rows, positions, inputs.sequence_rows
        )
        batch = AttentionBatch(
            num_decodes=shape.decodes,
            query_starts=inputs.query_starts,
            lengths=inputs.lengths,
            block_tables=block_tables,
            slots=cache_slots,
            is_one_prompt=shape.decodes == 0 and shape.prompts == 1 and shape.prompt_tokens == longest,
        )
        if input_embeds is not None:
            # Where a row is input_embeds there is no token: any will do.
            tokens = tokens.clamp(min=0)
        states = None
        if requested is None:
            logits = self._logits(shape, inputs, tokens, batch, width, adapted, input_embeds, slots)
        else:
            logits, states = self._requested(requested, inputs, tokens, batch, adapted, input_embeds, slots)
        best, peaks = self.model.ops.greedy(logits)
        table.tokens[inputs.sample_rows, inputs.sample_ends] = best
        return ForwardOutput(logits, best, peaks, states)

    def _requested(
        self,
        requested: RequestedTokens,
        inputs: StepInputs,
        tokens: Tensor,
        batch: AttentionBatch,
        adapted: Sequence[AdaptedRun],
        input_embeds: InputEmbeds | None,
        slots: AdapterSlots | None,
    ) -> tuple[Tensor, RequestedStates]:
        """Return the logits that are sampled from, and the states that rows request."""
        at = torch.cat([inputs.sample_at, requested.logits_at])
        if self.fast_step is not None:
            logits, hidden = self.fast_step.with_hidden(
                tokens, inputs.positions, batch, at, requested.hidden_at, adapted, input_embeds
            )
        else:
            states = self._states(inputs, tokens, batch, input_embeds, slots)
            logits, hidden = self.model.logits(states[at]), states[requested.hidden_at]
        sampled, others = torch.split(logits, [len(inputs.sample_at), len(requested.logits_at)])
        return sampled, RequestedStates(others, hidden)

    def _states(
        self,
        inputs: StepInputs,
        tokens: Tensor,
        batch: AttentionBatch,
        input_embeds: InputEmbeds | None,
        slots: AdapterSlots | None,
    ) -> Tensor:
        """Return the final hidden states of all the step's tokens."""
        model, positions, kv_cache = self.model, inputs.positions, self.kv_cache
        if slots is None:
            return model.forward(tokens, positions, kv_cache, batch, input_embeds=input_embeds)
        groups = AdapterGroups(inputs.slot_order, inputs.slot_starts)
        return forward_adapted(model, tokens, positions, kv_cache, batch, slots, groups, input_embeds)

    def _logits(
        self,
        shape: StepShape,
        inputs: StepInputs,
        tokens: Tensor,
        batch: AttentionBatch,
        width: int,
        adapted: Sequence[AdaptedRun],
        input_embeds: InputEmbeds | None,
        slots: AdapterSlots | None,
    ) -> Tensor:
        if self.fast_step is not None:
            return self.fast_step(tokens, inputs.positions, batch, inputs.sample_at, adapted, input_embeds)
        model = self.model
        if slots is not None or shape.samples_all or not is_on("last-tokens"):
            states = self._states(inputs, tokens, batch, input_embeds, slots)
            return model.logits(states if shape.samples_all else states[inputs.sample_at])
        last = AttentionBatch(
            num_decodes=shape.samples,
            query_starts=torch.arange(shape.samples + 1, device=tokens.device),
            lengths=inputs.sample_ends,
            block_tables=self.table.blocks[inputs.sample_rows, :width],
            slots=batch.slots[inputs.sample_at],
        )
        last_tokens = LastTokens(inputs.sample_at, last)
        hidden = model.forward(tokens, inputs.positions, self.kv_cache, batch, last_tokens, input_embeds)
        return model.logits(hidden)
