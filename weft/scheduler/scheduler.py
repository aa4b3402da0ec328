"""The scheduler: `plan = schedule()`, then `events = apply(plan, result)`. Pure Python: no torch, no I/O.

There is no prefill and no decode: every request is a cursor whose `computed` catches up with its `known` under
the step's budget. Denoise steps of images are counted in the same tokens. Results may arrive one step late: what a
plan promised is remembered with it, and never derived again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from weft.plan import (
    Admission,
    Denoise,
    DenoiseAdmission,
    Drawn,
    Limits,
    PlacedText,
    PromptLogprobs,
    Row,
    Sampled,
    StepPlan,
    StepResult,
)
from weft.scheduler import policy
from weft.scheduler.block_pool import Block, BlockPool
from weft.scheduler.cursors import Cursor, DenoiseCursor, Need, RowCursor, TextCursor
from weft.scheduler.denoise import Images
from weft.scheduler.parallel_sampling import Siblings, shared_prompt, waits_for
from weft.scheduler.policy import LEAST_TOKENS, Throttle
from weft.scheduler.prefix_cache import PrefixCache
from weft.scheduler.stages import first_cursor, next_cursor
from weft.scheduler.step import Promised, Step, denoise_event, failure_event, token_event, vector_event
from weft.scheduler.validate import check_request
from weft.scheduler.waiting_queue import WaitingQueue
from weft.types import EngineStats, Event, Request, StepEvents

NO_MEMORY = f"There is no memory for this request, even alone and in steps of {LEAST_TOKENS} tokens."


class Scheduler:
    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        if limits.blocks_for(limits.max_model_len) > limits.num_blocks - 1:
            raise ValueError(f"{limits.num_blocks} blocks cannot hold one request of {limits.max_model_len} tokens")
        if limits.image is not None and limits.image.max_given_bytes < 0:
            raise ValueError(f"canvases and texts take more than {limits.image.max_embedding_bytes} bytes")
        self.limits = limits
        self.throttle = Throttle(limits)
        self.pool = BlockPool(limits.num_blocks)
        self.prefixes = PrefixCache(self.pool, limits)
        self.waiting = WaitingQueue()
        self.siblings = Siblings()
        """They wait too, but not in the queue."""
        self.running: list[RowCursor] = []
        """In the order of admission."""
        self.images = Images(limits.image)
        self.cursors: dict[str, Cursor] = {}
        """Every request that has not ended."""
        self.free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._released_rows: list[int] = []
        self._under_way: dict[int, Promised] = {}
        self._next_step_id = 0
        self._clock = clock
        self._num_arrived = 0
        self._counts = dict.fromkeys(
            ("prompt_tokens", "computed_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "preemptions",
             "denoise_steps", "images"), 0
        )  # fmt: skip
        self._encode_seconds = 0.0
        self._denoise_seconds = 0.0

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest: the last check before anything is computed."""
        check_request(request, self.limits, self.cursors)
        cursor = first_cursor(request, self.limits, self._num_arrived, self._clock())
        self._num_arrived += 1
        self.images.num_open += request.image is not None
        self.waiting.tenants.opened(cursor.tenant)
        if isinstance(cursor, RowCursor) and waits_for(cursor, self.cursors.get(request.sibling_of)):
            self.siblings.add(cursor)
        else:
            self.waiting.add(cursor)
        self.cursors[cursor.id] = cursor
        if not request.output_token_ids and not request.sibling_of:
            self._counts["prompt_tokens"] += request.num_prompt_tokens

    def abort(self, request_id: str) -> bool:
        """End a request without an event: whoever aborts it knows. False if there is no such request."""
        cursor = self.cursors.get(request_id)
        if cursor is None:
            return False
        self._end(cursor)
        return True

    @property
    def adapters(self) -> set[int]:
        """The numbers of those that open requests have."""
        return {cursor.request.adapter.number for cursor in self.cursors.values() if cursor.request.adapter is not None}

    @property
    def has_work(self) -> bool:
        return bool(self.cursors)

    def num_promises(self, cursor: Cursor) -> int:
        """Steps under way that advance this request."""
        return sum(cursor in promised.rows or cursor in promised.images for promised in self._under_way.values())

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running) + len(self.images.drawing),
            waiting=len(self.waiting) + len(self.siblings) + len(self.images.aside),
            blocks_total=self.pool.num_usable,
            blocks_used=self.pool.num_usable - self.pool.num_free,
            steps=self._next_step_id,
            prepared=False,
            images_running=self.images.holdings.num_canvases,
            images_waiting=self.images.num_open - self.images.holdings.num_canvases,
            embedding_bytes=self.images.holdings.num_bytes,
            encode_seconds=self._encode_seconds,
            denoise_seconds=self._denoise_seconds,
            **self._counts,
        )

    # One step.

    def schedule(self) -> StepPlan | None:
        """Promise the work of the next step, or None when nothing can be computed now."""
        step = Step(self.throttle.tokens)
        self._force_preemption()
        for drawing in reversed(self.images.take_ready()):
            self._go_on(drawing)
        if self.images.must_go_alone:
            self._plan_idle_rest(step)
        else:
            self._plan_all(step)
        if step.is_empty:
            return None
        plan = StepPlan(
            self._next_step_id,
            self._released_rows,
            step.admit,
            step.rows,
            self.images.holdings.released,
            step.admit_images,
            step.denoise,
        )
        self._under_way[plan.step_id] = step.promised
        self._counts["computed_tokens"] += step.decodes + step.prompt_tokens
        self._next_step_id += 1
        self._released_rows = []
        self.images.holdings.released = []
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Take in the result of a step, and return what it brings to requests."""
        brought = StepEvents()
        events = brought.events
        sampled, gained = iter(result.sampled), iter(result.gained)
        promised = self._under_way.pop(plan.step_id)
        for row, (cursor, preemptions) in zip(plan.rows, promised.rows.items(), strict=True):
            token = next(sampled) if row.samples else None
            gain = next(gained) if row.extra is not None else None
            if cursor.ended:
                continue
            cursor.pending -= row.samples
            if error := (token.error if token else "") or (gain.error if gain else ""):
                events.append(self._failure(cursor, error))
                continue
            if token is not None:
                cursor.tokens.append(token.token_id)
            # What made broken logits is not worth finding again; what a preempted request held is gone.
            holds_still = cursor.preemptions == preemptions
            if holds_still:
                self.prefixes.remember(cursor, row)
            if gain is not None:
                cursor.gain(row, gain)
                if gain.vector is not None:
                    self._end(cursor)
                    events.append(vector_event(cursor, gain.vector))
                elif holds_still and isinstance(cursor, TextCursor) and row.start + row.count == cursor.known:
                    self._encoded(cursor)
            if token is not None:
                self._sampled(cursor, token, brought)
        for denoise, image, drawn in zip(plan.denoise, promised.images, result.drawn, strict=True):
            if not image.ended:
                events.append(self._failure(image, drawn.error) if drawn.error else self._drawn(image, denoise, drawn))
        self.throttle.went_well()
        return brought

    def take_back(self, failed: StepPlan, *later: StepPlan) -> list[Event]:
        """Undo a step for which there was no memory, and those that were launched after it. Their requests wait to be
        computed again, in smaller steps; one that was alone in the smallest step ends with an error."""
        promised = self._take_back(failed)
        for plan in later:
            self._take_back(plan)
        is_hopeless = self.throttle.is_least and failed.num_requests == 1
        self.throttle.failed(failed)
        if not is_hopeless:
            return []
        alone = [*promised.rows, *promised.images]
        return [self._failure(cursor, NO_MEMORY) for cursor in alone if not cursor.ended]

    # The parts of a step.

    def _plan_all(self, step: Step) -> None:
        """Decodes, then denoise steps and prompts, each with a share of what is left."""
        decodes, others = policy.decodes_first(self.running)
        for cursor in decodes:
            self._plan_running(cursor, min(1, step.budget), step)
        for sibling in reversed(self.siblings.take_ready(self.cursors)):
            self.waiting.add(sibling, ahead=True)
        if self.images.drawing:
            self._plan_images(step, prompts_wait=len(self.waiting) > 0 or any(cursor.todo for cursor in others))
        step.prompt_room = policy.prompt_room(self.limits, step.decodes, self.waiting.num_tokens)
        for cursor in others:
            self._plan_running(cursor, self._share_of(cursor, step), step)
        can_begin = partial(self._can_begin, step)
        while (head := self.waiting.next(can_begin)) is not None and self._admit(head, step):
            self.waiting.remove(head)
        if not step.decodes:
            self._plan_idle_rest(step)

    def _plan_images(self, step: Step, *, prompts_wait: bool) -> None:
        limits = self.limits.image
        assert limits is not None, "an image was admitted that nothing can draw"
        in_turn, most = self.images.in_turn(self.waiting.tenants.served), self._most_images(step)
        if self.images.draws_whole:
            chosen = in_turn[:most]
        else:
            credit = policy.denoise_credit(limits, step.budget, decodes=step.decodes, prompts_wait=prompts_wait)
            chosen = self.images.share(in_turn, step.budget, most, is_alone=step.is_empty, credit=credit)
        for cursor in chosen:
            self._promise_image(cursor, step)

    def _plan_idle_rest(self, step: Step) -> None:
        """Denoise steps in what nobody else wants of a step."""
        in_turn = self.images.in_turn(self.waiting.tenants.served, step.promised.images)
        for cursor in self.images.take(in_turn, step.budget, self._most_images(step), is_alone=step.is_empty):
            self._promise_image(cursor, step)

    def _most_images(self, step: Step) -> int:
        """How many more images a step may have. After steps without memory no more than other requests, and in the
        smallest steps each is alone, so that one that does not fit is found."""
        if self.throttle.is_least and not step.is_empty:
            return 0
        return (1 if self.images.draws_singly else self.throttle.rows) - len(step.denoise)

    def _can_begin(self, step: Step, cursor: Cursor) -> bool:
        """Whether there is what only some requests need."""
        match cursor.need:
            case None:
                return True
            case Need.SCORING:
                return step.scoring_room > 0
            case Need.CANVAS | Need.GIVEN:
                return self.images.holdings.has_room_for(cursor.request)

    def _plan_running(self, cursor: RowCursor, count: int, step: Step) -> None:
        if cursor.row < 0 or count == 0:
            return
        new_blocks: list[Block] = []
        missing = self.limits.blocks_for(cursor.computed + count) - len(cursor.blocks)
        if missing > 0:
            while missing > self.pool.num_free:
                victim = policy.victim(self.running, step.promised.rows) or cursor
                self._preempt(victim)
                step.preempted = True
                if victim is cursor:
                    return
            new_blocks = self.pool.allocate(missing)
            cursor.blocks += new_blocks
        self._promise(cursor, count, new_blocks, step)

    def _admit(self, cursor: Cursor, step: Step) -> bool:
        """Let a waiting request begin, if all that it needs for that is there."""
        if isinstance(cursor, DenoiseCursor):
            self.images.holdings.take(cursor)
            cursor.since = self._clock()
            cursor.queue_seconds = cursor.since - cursor.arrived_at
            self._go_on(cursor)
            return True
        if isinstance(cursor, TextCursor) and cursor.is_needless:
            cursor.ended = True
            self._go_on(cursor.drawing)
            return True
        return isinstance(cursor, RowCursor) and self._admit_to_row(cursor, step)

    def _admit_to_row(self, cursor: RowCursor, step: Step) -> bool:
        """Give a waiting request a row, the blocks that others have for it and its first chunk, if all of it fits."""
        if step.preempted or cursor.pending or len(self.running) >= self.throttle.rows:
            return False
        if self._share_of(cursor, step) == 0:
            return False
        found = shared_prompt(cursor, self.running) or self.prefixes.find(cursor)
        whole = cursor.preemptions > self.limits.max_preemptions
        target = self.limits.blocks_for(cursor.limit if whole else cursor.known) - len(found)
        spare = self.pool.num_free - sum(block.refs == 0 for block in found)
        # Running requests will soon want a block each: admitting down to the last one would only preempt again.
        if target > spare - len(self.running):
            return False
        for block in found:
            self.pool.share(block)
        cursor.computed = len(found) * self.limits.block_size
        count = self._share_of(cursor, step)
        fresh = target if whole else self.limits.blocks_for(cursor.computed + count) - len(found)
        cursor.blocks = found + self.pool.allocate(fresh)
        cursor.holds_all = whole
        cursor.row = self.free_rows.pop()
        self.running.append(cursor)
        request = cursor.request
        if isinstance(cursor, TextCursor):
            cursor.text.is_being_encoded = True
        elif cursor.preemptions == 0:
            cursor.queue_seconds = self._clock() - cursor.arrived_at
            cursor.cached_tokens = min(cursor.computed, cursor.num_prompt)
            if cursor.takes_cached and not request.sibling_of:
                self._counts["prefix_queries"] += cursor.num_prompt
                self._counts["prefix_hits"] += cursor.cached_tokens
        step.admit.append(
            Admission(
                cursor.row,
                cursor.tokens,
                cursor.num_prompt,
                request.params,
                request.stop_token_ids,
                request.adapter.number if request.adapter is not None else None,
                cursor.id,
            )
        )
        self._promise(cursor, count, cursor.blocks, step)
        return True

    def _share_of(self, cursor: RowCursor, step: Step) -> int:
        """How many tokens of this request the step has room for."""
        if cursor.decoding:
            return min(1, step.budget)
        chunk = self.limits.max_prefill_chunk
        if step.decodes:
            chunk = min(chunk, max(0, step.prompt_room - step.prompt_tokens))
        if cursor.scores_prompt:
            chunk = min(chunk, step.scoring_room)
        return min(cursor.todo, chunk, step.budget)

    def _promise(self, cursor: RowCursor, count: int, new_blocks: list[Block], step: Step) -> None:
        start, decoding = cursor.computed, cursor.decoding
        samples = decoding or cursor.samples(count)
        extra = None if decoding else cursor.extra(count)
        step.rows.append(Row(cursor.row, start, count, [block.id for block in new_blocks], samples, extra))
        step.promised.rows[cursor] = cursor.preemptions
        step.budget -= count
        if decoding:
            step.decodes += 1
        else:
            step.prompt_tokens += count
        if extra is not None and isinstance(extra, PromptLogprobs):
            step.scoring_room -= count
        self.waiting.tenants.charge(cursor.tenant, count)
        cursor.settled = start
        cursor.computed += count
        cursor.pending += samples

    def _promise_image(self, cursor: DenoiseCursor, step: Step) -> None:
        slot, count = cursor.slot, cursor.todo if self.images.draws_whole else 1
        if not cursor.is_begun:
            text, negative = (PlacedText() if text is None else text.placed for text in cursor.texts)
            step.admit_images.append(DenoiseAdmission(slot, cursor.image, text, negative, cursor.id))
            cursor.is_begun = True
        shows = cursor.shows_after(cursor.computed + count)
        step.denoise.append(Denoise(slot, cursor.computed, count, cursor.cost * count, shows))
        step.promised.images.append(cursor)
        # In the smallest steps nobody stands beside an image, so that one that does not fit is found.
        step.budget = 0 if self.throttle.is_least else max(0, step.budget - cursor.cost)
        self.waiting.tenants.charge(cursor.tenant, cursor.cost * count)
        cursor.computed += count

    def _preempt(self, cursor: RowCursor) -> None:
        """Take everything from a running request; it waits at the head of its priority to be computed again."""
        self._leave_row(cursor)
        cursor.computed = cursor.settled = 0
        cursor.preemptions += 1
        if isinstance(cursor, TextCursor):
            cursor.drawing.preemptions = cursor.preemptions
        self.waiting.put_back(cursor)
        self._counts["preemptions"] += 1

    def _take_back(self, plan: StepPlan) -> Promised:
        promised = self._under_way.pop(plan.step_id)
        for row, cursor in zip(plan.rows, promised.rows, strict=True):
            cursor.pending -= row.samples
        for cursor in [cursor for cursor in reversed(self.running) if cursor in promised.rows]:
            self._preempt(cursor)
        # Nobody knows how far the worker came: what it was to forget, or to begin, it is told again.
        self._released_rows += plan.release
        self.images.holdings.released += plan.release_slots
        begun = {admission.slot for admission in plan.admit_images}
        for denoise, image in zip(plan.denoise, promised.images, strict=True):
            image.computed = min(image.computed, denoise.start)
            image.is_begun = image.is_begun and denoise.slot not in begun
        return promised

    def _force_preemption(self) -> None:
        every = self.limits.force_preempt_every
        if every and self._next_step_id % every == every - 1:
            victim = policy.victim(self.running, ())
            if victim is not None and victim.preemptions <= self.limits.max_preemptions:
                self._preempt(victim)

    def _sampled(self, cursor: RowCursor, sampled: Sampled, brought: StepEvents) -> None:
        self._counts["generation_tokens"] += 1
        finish = cursor.finish_after(sampled.token_id)
        if finish is not None:
            self._end(cursor)
        if finish is None and sampled.logprob is None and cursor.reported:
            brought.tokens[cursor.id] = sampled.token_id
        else:
            brought.events.append(token_event(cursor, sampled, finish))

    def _encoded(self, cursor: TextCursor) -> None:
        """A text is whole: its row and its blocks are free."""
        self._leave_row(cursor)
        cursor.ended = True
        cursor.text.is_whole = True
        self._go_on(cursor.drawing)

    def _go_on(self, drawing: DenoiseCursor) -> None:
        """Bring an image that was admitted to its next stage, or aside."""
        following = next_cursor(drawing, self.images.holdings.texts, self.limits)
        self.cursors[drawing.id] = following or drawing
        if following is None:
            self.images.aside.append(drawing)
        elif isinstance(following, TextCursor):
            self.waiting.put_back(following)
        else:
            began, drawing.since = drawing.since, self._clock()
            self._encode_seconds += drawing.since - began
            self.images.drawing.append(drawing)

    def _drawn(self, cursor: DenoiseCursor, denoise: Denoise, drawn: Drawn) -> Event:
        cursor.done = denoise.start + denoise.count
        self._counts["denoise_steps"] += denoise.count
        if cursor.done == cursor.known:
            self._counts["images"] += 1
            self._denoise_seconds += self._clock() - cursor.since
            self._end(cursor)
        return denoise_event(cursor, drawn)

    def _failure(self, cursor: Cursor, error: str) -> Event:
        self._end(cursor)
        return failure_event(cursor.drawing or cursor, error)

    def _end(self, cursor: Cursor) -> None:
        cursor.ended = True
        del self.cursors[cursor.id]
        if cursor in self.waiting:
            self.waiting.remove(cursor)
        elif isinstance(cursor, DenoiseCursor):
            self.images.remove(cursor)
        elif isinstance(cursor, RowCursor) and cursor.row >= 0:
            self._leave_row(cursor)
        elif isinstance(cursor, RowCursor):
            self.siblings.remove(cursor)
        if cursor.drawing is not None and cursor.drawing.slot >= 0:
            self.images.holdings.give_back(cursor.drawing)
        self.images.num_open -= cursor.request.image is not None
        self.waiting.tenants.closed(cursor.tenant)

    def _leave_row(self, cursor: RowCursor) -> None:
        self.running.remove(cursor)
        self.pool.release(cursor.blocks)
        cursor.blocks = []
        cursor.holds_all = False
        self.free_rows.append(cursor.row)
        self._released_rows.append(cursor.row)
        cursor.row = -1
        if isinstance(cursor, TextCursor):
            cursor.text.is_being_encoded = False
