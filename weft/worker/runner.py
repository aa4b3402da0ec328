"""The runner: one plan in, one forward pass, one sampled token for each row that asked for one, and the plan's denoise
steps beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from weft.plan import Row, StepPlan, StepResult
from weft.worker.diffusion.denoiser import Denoiser, DrawnBatch
from weft.worker.forward_step import Outcome, Stepper
from weft.worker.grammar_masks import Constraint, Constraints, Masks, followed, masks_of
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import exact_shape, lay_out, to_device, views
from weft.worker.lora_rows import MAX_ADAPTERS, Adapters
from weft.worker.prompt_outputs import Extras, GainedBatch
from weft.worker.sampler import SampledBatch, rehearse, sample

SHAPES: tuple[tuple[int, ...], ...] = (
    (128,), (1,), (16,), (100,), (1, 1, 1, 1, 1, 100), (1,) * 16 + (128, 128), (512,), (1, 1, 2000), (2048,), (1024,),
)  # fmt: skip
"""Each a step: the new tokens of its sequences. The likeliest first request comes first."""


class WarmUp:
    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._left = list(reversed(SHAPES))

    def next(self) -> bool:
        """Compute one more of the shapes; False when all were."""
        if not self._left:
            return False
        table = self._stepper.table
        longest = table.tokens.shape[1]
        rows = [Row(table.padding_row, 0, min(count, longest - 1), [], True) for count in self._left.pop()]
        shape = exact_shape(rows)
        layout = lay_out(rows, shape, table.padding_row)
        (packed,) = to_device([layout.packed], table.device)
        outcome = self._stepper.step(shape, views(packed, shape), layout.longest)
        rehearse(outcome.logits, self._stepper.model.ops)
        torch.cuda.synchronize()
        return True


class Besides(NamedTuple):
    """What a step gives besides tokens."""

    gained: GainedBatch | None = None
    drawn: DrawnBatch | None = None


class Pending(NamedTuple):
    """A step that was launched. `result` waits for it."""

    plan: StepPlan
    sampling: list[Row]
    sampled: SampledBatch | None
    besides: Besides
    constrained: dict[int, Constraint] | None = None
    """Of the rows that sample, by place: a row may be another request's when this step is read."""

    def result(self) -> StepResult:
        read = self.sampled.read() if self.sampled is not None else []
        if self.constrained is not None:
            read = followed(self.constrained, read)
        by_row = dict(zip((row.row for row in self.sampling), read, strict=True))
        sampled = [by_row[row.row] for row in self.plan.rows if row.samples]
        gained = self.besides.gained.read() if self.besides.gained is not None else {}
        drawn = self.besides.drawn.read() if self.besides.drawn is not None else []
        extras = [gained[row.row] for row in self.plan.rows if row.extra]
        return StepResult(self.plan.step_id, sampled, extras, drawn)


class Deferred(NamedTuple):
    """A step whose logits are on their way. What older steps sampled decides what its rows may sample: they must be
    read before `sample` launches that."""

    plan: StepPlan
    sample: Callable[[], Pending]

    def result(self) -> StepResult:
        return self.sample().result()


class Runner:
    def __init__(
        self,
        stepper: Stepper,
        *,
        graphs: StepGraphs | None = None,
        warm_up: WarmUp | None = None,
        denoiser: Denoiser | None = None,
        max_adapters: int = MAX_ADAPTERS,
    ) -> None:
        self.stepper = stepper
        self.adapters = Adapters(stepper.model, max_adapters)
        self.denoiser = denoiser
        self.extras = Extras(stepper.table, denoiser)
        self.graphs = graphs
        self.warm_up = warm_up

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending | Deferred:
        """Launch a step. What it samples is in the row table for the next step, read or not."""
        self.adapters.take_in(plan)
        if not plan.rows:
            self.stepper.table.take_in(plan)
            self.extras.forget(plan.release)
            return Pending(plan, [], None, Besides(drawn=self._drawn(plan)))
        drawn = self._drawn(plan)
        table = self.stepper.table
        exact = exact_shape(plan.rows)
        has_extras = any(row.extra is not None for row in plan.rows)
        is_plain = not has_extras and not self.adapters.are_among(plan)
        captured = self.graphs.shape_for(exact) if self.graphs is not None and is_plain else None
        layout = lay_out(plan.rows, captured or exact, table.padding_row)
        packed, *writes = to_device([layout.packed, *table.take_in(plan)], table.device)
        table.write(*writes)
        self.extras.forget(plan.release)
        ask = self.extras.ask(layout) if has_extras else None
        if self.graphs is not None and captured is not None:
            outcome = self.graphs.replay(captured, packed)
        else:
            asked, adapted = ask.asked if ask else None, self.adapters.among(layout)
            outcome = self.stepper.step(exact, views(packed, exact), layout.longest, asked, adapted)
        gained = self.extras.collect(ask, outcome.given) if ask and outcome.given else None
        besides = Besides(gained, drawn)
        if constrained := table.constraints.among(layout.sampling):
            sample = partial(self._sample_constrained, plan, layout.sampling, outcome, constrained, besides)
            return Deferred(plan, sample)
        return Pending(plan, layout.sampling, self._sampled(layout.sampling, outcome), besides)

    @property
    def constraints(self) -> Constraints:
        return self.stepper.table.constraints

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do a piece of work that makes later steps faster; False when there is none left."""
        if self.warm_up is not None and self.warm_up.next():
            return True
        if self.graphs is not None and self.graphs.capture_next():
            return True
        return self.denoiser is not None and self.denoiser.make_ready()

    @torch.inference_mode()
    def _sample_constrained(
        self, plan: StepPlan, rows: list[Row], outcome: Outcome, constrained: dict[int, Constraint], besides: Besides
    ) -> Pending:
        return Pending(plan, rows, self._sampled(rows, outcome, masks_of(constrained)), besides, constrained)

    def _drawn(self, plan: StepPlan) -> DrawnBatch | None:
        if self.denoiser is None:
            return None
        with self.denoiser.beside():
            self.denoiser.take_in(plan)
            return self.denoiser.draw(plan.denoise) if plan.denoise else None

    def _sampled(self, rows: list[Row], outcome: Outcome, masks: Masks | None = None) -> SampledBatch | None:
        """The likeliest tokens are in the table already; rows that want others get them now."""
        if not rows:
            return None
        logits, tokens, peaks = (of[: len(rows)] for of in (outcome.logits, outcome.tokens, outcome.peaks))
        numbers, positions = [row.row for row in rows], [row.start + row.count for row in rows]
        return sample(logits, tokens, peaks, self.stepper.table, numbers, positions, self.stepper.model.ops, masks)
