"""The scheduler: `plan = schedule()`, then `events = apply(plan, result)`. Pure Python: no torch, no I/O.

There is no prefill and no decode: every request is a cursor whose `computed` catches up with its `known` under
the step's budget. Results may arrive one step late: what a plan promised is remembered with it, and never
derived again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from weft.errors import InvalidRequest
from weft.plan import Admission, Limits, PromptLogprobs, Row, Sampled, StepPlan, StepResult
from weft.scheduler import policy
from weft.scheduler.blocks import Block, BlockPool
from weft.scheduler.cursors import Cursor, cursor_of
from weft.scheduler.prefix import find_prefix
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.siblings import Siblings, shared_blocks, waits_for
from weft.scheduler.throttle import LEAST_TOKENS, Throttle
from weft.types import EngineStats, Event, FinishReason, Request, check_priority, check_token_ids

NO_MEMORY = f"There is no memory for this request, even alone and in steps of {LEAST_TOKENS} tokens."
MAX_SCORED_TOKENS = 256
"""Prompt tokens of a step that are computed for their log probabilities: each takes a whole row of logits."""


class _Step:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self.admit: list[Admission] = []
        self.promised: dict[Cursor, int] = {}
        """Each planned cursor, with the number of preemptions it had when the promise was made."""
        self.decodes = 0
        self.prompt_tokens = 0
        """Tokens of rows that do not decode."""
        self.prompt_room = 0
        """How many there may be beside decodes."""
        self.scoring_room = MAX_SCORED_TOKENS
        self.preempted = False


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
        self.running: list[Cursor] = []
        """In the order of admission."""
        self.cursors: dict[str, Cursor] = {}
        """Every request that has not ended."""
        self.free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._released_rows: list[int] = []
        self._under_way: dict[int, dict[Cursor, int]] = {}
        self._next_step_id = 0
        self._clock = clock
        self._num_arrived = 0
        self._counts = dict.fromkeys(
            ("prompt_tokens", "computed_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "preemptions"), 0
        )

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest: the last check before anything is computed."""
        self._check(request)
        cursor = cursor_of(request, self.limits, self._num_arrived, self._clock())
        self._num_arrived += 1
        self.waiting.tenants.opened(cursor.tenant)
        if waits_for(cursor, self.cursors.get(request.sibling_of)):
            self.siblings.add(cursor)
        else:
            self.waiting.add(cursor)
        self.cursors[cursor.id] = cursor
        if not request.output_token_ids and not request.sibling_of:
            self._counts["prompt_tokens"] += cursor.num_prompt

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
        return sum(cursor in promised for promised in self._under_way.values())

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting) + len(self.siblings),
            blocks_total=self.pool.num_usable,
            blocks_used=self.pool.num_usable - self.pool.num_free,
            steps=self._next_step_id,
            prepared=False,
            **self._counts,
        )

    # One step.

    def schedule(self) -> StepPlan | None:
        """Promise the work of the next step, or None when nothing can be computed now."""
        step = _Step(self.throttle.tokens)
        self._force_preemption()
        decodes, others = policy.decodes_first(self.running)
        for cursor in decodes:
            self._plan_running(cursor, min(1, step.budget), step)
        for cursor in reversed(self.siblings.take_ready(self.cursors)):
            self.waiting.add(cursor, ahead=True)
        step.prompt_room = policy.prompt_room(self.limits, step.decodes, self.waiting.num_tokens)
        for cursor in others:
            self._plan_running(cursor, self._share_of(cursor, step), step)
        while (head := self.waiting.next(scored=step.scoring_room > 0)) is not None and self._admit(head, step):
            self.waiting.remove(head)
        if not step.rows:
            return None
        plan = StepPlan(self._next_step_id, self._released_rows, step.admit, step.rows)
        self._under_way[plan.step_id] = step.promised
        self._counts["computed_tokens"] += step.decodes + step.prompt_tokens
        self._next_step_id += 1
        self._released_rows = []
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in what a step brought; the events are for whoever asked."""
        events: list[Event] = []
        sampled, gained = iter(result.sampled), iter(result.gained)
        promised = self._under_way.pop(plan.step_id)
        for row, (cursor, preemptions) in zip(plan.rows, promised.items(), strict=True):
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
            if cursor.preemptions == preemptions:
                self._remember_blocks(cursor, row)
            if gain is not None:
                cursor.gain(row, gain)
                if gain.vector is not None:
                    events.append(self._encoded(cursor, gain.vector))
            if token is not None:
                events.append(self._event(cursor, token))
        self.throttle.went_well()
        return events

    def take_back(self, failed: StepPlan, *later: StepPlan) -> list[Event]:
        """Undo a step for which there was no memory, and those that were launched after it. Their requests wait to be
        computed again, in smaller steps; one that was alone in the smallest step ends with an error."""
        promised = self._take_back(failed)
        for plan in later:
            self._take_back(plan)
        is_hopeless = self.throttle.is_least and len(promised) == 1
        self.throttle.failed(failed)
        if not is_hopeless:
            return []
        return [self._failure(cursor, NO_MEMORY) for cursor in promised if not cursor.ended]

    # The parts of a step.

    def _plan_running(self, cursor: Cursor, count: int, step: _Step) -> None:
        if cursor.row < 0 or count == 0:
            return
        new_blocks: list[Block] = []
        missing = self._blocks_for(cursor.computed + count) - len(cursor.blocks)
        if missing > 0:
            while missing > self.pool.num_free:
                victim = policy.victim(self.running, step.promised) or cursor
                self._preempt(victim)
                step.preempted = True
                if victim is cursor:
                    return
            new_blocks = self.pool.allocate(missing)
            cursor.blocks += new_blocks
        self._promise(cursor, count, new_blocks, step)

    def _admit(self, cursor: Cursor, step: _Step) -> bool:
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
        if cursor.preemptions == 0:
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

    def _share_of(self, cursor: Cursor, step: _Step) -> int:
        """How many tokens of this request the step has room for."""
        if cursor.decoding:
            return min(1, step.budget)
        chunk = self.limits.max_prefill_chunk
        if step.decodes:
            chunk = min(chunk, max(0, step.prompt_room - step.prompt_tokens))
        if cursor.scores_prompt:
            chunk = min(chunk, step.scoring_room)
        return min(cursor.todo, chunk, step.budget)

    def _promise(self, cursor: Cursor, count: int, new_blocks: list[Block], step: _Step) -> None:
        start, decoding = cursor.computed, cursor.decoding
        samples = decoding or cursor.samples(count)
        extra = None if decoding else cursor.extra(count)
        step.rows.append(Row(cursor.row, start, count, [block.id for block in new_blocks], samples, extra))
        step.promised[cursor] = cursor.preemptions
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

    def _preempt(self, cursor: Cursor) -> None:
        """Take everything from a running request; it waits at the head of its priority to be computed again."""
        self._leave_row(cursor)
        cursor.computed = cursor.settled = 0
        cursor.preemptions += 1
        self.waiting.put_back(cursor)
        self._counts["preemptions"] += 1

    def _take_back(self, plan: StepPlan) -> Collection[Cursor]:
        promised = self._under_way.pop(plan.step_id)
        for row, cursor in zip(plan.rows, promised, strict=True):
            cursor.pending -= row.samples
        for cursor in [cursor for cursor in reversed(self.running) if cursor in promised]:
            self._preempt(cursor)
        # Nobody knows how far the worker came: what it was to forget, it is told again.
        self._released_rows += plan.release
        return promised

    def _force_preemption(self) -> None:
        every = self.limits.force_preempt_every
        if every and self._next_step_id % every == every - 1:
            victim = policy.victim(self.running, ())
            if victim is not None and victim.preemptions <= self.limits.max_preemptions:
                self._preempt(victim)

    def _event(self, cursor: Cursor, sampled: Sampled) -> Event:
        is_first, cursor.reported = not cursor.reported, True
        self._counts["generation_tokens"] += 1
        token = sampled.token_id
        finish = cursor.finish_after(token)
        if finish is not None:
            self._end(cursor)
        wants_prompt = is_first and cursor.request.params.prompt_logprobs is not None
        return Event(
            request_id=cursor.id,
            token_ids=[token],
            logprobs=None if sampled.logprob is None else [sampled.logprob],
            cached_tokens=cursor.cached_tokens if is_first else None,
            finish=finish,
            stop_token_id=token if finish is FinishReason.STOP else None,
            prompt_logprobs=cursor.prompt_logprobs if wants_prompt else None,
            queue_seconds=cursor.queue_seconds if is_first else None,
        )

    def _encoded(self, cursor: Cursor, vector: bytes) -> Event:
        self._end(cursor)
        return Event(
            request_id=cursor.id,
            cached_tokens=cursor.cached_tokens,
            finish=FinishReason.STOP,
            queue_seconds=cursor.queue_seconds,
            embedding=vector,
        )

    def _failure(self, cursor: Cursor, error: str) -> Event:
        self._end(cursor)
        return Event(
            request_id=cursor.id,
            cached_tokens=None if cursor.reported else cursor.cached_tokens,
            finish=FinishReason.ERROR,
            error=error,
            queue_seconds=None if cursor.reported else cursor.queue_seconds,
        )

    def _end(self, cursor: Cursor) -> None:
        cursor.ended = True
        del self.cursors[cursor.id]
        if cursor.row >= 0:
            self._leave_row(cursor)
        elif cursor in self.waiting:
            self.waiting.remove(cursor)
        else:
            self.siblings.remove(cursor)
        self.waiting.tenants.closed(cursor.tenant)

    def _leave_row(self, cursor: Cursor) -> None:
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

    def _shared_prompt(self, cursor: Cursor) -> list[Block]:
        """The blocks of the prompt that a running sibling has computed, all that can be shared or none."""
        if not cursor.request.sibling_of or not cursor.takes_cached:
            return []
        return next(filter(None, (shared_blocks(cursor, relative) for relative in self.running)), [])

    def _cached_prefix(self, cursor: Cursor) -> list[Block]:
        """Cached blocks that begin the request. At least its last token is computed: its logits are needed."""
        if not self.limits.enable_prefix_caching or not cursor.takes_cached:
            return []
        full = (len(cursor.tokens) - 1) // self.limits.block_size
        return find_prefix(self.pool, (cursor.keys.of(cursor.tokens, i) for i in range(full)))

    def _remember_blocks(self, cursor: Cursor, row: Row) -> None:
        """Make the blocks that a row filled findable."""
        if self.limits.enable_prefix_caching:
            size = self.limits.block_size
            for i in range(row.start // size, (row.start + row.count) // size):
                self.pool.remember(cursor.blocks[i], cursor.keys.of(cursor.tokens, i))

    def _check(self, request: Request) -> None:
        limits = self.limits
        request.params.check()
        request.params.check_token_ids(limits.logits_width)
        check_token_ids(request.stop_token_ids, limits.logits_width, "stop_token_ids")
        check_token_ids(request.prompt_token_ids, limits.logits_width, "prompt")
        check_token_ids(request.output_token_ids, limits.logits_width, "output_token_ids")
        length = len(request.prompt_token_ids)
        if request.request_id in self.cursors:
            raise InvalidRequest(f"There is a request {request.request_id!r} already.")
        check_priority(request.priority)
        self._check_kin(request)
        if length == 0:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if length >= limits.max_model_len:
            raise InvalidRequest(
                f"The prompt has {length} tokens; the context of {limits.max_model_len} tokens must also hold "
                "at least one of the answer.",
                param="prompt",
            )
        room = min(request.params.max_tokens or limits.max_model_len, limits.max_model_len - length)
        if len(request.output_token_ids) >= room:
            raise InvalidRequest("The request has all its tokens already.", param="max_tokens")
        if request.pooling is not None and (request.output_token_ids or request.params.prompt_logprobs is not None):
            raise InvalidRequest("A request for a vector has no tokens, and no log probabilities.", param="pooling")

    def _check_kin(self, request: Request) -> None:
        leader = self.cursors.get(request.sibling_of)
        if leader is None:
            return
        theirs = leader.request
        if (request.prompt_token_ids, request.cache_salt) != (theirs.prompt_token_ids, theirs.cache_salt):
            raise InvalidRequest(
                f"{request.request_id!r} is no sibling of {leader.id!r}: prompt or cache salt differ.",
                param="sibling_of",
            )
