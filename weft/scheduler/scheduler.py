"""The scheduler: `plan = schedule()`, then `events = apply(plan, result)`. Pure Python: no torch, no I/O.

There is no prefill and no decode: every request is a cursor whose `computed` catches up with its `known` under
the step's budget. Denoise steps of images are counted in the same tokens. Results may arrive one step late: what a
plan promised is remembered with it, and never derived again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.plan import (
    Admission,
    Denoise,
    DenoiseAdmission,
    Drawn,
    Limits,
    PromptLogprobs,
    Row,
    Sampled,
    StepPlan,
    StepResult,
)
from weft.scheduler import policy
from weft.scheduler.blocks import Block, BlockPool
from weft.scheduler.checks import check_request
from weft.scheduler.cursors import Cursor, DenoiseCursor, Need, RowCursor, TextCursor
from weft.scheduler.events import denoise_event, failure_event, token_event, vector_event
from weft.scheduler.images import Images
from weft.scheduler.prefix import find_prefix
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.siblings import Siblings, shared_blocks, waits_for
from weft.scheduler.stages import first_cursor, next_cursor
from weft.scheduler.step import Promised, Step
from weft.scheduler.throttle import LEAST_TOKENS, Throttle
from weft.types import EngineStats, Event, Request

NO_MEMORY = f"There is no memory for this request, even alone and in steps of {LEAST_TOKENS} tokens."


class Scheduler:
    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        if -(-limits.max_model_len // limits.block_size) > limits.num_blocks - 1:
            raise ValueError(f"{limits.num_blocks} blocks cannot hold one request of {limits.max_model_len} tokens")
        self.limits = limits
        self.throttle = Throttle(limits)
        self.pool = BlockPool(limits.num_blocks)
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
    def has_work(self) -> bool:
        return bool(self.cursors)

    def num_promises(self, cursor: Cursor) -> int:
        """Steps under way that advance this request."""
        return sum(cursor in promised.rows or cursor in promised.images for promised in self._under_way.values())

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running) + len(self.images.drawing),
            waiting=len(self.waiting) + len(self.siblings),
            blocks_total=self.pool.num_usable,
            blocks_used=self.pool.num_usable - self.pool.num_free,
            steps=self._next_step_id,
            prepared=False,
            images_running=self.images.canvases.num_taken,
            images_waiting=self.images.num_open - self.images.canvases.num_taken,
            embedding_bytes=self.images.canvases.num_bytes,
            encode_seconds=self._encode_seconds,
            denoise_seconds=self._denoise_seconds,
            **self._counts,
        )

    # One step.

    def schedule(self) -> StepPlan | None:
        """Promise the work of the next step, or None when nothing can be computed now."""
        step = Step(self.throttle.tokens)
        self._force_preemption()
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
            self.images.canvases.released,
            step.admit_images,
            step.denoise,
        )
        self._under_way[plan.step_id] = step.promised
        self._counts["computed_tokens"] += step.decodes + step.prompt_tokens
        self._next_step_id += 1
        self._released_rows = []
        self.images.canvases.released = []
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in what a step brought; the events are for whoever asked."""
        events: list[Event] = []
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
                self._remember_blocks(cursor, row)
            if gain is not None:
                cursor.gain(row, gain)
                if gain.vector is not None:
                    self._end(cursor)
                    events.append(vector_event(cursor, gain.vector))
                elif holds_still and isinstance(cursor, TextCursor) and row.start + row.count == cursor.known:
                    self._hand_over(cursor)
            if token is not None:
                events.append(self._sampled(cursor, token))
        for denoise, image, drawn in zip(plan.denoise, promised.images, result.drawn, strict=True):
            if not image.ended:
                events.append(self._failure(image, drawn.error) if drawn.error else self._drawn(image, denoise, drawn))
        self.throttle.went_well()
        return events

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
        while (head := self.waiting.next(self._lacking(step))) is not None and self._admit(head, step):
            self.waiting.remove(head)
        if not step.decodes:
            self._plan_idle_rest(step)

    def _plan_images(self, step: Step, *, prompts_wait: bool) -> None:
        limits = self.limits.image
        assert limits is not None, "an image was admitted that nothing can draw"
        chosen = self.images.in_turn(self.waiting.tenants.served)
        if not self.images.draws_whole:
            credit = policy.denoise_credit(limits, step.budget, decodes=step.decodes, prompts_wait=prompts_wait)
            most = self._most_images(step)
            chosen = self.images.share(chosen, step.budget, most, is_alone=step.is_empty, credit=credit)
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
        return self.throttle.rows - len(step.denoise)

    def _lacking(self, step: Step) -> list[Need]:
        lacking = [] if step.scoring_room > 0 else [Need.SCORING]
        return lacking if self.images.canvases.has_room else [*lacking, Need.CANVAS]

    def _plan_running(self, cursor: RowCursor, count: int, step: Step) -> None:
        if cursor.row < 0 or count == 0:
            return
        new_blocks: list[Block] = []
        missing = self._blocks_for(cursor.computed + count) - len(cursor.blocks)
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
            self._admit_to_canvas(cursor)
            self.images.drawing.append(cursor)
            return True
        return isinstance(cursor, RowCursor) and self._admit_to_row(cursor, step)

    def _admit_to_canvas(self, cursor: TextCursor | DenoiseCursor) -> None:
        if cursor.canvas.slot < 0:
            now = self._clock()
            self.images.canvases.take(cursor.canvas, now)
            cursor.queue_seconds = now - cursor.arrived_at

    def _admit_to_row(self, cursor: RowCursor, step: Step) -> bool:
        """Give a waiting request a row, the blocks that others have for it and its first chunk, if all of it fits."""
        if step.preempted or cursor.pending or len(self.running) >= self.throttle.rows:
            return False
        if self._share_of(cursor, step) == 0:
            return False
        found = self._shared_prompt(cursor) or self._cached_prefix(cursor)
        whole = cursor.preemptions > self.limits.max_preemptions
        target = self._blocks_for(cursor.limit if whole else cursor.known) - len(found)
        spare = self.pool.num_free - sum(block.refs == 0 for block in found)
        # Running requests will soon want a block each: admitting down to the last one would only preempt again.
        if target > spare - len(self.running):
            return False
        for block in found:
            self.pool.share(block)
        cursor.computed = len(found) * self.limits.block_size
        count = self._share_of(cursor, step)
        fresh = target if whole else self._blocks_for(cursor.computed + count) - len(found)
        cursor.blocks = found + self.pool.allocate(fresh)
        cursor.holds_all = whole
        cursor.row = self.free_rows.pop()
        self.running.append(cursor)
        request = cursor.request
        if isinstance(cursor, TextCursor):
            self._admit_to_canvas(cursor)
        elif cursor.preemptions == 0:
            cursor.queue_seconds = self._clock() - cursor.arrived_at
            cursor.cached_tokens = min(cursor.computed, cursor.num_prompt)
            if cursor.takes_cached and not request.sibling_of:
                self._counts["prefix_queries"] += cursor.num_prompt
                self._counts["prefix_hits"] += cursor.cached_tokens
        step.admit.append(
            Admission(cursor.row, list(cursor.tokens), cursor.num_prompt, request.params, request.stop_token_ids)
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
        slot, count = cursor.canvas.slot, cursor.todo if self.images.draws_whole else 1
        if not cursor.is_begun:
            length, negative = len(cursor.request.prompt_token_ids), len(cursor.image.negative_token_ids)
            step.admit_images.append(DenoiseAdmission(slot, cursor.image, length, negative * (cursor.image.passes > 1)))
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
        self.images.canvases.released += plan.release_slots
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

    def _sampled(self, cursor: RowCursor, sampled: Sampled) -> Event:
        self._counts["generation_tokens"] += 1
        finish = cursor.finish_after(sampled.token_id)
        if finish is not None:
            self._end(cursor)
        return token_event(cursor, sampled, finish)

    def _hand_over(self, cursor: TextCursor) -> None:
        """A stage of an image is done: its row and its blocks are free, and the next stage begins."""
        self._leave_row(cursor)
        cursor.ended = True
        following = next_cursor(cursor, self.limits)
        self.cursors[cursor.id] = following
        if isinstance(following, DenoiseCursor):
            began, following.canvas.since = following.canvas.since, self._clock()
            self._encode_seconds += following.canvas.since - began
            self.images.drawing.append(following)
        else:
            self.waiting.put_back(following)

    def _drawn(self, cursor: DenoiseCursor, denoise: Denoise, drawn: Drawn) -> Event:
        cursor.done = denoise.start + denoise.count
        self._counts["denoise_steps"] += denoise.count
        if cursor.done == cursor.known:
            self._counts["images"] += 1
            self._denoise_seconds += self._clock() - cursor.canvas.since
            self._end(cursor)
        return denoise_event(cursor, drawn)

    def _failure(self, cursor: Cursor, error: str) -> Event:
        self._end(cursor)
        return failure_event(cursor, error)

    def _end(self, cursor: Cursor) -> None:
        cursor.ended = True
        del self.cursors[cursor.id]
        if cursor in self.waiting:
            self.waiting.remove(cursor)
        elif isinstance(cursor, DenoiseCursor):
            self.images.drawing.remove(cursor)
        elif isinstance(cursor, RowCursor) and cursor.row >= 0:
            self._leave_row(cursor)
        elif isinstance(cursor, RowCursor):
            self.siblings.remove(cursor)
        if cursor.canvas is not None and cursor.canvas.slot >= 0:
            self.images.canvases.give_back(cursor.canvas)
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

    # Blocks.

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _shared_prompt(self, cursor: RowCursor) -> list[Block]:
        """The blocks of the prompt that a running sibling has computed, all that can be shared or none."""
        if not cursor.request.sibling_of or not cursor.takes_cached:
            return []
        return next(filter(None, (shared_blocks(cursor, relative) for relative in self.running)), [])

    def _cached_prefix(self, cursor: RowCursor) -> list[Block]:
        """Cached blocks that begin the request. At least its last token is computed: its logits are needed."""
        if not self.limits.enable_prefix_caching or not cursor.takes_cached:
            return []
        full = (len(cursor.tokens) - 1) // self.limits.block_size
        return find_prefix(self.pool, (cursor.keys.of(cursor.tokens, i) for i in range(full)))

    def _remember_blocks(self, cursor: RowCursor, row: Row) -> None:
        """Make the blocks that a row filled findable."""
        if self.limits.enable_prefix_caching:
            size = self.limits.block_size
            for i in range(row.start // size, (row.start + row.count) // size):
                self.pool.remember(cursor.blocks[i], cursor.keys.of(cursor.tokens, i))
