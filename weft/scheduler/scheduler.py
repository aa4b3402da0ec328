"""The scheduler: `plan = schedule()`, then `events = apply(plan, result)`. Pure Python: no torch, no I/O.

A step computes decodes first, then denoise steps of images, then prefills in chunks, then the first chunks of requests
that it admits, all under one budget of tokens. Every request is a cursor whose `computed` catches up with its `known`:
the scheduler plans rows, blocks and budgets, and the cursor answers what depends on the kind of request. Results may
arrive one step late: what a plan promised is remembered with it, and never derived again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import takewhile
from operator import attrgetter
from typing import Any

from weft.engine_stats import EngineStats
from weft.plan import Limits, PromptLogprobs, Row, RowAdmission, Sampled, StepPlan, StepResult
from weft.scheduler import policy
from weft.scheduler.block_pool import Block, BlockPool
from weft.scheduler.cursors import Cursor, RowCursor, first_cursor, needs_row
from weft.scheduler.denoise import Images
from weft.scheduler.parallel_sampling import Siblings, shared_prompt, waits_for
from weft.scheduler.policy import FIRST_TOKENS, LEAST_MIXED_TOKENS, LEAST_TOKENS, StepPace, Throttle
from weft.scheduler.prefix_cache import PrefixCache
from weft.scheduler.speculation import NO_DRAFT, Draft
from weft.scheduler.step import Promised, Step, denoise_event, failure_event, token_event, vector_event
from weft.scheduler.validate import check_request
from weft.scheduler.waiting_queue import WaitingQueue
from weft.types import Event, FinishReason, Request, StepEvents

NO_MEMORY = f"There is no memory for this request, even alone and in steps of {LEAST_TOKENS} tokens."


class Scheduler:
    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        if limits.blocks_for(limits.max_model_len) > limits.num_blocks - 1:
            raise ValueError(f"{limits.num_blocks} blocks cannot hold one request of {limits.max_model_len} tokens")
        self.limits = limits
        self.throttle = Throttle(limits)
        self.pace = StepPace(limits.max_num_batched_tokens, limits.max_step_seconds, first=FIRST_TOKENS)
        self.mixed_pace = StepPace(
            limits.max_num_batched_tokens, limits.max_mixed_step_seconds, LEAST_MIXED_TOKENS, growth=0.0, on_gpu=True
        )
        """The pace of steps that prefill and decode."""
        self.pool = BlockPool(limits.num_blocks)
        self.prefixes = PrefixCache(self.pool, limits)
        self.waiting = WaitingQueue()
        self.siblings = Siblings()
        self.running: list[RowCursor] = []
        """Requests that have a row, in the order of admission."""
        self.images = Images(limits, self.throttle, self.waiting.tenants)
        self.cursors: dict[str, Cursor] = {}
        """Every request that has not ended, by id."""
        self.free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._released_rows: list[int] = []
        self._under_way: dict[int, Promised] = {}
        self._applied_at = 0.0
        self._was_idle = False
        """The device had nothing to do when the last step was launched."""
        self._next_step_id = 0
        self._clock = clock
        self._num_arrived = 0
        self._counts: dict[str, Any] = dict.fromkeys(
            (
                *("prompt_tokens", "computed_tokens", "generation_tokens", "prefix_queries", "prefix_hits"),
                *("decode_tokens", "prefill_tokens", "encode_tokens", "denoise_tokens"),
                *("preemptions", "drafts", "draft_tokens", "accepted_tokens"),
            ),
            0,
        )

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest: the last check before anything is computed."""
        check_request(request, self.limits, self.cursors)
        cursor = first_cursor(request, self.limits, self._num_arrived, self._clock())
        self._num_arrived += 1
        self.images.opened(cursor)
        self.waiting.tenants.opened(cursor.tenant)
        if isinstance(cursor, RowCursor) and waits_for(cursor, self.cursors.get(request.sibling_of)):
            self.siblings.add(cursor)
        else:
            self.waiting.add(cursor)
        self.cursors[cursor.id] = cursor
        if not request.output_token_ids and not request.sibling_of:
            self._counts["prompt_tokens"] += request.num_prompt_tokens

    def abort(self, request_id: str) -> bool:
        """End a request without an event; returns False if there is no such request."""
        cursor = self.cursors.get(request_id)
        if cursor is None:
            return False
        self._end(cursor)
        return True

    @property
    def adapters(self) -> set[int]:
        """The numbers of the adapters that open requests use."""
        return {cursor.request.adapter.number for cursor in self.cursors.values() if cursor.request.adapter is not None}

    @property
    def has_work(self) -> bool:
        return bool(self.cursors)

    def num_promises(self, cursor: Cursor) -> int:
        """Return how many steps under way advance this request."""
        return sum(cursor in promised.rows or cursor in promised.images for promised in self._under_way.values())

    def stats(self) -> EngineStats:
        images, latent_slots = self.images, self.images.memory.num_latent_slots
        return EngineStats(
            running=len(self.running) + len(images.denoising),
            waiting=len(self.waiting) + len(self.siblings) + len(images.awaiting_embeds),
            blocks_total=self.pool.num_usable,
            blocks_used=self.pool.num_usable - self.pool.num_free,
            steps=self._next_step_id,
            prepared=False,
            images_running=latent_slots,
            images_waiting=images.num_open - latent_slots,
            embedding_bytes=images.memory.num_bytes,
            images=images.num_finished,
            denoise_steps=images.num_steps,
            encode_seconds=images.encode_seconds,
            denoise_seconds=images.denoise_seconds,
            **self._counts,
        )

    # One step.

    def schedule(self) -> StepPlan | None:
        """Return the plan of the next step, or None when nothing can be computed now."""
        tokens = self.throttle.tokens
        step = Step(tokens, min(tokens, self.limits.max_prefill_chunk), self._clock())
        self._force_preemption()
        for image in reversed(self.images.take_ready()):
            self._next_stage(image)
        if self.images.must_go_alone:
            self.images.plan_idle_rest(step)
        else:
            self._plan_step(step)
        if step.is_empty:
            return None
        plan = StepPlan(
            self._next_step_id,
            self._released_rows,
            step.admit,
            step.rows,
            self.images.memory.released,
            step.admit_images,
            step.denoise,
        )
        self._under_way[plan.step_id] = step.promised
        step.count(self._counts)
        self._next_step_id += 1
        self._released_rows = []
        self.images.memory.released = []
        return plan

    def launched(self, plan: StepPlan, *, was_idle: bool) -> None:
        """Note that a step has been launched; `was_idle`: the device had nothing to do when that began."""
        self._was_idle = was_idle
        promised = self._under_way[plan.step_id]
        seconds = self._clock() - promised.planned_at
        if was_idle:
            self._under_way[plan.step_id] = promised._replace(launch_seconds=seconds)
        decodes = _num_decodes(plan)
        # Steps with fewer prefills are captured: launching them takes no time.
        if decodes and not plan.denoise and plan.num_tokens - decodes > self.limits.max_mixed_prefill:
            self.mixed_pace.launch_took(seconds, is_exact=was_idle)

    def apply(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Take in the result of a step, and return what it brings to requests."""
        brought = StepEvents()
        events = brought.events
        sampled, outputs = iter(result.sampled), iter(result.row_outputs)
        promised = self._under_way.pop(plan.step_id)
        for row, (cursor, preemptions) in zip(plan.rows, promised.rows.items(), strict=True):
            tokens = next(sampled) if row.samples else []
            output = next(outputs) if row.request is not None else None
            if cursor.ended:
                continue
            cursor.pending -= row.num_samples
            if error := (tokens[0].error if tokens else "") or (output.error if output else ""):
                events.append(self._failure(cursor, error))
                continue
            holds_still = cursor.preemptions == preemptions
            num_sampled = len(tokens)
            if row.draft:
                cursor.settle_draft(row, num_sampled, holds_still=holds_still)
                self._counts["drafts"] += 1
                self._counts["draft_tokens"] += len(row.draft)
                self._counts["accepted_tokens"] += num_sampled - 1
            finish = cursor.take_sampled(tokens)
            # Blocks behind broken logits must not be found again, and a preempted request has lost its blocks.
            if holds_still:
                if row.draft_prefill is not None:
                    cursor.take_draft_prefill(row.draft_prefill, row, num_sampled)
                self.prefixes.remember(cursor, row.start, row.start + (len(tokens) if row.draft else row.count))
            if output is not None:
                cursor.take_output(row, output)
                if output.vector is not None:
                    self._end(cursor)
                    events.append(vector_event(cursor, output.vector))
            if holds_still and cursor.completes_stage(row):
                self._leave_row(cursor)
                cursor.end_stage()
                self._next_stage(cursor)
            if tokens:
                self._sampled(cursor, tokens, finish, brought, len(row.draft), min(num_sampled - 1, len(tokens)))
        for denoise, image, made in zip(plan.denoise, promised.images, result.denoise_outputs, strict=True):
            if image.ended:
                continue
            if made.error:
                events.append(self._failure(image, made.error))
                continue
            if self.images.apply(image, denoise, self._clock()):
                self._end(image)
            if image.ends_step:
                events.append(denoise_event(image, denoise, made))
        self.throttle.went_well()
        self._take_in_time(plan, promised)
        return brought

    def take_back(self, failed: StepPlan, *later: StepPlan) -> list[Event]:
        """Undo a step for which there was no memory, and the steps that were launched after it. Their requests wait to
        be computed again, in smaller steps; one that was alone in the smallest step ends with an error."""
        promised = self._take_back(failed)
        for plan in later:
            self._take_back(plan)
        is_hopeless = self.throttle.is_least and failed.num_requests == 1
        self.throttle.failed(failed)
        if not is_hopeless:
            return []
        alone = [*promised.rows, *promised.images]
        return [self._failure(cursor, NO_MEMORY) for cursor in alone if not cursor.ended]

    def _take_in_time(self, plan: StepPlan, promised: Promised) -> None:
        """Tell the paces how long a step took."""
        now, launch_seconds = self._clock(), promised.launch_seconds
        # A step that was planned while another was under way began when that one ended.
        seconds = now - (promised.planned_at if launch_seconds else max(promised.planned_at, self._applied_at))
        self._applied_at = now
        had_ended = bool(self._under_way) and self._was_idle
        # A step that only prefills may have no result that is waited for; decodes alone tell nothing of prompts.
        decodes = _num_decodes(plan)
        is_mixed = 0 < decodes < sum(not row.draft for row in plan.rows)
        if plan.denoise or not (self.limits.max_step_seconds or is_mixed):
            return
        before = sum(row.count * (row.start + row.count / 2) for row in plan.rows) / max(1, plan.num_tokens)
        if not had_ended:
            self.pace.took(plan.num_tokens, seconds, before)
        if is_mixed and decodes <= policy.MOST_DECODES * plan.num_tokens:
            if had_ended or launch_seconds > policy.MOSTLY * seconds:
                self.mixed_pace.took_no_longer_than_launching()
            else:
                self.mixed_pace.took(plan.num_tokens, seconds, before)

    # The parts of a step.

    def _plan_step(self, step: Step) -> None:
        """Plan decodes, then denoise steps and prefills, each with a share of the budget that is left."""
        decodes, prefills = policy.decodes_and_prefills(self.running)
        self._plan_decodes(decodes, step)
        for sibling in reversed(self.siblings.take_ready(self.cursors)):
            self.waiting.add(sibling, ahead=True)
        self.images.plan(step, prompts_wait=len(self.waiting) > 0 or any(cursor.todo for cursor in prefills))
        self._plan_prefills(prefills, step)
        if not step.decodes:
            self.images.plan_idle_rest(step)

    def _plan_decodes(self, decodes: list[RowCursor], step: Step) -> None:
        """Plan the next token of each, and drafts behind it while the decodes are few."""
        spare = min(self.limits.max_speculative_tokens, step.budget) - len(decodes)
        for cursor in decodes:
            # A request may have lost its row to one before it; and where one goes on behind a draft is not known yet.
            if cursor.row < 0 or cursor.drafted:
                continue
            draft = NO_DRAFT
            if spare > 0:
                draft = cursor.draft(min(spare, self._spare_slots(cursor)), step.draft_budget)
                spare -= len(draft.tokens)
            self._plan_running(cursor, min(1, step.budget) + len(draft.tokens), step, draft)

    def _spare_slots(self, cursor: RowCursor) -> int:
        """Return how many tokens behind the next one the request has slots for, or could have with blocks that no
        running request will want soon: a draft is no reason to preempt."""
        spare = max(0, self.pool.num_free - len(self.running))
        return (len(cursor.blocks) + spare) * self.limits.block_size - cursor.computed - 1

    def _plan_prefills(self, prefills: list[RowCursor], step: Step) -> None:
        """Plan the next chunks of running prefills, then admit waiting requests while there is budget for them. Prompts
        that fit whole into half of the budget come before those that do not: none waits until a long one is through."""
        context = max((cursor.computed for cursor in prefills), default=0)
        budget = self.pace.tokens_at(context)
        if step.decodes:
            budget = max(LEAST_TOKENS, budget - step.decodes - step.draft_tokens)
            waiting_tokens = self.waiting.num_tokens
            if self.limits.max_mixed_step_seconds:
                waiting_tokens += sum(cursor.num_prompt for cursor in prefills)
            mixed = policy.prefill_budget(self.limits, step.decodes, waiting_tokens, self.mixed_pace.tokens_at(context))
            budget = min(budget, mixed)
        wanted = ((self.limits.blocks_for(cursor.known), len(cursor.blocks)) for cursor in prefills)
        step.prefill_blocks = sum(max(0, all_blocks - held) for all_blocks, held in wanted)
        step.prefill_budget = budget // 2
        for cursor in prefills[1:]:
            if cursor.todo <= step.prefill_left:
                self._plan_running(cursor, self._chunk_size(cursor, step), step)
        if prefills:
            self._admit_waiting(step, whole=True)
        step.prefill_budget = budget
        for cursor in prefills:
            if cursor not in step.promised.rows:
                self._plan_running(cursor, self._chunk_size(cursor, step), step)
        self._admit_waiting(step)

    def _admit_waiting(self, step: Step, *, whole: bool = False) -> None:
        """Admit requests in their order; with `whole`, up to the first whose prompt does not fit into what is left."""

        def can_begin(cursor: Cursor) -> bool:
            return cursor.can_begin(step.prompt_logprobs_budget, self.images.memory)

        while (head := self.waiting.next(can_begin)) is not None:
            if whole and not (needs_row(head) and head.todo <= step.prefill_left):
                return
            if not self._admit(head, step):
                return
            self.waiting.remove(head)

    def _plan_running(self, cursor: RowCursor, count: int, step: Step, draft: Draft = NO_DRAFT) -> None:
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
            if not cursor.decoding:
                step.prefill_blocks -= missing
        self._plan_row(cursor, count, new_blocks, step, draft)

    def _admit(self, cursor: Cursor, step: Step) -> bool:
        """Let a waiting request begin, if it can."""
        if needs_row(cursor):
            return self._admit_to_row(cursor, step)
        cursor.begin(self.images.memory, self._clock())
        self._next_stage(cursor)
        return True

    def _admit_to_row(self, cursor: RowCursor, step: Step) -> bool:
        """Give a waiting request a row, the cached blocks of its prompt and its first chunk of prefill, if all fit."""
        if step.preempted or cursor.pending or len(self.running) >= self.throttle.rows:
            return False
        if self._chunk_size(cursor, step) == 0:
            return False
        found = shared_prompt(cursor, self.running) or self.prefixes.find(cursor)
        whole = cursor.preemptions > self.limits.max_preemptions
        target = self.limits.blocks_for(cursor.limit if whole else cursor.known) - len(found)
        spare = self.pool.num_free - sum(block.refs == 0 for block in found)
        # Running requests will soon want a block each, and those that prefill all of their prompts': admitting down to
        # the last one would only preempt again.
        if target > spare - len(self.running) - step.prefill_blocks:
            return False
        for block in found:
            self.pool.share(block)
        cursor.computed = len(found) * self.limits.block_size
        cursor.draft_computed = sum(1 for _ in takewhile(attrgetter("drafted"), found)) * self.limits.block_size
        count = self._chunk_size(cursor, step)
        fresh = target if whole else self.limits.blocks_for(cursor.computed + count) - len(found)
        cursor.blocks = found + self.pool.allocate(fresh)
        step.prefill_blocks += target - fresh
        cursor.holds_all = whole
        cursor.enter_row(self.free_rows.pop(), self.images.memory, self._clock())
        self.running.append(cursor)
        request = cursor.request
        if cursor.preemptions == 0 and cursor.takes_cached and not request.sibling_of:
            self._counts["prefix_queries"] += cursor.num_prompt
            self._counts["prefix_hits"] += cursor.cached_tokens
        step.admit.append(
            RowAdmission(
                cursor.row,
                cursor.tokens,
                cursor.num_prompt,
                request.params,
                request.stop_token_ids,
                request.adapter.number if request.adapter is not None else None,
                cursor.id,
                request.embeds,
            )
        )
        self._plan_row(cursor, count, cursor.blocks, step)
        return True

    def _chunk_size(self, cursor: RowCursor, step: Step) -> int:
        """Return how many tokens of this request the step can compute: chunked prefill divides long prompts."""
        if cursor.decoding:
            return min(1, step.budget)
        # A prompt that is found in the cache begins with a long context.
        slow = max(LEAST_TOKENS, self.pace.tokens_at(cursor.computed) - step.prefill_tokens)
        chunk = min(self.limits.max_prefill_chunk, step.prefill_left, slow)
        if cursor.scores_prompt:
            chunk = min(chunk, step.prompt_logprobs_budget)
        return min(cursor.todo, chunk, step.budget)

    def _plan_row(
        self, cursor: RowCursor, count: int, new_blocks: list[Block], step: Step, draft: Draft = NO_DRAFT
    ) -> None:
        start, decoding = cursor.computed, cursor.decoding
        samples = decoding or cursor.samples(count)
        request = None if decoding else cursor.row_request(count)
        row = Row(cursor.row, start, count, [block.id for block in new_blocks], samples, request, *draft)
        step.rows.append(row)
        step.promised.rows[cursor] = cursor.preemptions
        step.budget -= count
        if decoding:
            step.decodes += 1
            step.draft_tokens += len(draft.tokens)
        else:
            step.prefill_tokens += count
            if cursor.encodes:
                step.encode_tokens += count
        if isinstance(request, PromptLogprobs):
            step.prompt_logprobs_budget -= count
        self.waiting.tenants.charge(cursor.tenant, count)
        cursor.settled = start
        cursor.computed += count
        cursor.pending += row.num_samples
        cursor.drafted = len(draft.tokens)
        if draft.prefill is not None:
            step.draft_budget -= draft.prefill.count
            # It computes its drafts but the last.
            cursor.draft_computed = draft.prefill.stop + max(0, len(draft.tokens) - 1)

    def _preempt(self, cursor: RowCursor) -> None:
        """Take row and blocks from a running request; it waits at the head of its tenant's requests of its priority."""
        self._leave_row(cursor)
        cursor.preempted()
        self.waiting.put_back(cursor)
        self._counts["preemptions"] += 1

    def _take_back(self, plan: StepPlan) -> Promised:
        promised = self._under_way.pop(plan.step_id)
        for row, cursor in zip(plan.rows, promised.rows, strict=True):
            cursor.pending -= row.num_samples
            if row.draft:
                cursor.drafted = 0
        for cursor in [cursor for cursor in reversed(self.running) if cursor in promised.rows]:
            self._preempt(cursor)
        self._released_rows += plan.release
        self.images.take_back(plan, promised.images)
        return promised

    def _force_preemption(self) -> None:
        every = self.limits.force_preempt_every
        if every and self._next_step_id % every == every - 1:
            victim = policy.victim(self.running, ())
            if victim is not None and victim.preemptions <= self.limits.max_preemptions:
                self._preempt(victim)

    def _sampled(
        self, cursor: RowCursor, tokens: list[Sampled], finish: FinishReason | None, brought: StepEvents,
        num_drafted: int, num_accepted: int,
    ) -> None:  # fmt: skip
        self._counts["generation_tokens"] += len(tokens)
        if finish is not None:
            self._end(cursor)
        if finish is None and not num_drafted and tokens[0].logprob is None and cursor.reported:
            brought.tokens[cursor.id] = tokens[0].token_id
        else:
            brought.events.append(token_event(cursor, tokens, finish, num_drafted, num_accepted))

    def _next_stage(self, cursor: Cursor) -> None:
        """Move a request on to its next stage: in the waiting queue if that needs a row."""
        stage = cursor.next_stage(self.images.memory, self.limits)
        self.cursors[stage.id] = stage
        if needs_row(stage):
            self.waiting.put_back(stage)
        else:
            self.images.enter(stage, self._clock())

    def _failure(self, cursor: Cursor, error: str) -> Event:
        self._end(cursor)
        return failure_event(cursor.denoise_cursor or cursor, error)

    def _end(self, cursor: Cursor) -> None:
        cursor.ended = True
        del self.cursors[cursor.id]
        if cursor in self.waiting:
            self.waiting.remove(cursor)
        elif isinstance(cursor, RowCursor):
            (self._leave_row if cursor.row >= 0 else self.siblings.remove)(cursor)
        self.images.closed(cursor)
        self.waiting.tenants.closed(cursor.tenant)

    def _leave_row(self, cursor: RowCursor) -> None:
        self.running.remove(cursor)
        self.pool.release(cursor.blocks)
        self.free_rows.append(cursor.row)
        self._released_rows.append(cursor.row)
        cursor.leave_row()


def _num_decodes(plan: StepPlan) -> int:
    """Return how many rows of a plan decode one token each."""
    return sum(row.count == 1 and not row.draft for row in plan.rows)
