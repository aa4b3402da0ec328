"""Images that were admitted, and which of them do a unit of their work next: a denoise step, the encoding of a prompt
by the pipeline's text encoder, or the decoding of latents by its VAE.

In a step that computes tokens too, images come after the decodes and before the prefills, and pay for what they take:
every step gives them a credit in tokens, and while it is not used up they do units. A unit cannot be divided, so the
first one may overdraw the credit; the steps that follow pay the debt off.

Let C be the largest cost of a unit, and `left` what decodes leave of the step's budget. Then

- a step that decodes has units of at most max(max_mixed_denoise, C) tokens beside it, and any n such steps in a row
  have at most n * max_mixed_denoise + C;
- while prompts wait as well, images take no more than half of what is left over time, plus C;
- the first of the images (by tenant, by priority, by arrival) does a unit at least every C / credit + 1 steps in
  which it fits; the credit is what is left, half of it while prompts wait, and no more than max_mixed_denoise beside
  decodes;
- an image that does not fit beside the decodes gets a step without tokens, after it has waited for PATIENCE steps. So
  decodes lose at most one step of PATIENCE + 1.

In a step without decodes, images may take what prefills leave without paying.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.plan import Denoise, Limits, StepPlan
from weft.scheduler.cursors import Cursor, DenoiseCursor
from weft.scheduler.policy import Throttle, denoise_credit
from weft.scheduler.prompt_embeds import ImageMemory
from weft.scheduler.step import Step
from weft.scheduler.waiting_queue import Tenants

PATIENCE = 3


class Images:
    """The requests for images that denoise or wait to. Those that wait for admission, or encode one of their prompts,
    are in the waiting queue or in rows like any other request."""

    def __init__(self, limits: Limits, throttle: Throttle, tenants: Tenants) -> None:
        self._limits = limits.image
        self._throttle = throttle
        self._tenants = tenants
        self.memory = ImageMemory(limits)
        self.denoising: list[DenoiseCursor] = []
        self.awaiting_embeds: list[DenoiseCursor] = []
        """Images whose prompts are being encoded in rows of other images."""
        self.num_open = 0
        """Images that have not ended, wherever they are."""
        self.num_finished = 0
        self.num_steps = 0
        self.encode_seconds = 0.0
        self.denoise_seconds = 0.0
        self._credit = 0
        """In tokens; below 0 it is a debt."""
        self._waited = 0
        """Steps in a row in which the first image in turn did not fit beside the tokens."""

    # Requests come and go.

    def opened(self, cursor: Cursor) -> None:
        self.num_open += cursor.denoise_cursor is not None

    def enter(self, cursor: Cursor, now: float) -> None:
        """Take in an image that needs no row: to be denoised, or to wait for rows of other images."""
        assert isinstance(cursor, DenoiseCursor), "only images have stages without a row"
        if cursor.missing:
            self.awaiting_embeds.append(cursor)
            return
        self.encode_seconds += now - cursor.since
        cursor.since = now
        self.denoising.append(cursor)

    def take_ready(self) -> list[DenoiseCursor]:
        """Remove and return the images that need not wait for other rows: their prompts are encoded, or no row encodes
        them any more."""
        ready = [cursor for cursor in self.awaiting_embeds if not cursor.awaits_embeds]
        for cursor in ready:
            self.awaiting_embeds.remove(cursor)
        return ready

    def closed(self, cursor: Cursor) -> None:
        """Forget an image that has ended, whatever its stage, and take back what any request holds."""
        image = cursor.denoise_cursor
        (image or cursor).release(self.memory)
        if image is None:
            return
        for place in (self.denoising, self.awaiting_embeds):
            if image in place:
                place.remove(image)
        self.num_open -= 1

    # One step.

    @property
    def must_go_alone(self) -> bool:
        return self._waited >= PATIENCE and any(cursor.todo for cursor in self.denoising)

    def plan(self, step: Step, *, prompts_wait: bool) -> None:
        """Plan units beside decodes and prefills."""
        if not self.denoising:
            return
        assert self._limits is not None, "an image was admitted without an image model"
        in_turn, most = self._in_turn(step.promised.images), self._max_images(step)
        if self._limits.whole_images:
            chosen = in_turn[:most]
        else:
            credit = denoise_credit(self._limits, step.budget, decodes=step.decodes, prompts_wait=prompts_wait)
            chosen = self._share(in_turn, step.budget, most, is_alone=step.is_empty, credit=credit)
        for cursor in chosen:
            self._promise(cursor, step)

    def plan_idle_rest(self, step: Step) -> None:
        """Plan units in what tokens leave of a step's budget."""
        self._waited = 0
        left, most, is_alone = step.budget, self._max_images(step), step.is_empty
        chosen: list[DenoiseCursor] = []
        for cursor in self._in_turn(step.promised.images):
            if _fits(cursor, left, most - len(chosen), is_alone and not chosen):
                chosen.append(cursor)
                left -= cursor.cost
        for cursor in chosen:
            self._promise(cursor, step)

    def apply(self, cursor: DenoiseCursor, denoise: Denoise, now: float) -> bool:
        """Count a unit that an image has done; returns whether it is finished."""
        cursor.done += 1
        self.num_steps += denoise.count
        is_finished = cursor.done == cursor.known
        if denoise.stage == "encode":
            self.encode_seconds += now - cursor.since
            cursor.since = now
        if is_finished:
            self.num_finished += 1
            self.denoise_seconds += now - cursor.since
        return is_finished

    def take_back(self, plan: StepPlan, planned: Collection[DenoiseCursor]) -> None:
        """Undo the units of a plan. How far the worker came is unknown: what it was to forget, or to begin, it
        is told again."""
        self.memory.released += plan.release_slots
        begun = {admission.slot for admission in plan.admit_images}
        for denoise, cursor in zip(plan.denoise, planned, strict=True):
            cursor.computed = min(cursor.computed, cursor.units.index(denoise))
            cursor.is_begun = cursor.is_begun and denoise.slot not in begun

    def _promise(self, cursor: DenoiseCursor, step: Step) -> None:
        if not cursor.is_begun:
            step.admit_images.append(cursor.admission())
            cursor.is_begun = True
        denoise, cost = cursor.next_unit, cursor.cost
        step.denoise.append(denoise)
        step.promised.images.append(cursor)
        # In the smallest steps each image is alone, so that one that does not fit is found.
        step.budget = 0 if self._throttle.is_least else max(0, step.budget - cost)
        self._tenants.charge(cursor.tenant, denoise.cost)
        cursor.computed += 1

    def _max_images(self, step: Step) -> int:
        """Return how many more images a step may have. After steps without memory they are no more than other requests,
        and in the smallest steps each is alone, so that one that does not fit is found."""
        if self._throttle.is_least and not step.is_empty:
            return 0
        is_single = self._limits is not None and self._limits.single_images
        return (1 if is_single else self._throttle.rows) - len(step.denoise)

    def _in_turn(self, planned: Collection[DenoiseCursor]) -> list[DenoiseCursor]:
        """Return the images that have a unit to do and are not planned yet, the first in turn first."""
        able = [cursor for cursor in self.denoising if cursor.todo and cursor not in planned]
        return sorted(able, key=lambda cursor: (self._tenants.served(cursor.tenant), cursor.priority, cursor.arrival))

    def _share(
        self, in_turn: list[DenoiseCursor], left: int, most: int, *, is_alone: bool, credit: int
    ) -> list[DenoiseCursor]:
        """Return the images that do a unit in a step which tokens share, and which gives images this much credit."""
        self._credit = min(credit, self._credit + credit)
        first_fits = bool(in_turn) and _fits(in_turn[0], left, most, is_alone)
        self._waited = self._waited + 1 if in_turn and not first_fits else 0
        chosen: list[DenoiseCursor] = []
        for cursor in in_turn:
            is_first = not chosen
            can_pay = self._credit >= cursor.cost or (is_first and self._credit > 0)
            if can_pay and _fits(cursor, left, most - len(chosen), is_alone and is_first):
                chosen.append(cursor)
                left -= cursor.cost
                self._credit -= cursor.cost
        return chosen


def _fits(cursor: DenoiseCursor, left: int, most: int, is_alone: bool) -> bool:
    """Return whether a step has budget for an image; one that is alone fits at any cost, as it cannot be divided."""
    return most > 0 and (cursor.cost <= left or is_alone)
