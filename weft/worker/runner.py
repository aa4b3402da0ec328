"""The runner executes a plan: one forward pass, one sampled token for each row that samples, and the plan's denoise
steps beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from weft.model.dense_lora import AdapterSlots
from weft.plan import Row, Sampled, StepPlan, StepResult, accepted
from weft.worker.diffusion.denoiser import DenoiseOutputBatch, Denoiser
from weft.worker.draft_model import DraftModel
from weft.worker.forward_step import ForwardOutput, Stepper
from weft.worker.grammar_masks import Constraint, Constraints, Masks, follow, masks_of
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import decode_rows, exact_shape, input_embeds_of, lay_out, to_device, views
from weft.worker.lora_rows import LoraRows
from weft.worker.prompt_outputs import PromptOutputs, PromptRequests, RowOutputBatch
from weft.worker.rows import RowTable
from weft.worker.sampler import DraftedTokens, SampledBatch, sample, warm_up_sampler

WARM_UP_SHAPES: tuple[tuple[int, ...], ...] = (
    (128,), (1,), (16,), (100,), (1, 1, 1, 1, 1, 100), (1,) * 16 + (128, 128), (512,), (1, 1, 2000), (2048,), (1024,),
)  # fmt: skip
"""Steps to warm up, each as the new tokens of its sequences; the most likely first step comes first."""


def warm_up_rows(table: RowTable) -> list[list[Row]]:
    """Return the rows of the steps to warm up, of a table's padding row."""
    longest = table.tokens.shape[1]
    return [
        [Row(table.padding_row, 0, min(count, longest - 1), [], True) for count in counts] for counts in WARM_UP_SHAPES
    ]


class WarmUp:
    """The warm-up loads kernels, and compiles those that are not in the cache, by computing steps of the usual
    shapes."""

    def __init__(self, *steppers: Stepper) -> None:
        self._left = [
            (stepper, rows) for stepper in reversed(steppers) for rows in reversed(warm_up_rows(stepper.table))
        ]

    def next(self) -> bool:
        """Compute one more of the shapes; returns False when all were."""
        if not self._left:
            return False
        stepper, rows = self._left.pop()
        table = stepper.table
        shape = exact_shape(rows)
        layout = lay_out(rows, shape, table.padding_row)
        (packed,) = to_device([layout.packed], table.device)
        output = stepper.step(shape, views(packed, shape), layout.longest)
        warm_up_sampler(output.logits, stepper.model.ops)
        torch.cuda.synchronize()
        return True


class SideOutputs(NamedTuple):
    """The outputs of a step other than sampled tokens."""

    rows: RowOutputBatch | None = None
    denoise: DenoiseOutputBatch | None = None


class Pending(NamedTuple):
    """A step that was launched. `result` waits for it."""

    plan: StepPlan
    sampling: list[Row]
    """The rows that sample; one with a draft is there once for each of its tokens."""
    sampled: SampledBatch | None
    side: SideOutputs
    drafts: DraftedTokens | None = None
    constrained: dict[int, Constraint] | None = None
    """The constraints of the rows that sample, by row: one may belong to another request when this step is read."""

    @property
    def has_ended(self) -> bool:
        """False where it is not known."""
        if self.sampled is None or self.sampled.arrived is None:
            return self.sampled is not None
        return bool(self.sampled.arrived.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        read = self.sampled.read() if self.sampled is not None else []
        by_row: dict[int, list[Sampled]] = {row.row: [] for row in self.sampling}
        for row, token in zip(self.sampling, read, strict=True):
            by_row[row.row].append(token)
        for number, draft in (self.drafts.read(self.plan.rows) if self.drafts is not None else {}).items():
            by_row[number] = accepted(draft, by_row[number])
        follow(self.constrained or {}, by_row)
        sampled = [by_row[row.row] for row in self.plan.rows if row.samples]
        outputs = self.side.rows.read() if self.side.rows is not None else {}
        denoised = self.side.denoise.read() if self.side.denoise is not None else []
        row_outputs = [outputs[row.row] for row in self.plan.rows if row.request]
        return StepResult(self.plan.step_id, sampled, row_outputs, denoised)


class Deferred(NamedTuple):
    """A step whose logits are being computed. What older steps sampled decides what its rows may sample: they must be
    read before `sample` is called."""

    plan: StepPlan
    sample: Callable[[], Pending]

    @property
    def has_ended(self) -> bool:
        return False

    def result(self) -> StepResult:
        return self.sample().result()


class LaunchedStep(NamedTuple):
    """A step whose forward pass was launched, and whose tokens are still to be sampled."""

    sampling: list[Row]
    output: ForwardOutput
    requests: PromptRequests | None
    drafts: DraftedTokens | None


class Runner:
    """The runner launches the steps of plans on a model, and returns their pending results."""

    def __init__(
        self,
        stepper: Stepper,
        *,
        graphs: StepGraphs | None = None,
        warm_up: WarmUp | None = None,
        draft_model: DraftModel | None = None,
        denoiser: Denoiser | None = None,
        adapters: LoraRows | None = None,
    ) -> None:
        self.stepper = stepper
        self.adapters = adapters if adapters is not None else LoraRows(stepper)
        self.denoiser = denoiser
        self.prompt_outputs = PromptOutputs(stepper.table, denoiser)
        self.graphs = graphs
        self._adapted_graphs: StepGraphs | None = None
        self.warm_up = warm_up
        self.draft_model = draft_model

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending | Deferred:
        """Launch a step. The tokens that it samples are in the row table for the next step before they are read."""
        self.adapters.take_in(plan)
        denoised = self._denoised(plan)
        launched = self._launch(plan)
        if launched is None:
            return Pending(plan, [], None, SideOutputs(denoise=denoised))
        sampling, output, requests, drafts = launched
        prompts = self.prompt_outputs.collect(requests, output.requested) if requests and output.requested else None
        side = SideOutputs(prompts, denoised)
        if constrained := self.constraints.among(sampling):
            sample = partial(self._sample_constrained, plan, sampling, output, constrained, side, drafts)
            return Deferred(plan, sample)
        return Pending(plan, sampling, self._sampled(sampling, output, drafts), side, drafts)

    def _launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Take in a plan, and launch the forward pass of its rows; None: it has none."""
        table = self.stepper.table
        new = table.take_in(plan)
        if not plan.rows:
            self.prompt_outputs.forget(plan.release)
            return None
        rows = decode_rows(plan.rows)
        slots = self.adapters.slots_for(plan)
        exact = exact_shape(rows)._replace(slots=slots.count if slots is not None else 0)
        has_requests, has_embeds = any(row.request is not None for row in plan.rows), table.has_embeds(plan.rows)
        graphs = self._graphs_of(slots) if not has_requests and not has_embeds else None
        captured = graphs.shape_for(exact) if graphs is not None else None
        layout = lay_out(rows, captured or exact, table.padding_row, self.adapters.slot_of)
        writes = to_device([*new], table.device)
        table.write(*writes)
        if self.draft_model is not None:
            self.draft_model.draft(plan.rows)
        num_drafted = sum(len(row.draft) for row in plan.rows)
        drafts = self._drafts(*(column[-num_drafted:] for column in writes[:2])) if num_drafted else None
        self.prompt_outputs.forget(plan.release)
        requests = self.prompt_outputs.request(layout) if has_requests else None
        if graphs is not None and captured is not None:
            output = graphs.replay(captured, layout.packed)
        else:
            tokens, adapted = requests.tokens if requests else None, self.adapters.runs_in(layout)
            input_embeds = input_embeds_of(layout, table, self.stepper.model.weights.dtype) if has_embeds else None
            (packed,) = to_device([layout.packed], table.device)
            output = self.stepper.step(
                exact, views(packed, exact), layout.longest, tokens, adapted, input_embeds, slots
            )
        return LaunchedStep(layout.sampling, output, requests, drafts)

    def _drafts(self, rows: Tensor, positions: Tensor) -> DraftedTokens:
        """Return the drafted tokens at these places of the row table."""
        return DraftedTokens.of(self.stepper.table, rows, positions)

    @property
    def constraints(self) -> Constraints:
        return self.stepper.table.constraints

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do a piece of warm-up; returns False when there is none left."""
        if self._prepare_steps():
            return True
        drafts = self.draft_model.graphs if self.draft_model is not None else None
        if drafts is not None and drafts.capture_next():
            return True
        return self.denoiser is not None and self.denoiser.warm_up()

    def _prepare_steps(self) -> bool:
        """Do a piece of the warm-up of steps, which every rank does."""
        if self.warm_up is not None and self.warm_up.next():
            return True
        slots = self.adapters.slots
        adapted_graphs = self._graphs_of(slots) if slots is not None else None
        return any(graphs is not None and graphs.capture_next() for graphs in (self.graphs, adapted_graphs))

    def _graphs_of(self, slots: AdapterSlots | None) -> StepGraphs | None:
        """Return the graphs of steps that read these slots, or none. Slots that were allocated anew need new graphs."""
        if self.graphs is None or slots is None:
            return self.graphs
        if self._adapted_graphs is None or self._adapted_graphs.slots is not slots:
            self._adapted_graphs = self.graphs.with_slots(slots)
        return self._adapted_graphs

    @torch.inference_mode()
    def _sample_constrained(
        self,
        plan: StepPlan,
        rows: list[Row],
        output: ForwardOutput,
        constrained: dict[int, Constraint],
        side: SideOutputs,
        drafts: DraftedTokens | None,
    ) -> Pending:
        masks = masks_of(constrained, rows, drafts.read(plan.rows) if drafts is not None else {})
        return Pending(plan, rows, self._sampled(rows, output, drafts, masks), side, drafts, constrained)

    def _denoised(self, plan: StepPlan) -> DenoiseOutputBatch | None:
        if self.denoiser is None:
            return None
        with self.denoiser.side_stream():
            self.denoiser.take_in(plan)
            return self.denoiser.denoise(plan.denoise) if plan.denoise else None

    def _sampled(
        self, rows: list[Row], output: ForwardOutput, drafts: DraftedTokens | None, masks: Masks | None = None
    ) -> SampledBatch | None:
        """Sample for the rows that need more than the likeliest token, which is in the table already."""
        if not rows:
            return None
        logits, tokens, peaks = (of[: len(rows)] for of in (output.logits, output.tokens, output.peaks))
        numbers, positions = [row.row for row in rows], [row.start + row.count for row in rows]
        table, ops = self.stepper.table, self.stepper.model.ops
        return sample(logits, tokens, peaks, table, numbers, positions, ops, masks, drafts)
