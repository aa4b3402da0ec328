"""The scheduler: `plan = schedule()`, then `events = apply(plan, result)`. Pure Python: no torch, no I/O.

There is no prefill and no decode: every request is a cursor whose `computed` catches up with its `known` under
the step's budget. Results may arrive one step late: what a plan promised is remembered with it, and never
derived again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from weft.errors import InvalidRequest
from weft.plan import Admission, Limits, Row, Sampled, StepPlan, StepResult
from weft.scheduler import policy
from weft.scheduler.blocks import Block, BlockPool
from weft.scheduler.cursors import TokenCursor
from weft.scheduler.prefix import find_prefix
from weft.scheduler.throttle import LEAST_TOKENS, Throttle
from weft.types import EngineStats, Event, FinishReason, Request, check_token_ids

NO_MEMORY = f"There is no memory for this request, even alone and in steps of {LEAST_TOKENS} tokens."


class _Step:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self.admit: list[Admission] = []
        self.promised: dict[TokenCursor, int] = {}
        """Each planned cursor, with the number of preemptions it had when the promise was made."""
        self.decodes = 0
        self.prompt_tokens = 0
        """Tokens of rows that do not decode."""
        self.prompt_room = 0
        """How many there may be beside decodes."""
        self.preempted = False


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        if -(-limits.max_model_len // limits.block_size) > limits.num_blocks - 1:
            raise ValueError(f"{limits.num_blocks} blocks cannot hold one request of {limits.max_model_len} tokens")
        self.limits = limits
        self.throttle = Throttle(limits)
        self.pool = BlockPool(limits.num_blocks)
        self.waiting: deque[TokenCursor] = deque()
        self.running: list[TokenCursor] = []
        """In the order of admission."""
        self.cursors: dict[str, TokenCursor] = {}
        """Every request that has not ended."""
        self.free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._released_rows: list[int] = []
        self._under_way: dict[int, dict[TokenCursor, int]] = {}
        self._next_step_id = 0
        self._counts = dict.fromkeys(
            ("prompt_tokens", "computed_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "preemptions"), 0
        )

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest: the last check before anything is computed."""
        self._check(request)
        cursor = TokenCursor(request, max_model_len=self.limits.max_model_len, block_size=self.limits.block_size)
        self.cursors[cursor.id] = cursor
        self.waiting.append(cursor)
        if not request.output_token_ids:
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

    def num_promises(self, cursor: TokenCursor) -> int:
        """Steps under way that advance this request."""
        return sum(cursor in promised for promised in self._under_way.values())

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
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
        step.prompt_room = policy.prompt_room(self.limits, step.decodes, self.waiting)
        for cursor in others:
            self._plan_running(cursor, self._share_of(cursor, step), step)
        while self.waiting and self._admit(self.waiting[0], step):
            self.waiting.popleft()
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
        sampled = iter(result.sampled)
        promised = self._under_way.pop(plan.step_id)
        for row, (cursor, preemptions) in zip(plan.rows, promised.items(), strict=True):
            token = next(sampled) if row.samples else None
            if cursor.ended:
                continue
            broken = token is not None and bool(token.error)
            if token is not None:
                cursor.pending -= 1
                if not broken:
                    cursor.tokens.append(token.token_id)
            # What made broken logits is not worth finding again; what a preempted request held is gone.
            if not broken and cursor.preemptions == preemptions:
                self._remember_blocks(cursor, row)
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
        return [self._event(cursor, Sampled(-1, error=NO_MEMORY)) for cursor in promised if not cursor.ended]

    # The parts of a step.

    def _plan_running(self, cursor: TokenCursor, count: int, step: _Step) -> None:
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

    def _admit(self, cursor: TokenCursor, step: _Step) -> bool:
        """Give a waiting request a row, its cached prefix and its first chunk, if all of it fits."""
        if step.preempted or cursor.pending or len(self.running) >= self.throttle.rows:
            return False
        if self._share_of(cursor, step) == 0:
            return False
        found = self._cached_prefix(cursor)
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
        if cursor.preemptions == 0:
            cursor.cached_tokens = min(cursor.computed, cursor.num_prompt)
            self._counts["prefix_queries"] += cursor.num_prompt
            self._counts["prefix_hits"] += cursor.cached_tokens
        request = cursor.request
        step.admit.append(
            Admission(cursor.row, list(cursor.tokens), cursor.num_prompt, request.params, request.stop_token_ids)
        )
        self._promise(cursor, count, cursor.blocks, step)
        return True

    def _share_of(self, cursor: TokenCursor, step: _Step) -> int:
        """How many tokens of this request the step has room for."""
        if cursor.decoding:
            return min(1, step.budget)
        chunk = self.limits.max_prefill_chunk
        if step.decodes:
            chunk = min(chunk, max(0, step.prompt_room - step.prompt_tokens))
        return min(cursor.todo, chunk, step.budget)

    def _promise(self, cursor: TokenCursor, count: int, new_blocks: list[Block], step: _Step) -> None:
        samples = cursor.computed + count == cursor.known
        step.rows.append(Row(cursor.row, cursor.computed, count, [block.id for block in new_blocks], samples))
        step.promised[cursor] = cursor.preemptions
        step.budget -= count
        if cursor.decoding:
            step.decodes += 1
        else:
            step.prompt_tokens += count
        cursor.computed += count
        cursor.pending += samples

    def _preempt(self, cursor: TokenCursor) -> None:
        """Take everything from a running request; it waits at the head of the queue to be computed again."""
        self._leave_row(cursor)
        cursor.computed = 0
        cursor.preemptions += 1
        self.waiting.appendleft(cursor)
        self._counts["preemptions"] += 1

    def _take_back(self, plan: StepPlan) -> Collection[TokenCursor]:
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

    def _event(self, cursor: TokenCursor, sampled: Sampled) -> Event:
        cached = None if cursor.reported else cursor.cached_tokens
        cursor.reported = True
        if sampled.error:
            self._end(cursor)
            return Event(request_id=cursor.id, finish=FinishReason.ERROR, error=sampled.error, cached_tokens=cached)
        self._counts["generation_tokens"] += 1
        token = sampled.token_id
        finish = None
        stopped = token in cursor.request.stop_token_ids and cursor.num_output > cursor.request.params.min_tokens
        if stopped:
            finish = FinishReason.STOP
        elif len(cursor.tokens) >= cursor.limit:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._end(cursor)
        return Event(
            request_id=cursor.id,
            token_ids=[token],
            logprobs=None if sampled.logprob is None else [sampled.logprob],
            cached_tokens=cached,
            finish=finish,
            stop_token_id=token if stopped else None,
        )

    def _end(self, cursor: TokenCursor) -> None:
        cursor.ended = True
        del self.cursors[cursor.id]
        if cursor.row >= 0:
            self._leave_row(cursor)
        else:
            self.waiting.remove(cursor)

    def _leave_row(self, cursor: TokenCursor) -> None:
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

    def _cached_prefix(self, cursor: TokenCursor) -> list[Block]:
        """Cached blocks that begin the request. At least its last token is computed: its logits are needed."""
        if not self.limits.enable_prefix_caching:
            return []
        full = (len(cursor.tokens) - 1) // self.limits.block_size
        return find_prefix(self.pool, (cursor.keys.of(cursor.tokens, i) for i in range(full)))

    def _remember_blocks(self, cursor: TokenCursor, row: Row) -> None:
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
