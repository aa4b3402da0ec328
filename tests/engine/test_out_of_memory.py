"""A step for which the device has no memory is taken back and tried again smaller: nobody's tokens change, and only a
request that does not fit alone ends with an error."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import EFFORT
from tests.scheduler.simulation import SimulatedWorker, events_of, expected_output, limits, request
from weft.engine.core import EngineCore
from weft.plan import Limits, StepPlan, StepResult
from weft.scheduler.integrity import check_integrity
from weft.scheduler.policy import LEAST_TOKENS
from weft.scheduler.scheduler import NO_MEMORY, Scheduler
from weft.types import Event, FinishReason, Request

Fails = Callable[[int, StepPlan], bool]
WHERE = ("before", "after", "reading")
"""Before the worker heard of the plan, after it computed all of it, or when its result is read."""
BOTH = pytest.mark.parametrize("overlap", [False, True])
EVERYWHERE = pytest.mark.parametrize("where", WHERE)
ROOMY = limits(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64)
MIXED = [request(f"r{i}", [i * 3 + j for j in range(2 + 5 * i)], 12, stop=i % 2 == 0) for i in range(7)]


class Launched(NamedTuple):
    plan: StepPlan
    computed: StepResult
    fails: bool

    @property
    def has_ended(self) -> bool:
        return False

    def result(self) -> StepResult:
        if self.fails:
            raise torch.OutOfMemoryError("the test took it all")
        return self.computed


class PoorRunner:
    """A runner without memory for the launches that `fails` names, by number and plan."""

    def __init__(self, block_size: int, fails: Fails, where: str = "after") -> None:
        self.worker = SimulatedWorker(block_size)
        self.fails = fails
        self.where = where
        self.launches = 0
        self.failures = 0
        self.preparations = 0

    def execute(self, plan: StepPlan) -> Launched:
        fails = self.fails(self.launches, plan)
        self.launches += 1
        self.failures += fails
        if fails and self.where == "before":
            raise torch.OutOfMemoryError("the test took it all")
        known = [row for row in dict.fromkeys(plan.release) if row in self.worker.rows]
        computed = self.worker.execute(replace(plan, release=known))
        if fails and self.where == "after":
            raise torch.OutOfMemoryError("the test took it all")
        return Launched(plan, computed, fails)

    def prepare(self) -> bool:
        self.preparations += 1
        raise torch.OutOfMemoryError("the test took it all")


def serve(
    requests: list[Request], fails: Fails, where: str = "after", *, overlap: bool = False, shape: Limits = ROOMY
) -> tuple[dict[str, list[Event]], EngineCore, PoorRunner]:
    """Everybody's events. The books are checked after every step."""
    runner = PoorRunner(shape.block_size, fails, where)
    core = EngineCore(Scheduler(shape), runner, overlap=overlap)
    assert core.submit(requests) == []
    events: dict[str, list[Event]] = {request.request_id: [] for request in requests}
    drain(core, events)
    return events, core, runner


def drain(core: EngineCore, events: dict[str, list[Event]]) -> None:
    for _ in range(20_000):
        if not core.has_work:
            core.settle()
            assert not core.scheduler._under_way and core.scheduler.pool.num_free == core.scheduler.pool.num_usable
            return
        for event in events_of(core.step()):
            events[event.request_id].append(event)
        check_integrity(core.scheduler)
    raise AssertionError("the engine does not come to rest")


def assert_undisturbed(requests: list[Request], events: dict[str, list[Event]], shape: Limits = ROOMY) -> None:
    for asked in requests:
        got = events[asked.request_id]
        tokens = [token for event in got for token in event.token_ids]
        assert tokens == expected_output(asked, shape.max_model_len), asked.request_id
        assert [event.finish for event in got[:-1]] == [None] * (len(got) - 1)
        assert got[-1].finish in (FinishReason.LENGTH, FinishReason.STOP) and not got[-1].error


@BOTH
@EVERYWHERE
@pytest.mark.parametrize("failing", [{0}, {1}, {6}, {0, 1}, {3, 20}], ids=str)
def test_nobodys_tokens_change(where: str, overlap: bool, failing: set[int]) -> None:
    events, core, runner = serve(MIXED, lambda number, plan: number in failing, where, overlap=overlap)
    assert_undisturbed(MIXED, events)
    assert runner.failures == len(failing)
    assert core.stats().preemptions >= len(failing)


@BOTH
@EVERYWHERE
def test_steps_shrink_to_what_fits(where: str, overlap: bool) -> None:
    sizes: list[tuple[int, int]] = []

    def too_large(number: int, plan: StepPlan) -> bool:
        sizes.append((len(plan.rows), plan.num_tokens))
        return len(plan.rows) > 2 or plan.num_tokens > 20

    events, _, runner = serve(MIXED, too_large, where, overlap=overlap)
    assert_undisturbed(MIXED, events)
    assert sizes[0] > (2, 20), "the first step should be too large"
    assert runner.failures <= 8, sizes


def test_they_grow_back_when_there_is_memory_again() -> None:
    many = [request(f"r{i}", [i, i + 1], 60) for i in range(40)]
    rows: list[int] = []

    def once(number: int, plan: StepPlan) -> bool:
        rows.append(len(plan.rows))
        return number == 5

    events, core, _ = serve(many, once)
    assert_undisturbed(many, events)
    assert max(rows[6:100]) == 4 and max(rows) == rows[-200] == 8
    assert core.scheduler.throttle.tokens == 64


@BOTH
@EVERYWHERE
def test_a_request_that_does_not_fit_alone_ends_alone(where: str, overlap: bool) -> None:
    large = request("large", [49, 48, 47, 46], 12)
    others = [request(f"r{i}", [i, i + 1, i + 2], 12) for i in range(5)]
    with_large: set[int] = set()

    def holds_large(number: int, plan: StepPlan) -> bool:
        with_large.difference_update(plan.release)
        with_large.update(admission.row for admission in plan.admit if admission.token_ids[0] == 49)
        return any(row.row in with_large for row in plan.rows)

    work = [*others[:3], large, *others[3:]]
    events, _, _ = serve(work, holds_large, where, overlap=overlap)
    assert_undisturbed(others, events)
    (end,) = events["large"]
    assert end.finish is FinishReason.ERROR and end.error == NO_MEMORY and str(LEAST_TOKENS) in end.error


@BOTH
@EVERYWHERE
def test_without_any_memory_everybody_ends_once_and_the_engine_lives(where: str, overlap: bool) -> None:
    is_poor = True
    events, core, _ = serve(MIXED, lambda number, plan: is_poor, where, overlap=overlap)
    assert [[event.finish for event in got] for got in events.values()] == [[FinishReason.ERROR]] * len(MIXED)
    is_poor = False
    late = request("late", [1, 2, 3], 6)
    core.submit([late])
    events["late"] = []
    drain(core, events)
    assert_undisturbed([late], events)


def test_what_was_launched_before_is_read_and_not_computed_twice() -> None:
    asked = [request("a", [1], 8)]
    events, core, runner = serve(asked, lambda number, plan: number == 4, "before", overlap=True)
    assert_undisturbed(asked, events)
    # Eight tokens after a prompt of one: eight computed, and after the failure the five known ones again but for the
    # block of four that the cache still holds.
    assert runner.worker.computed == 8
    assert core.stats().preemptions == 1


def test_the_oldest_are_the_first_to_go_on() -> None:
    four = limits(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=64)
    work = [request(f"r{i}", [i, i + 1], 20) for i in range(6)]
    admitted: list[list[str]] = []
    runner = PoorRunner(four.block_size, lambda number, plan: number == 3)
    core = EngineCore(Scheduler(four), runner)
    core.submit(work)
    while core.has_work:
        core.step(on_start=admitted.append)
    assert admitted[:2] == [["r0", "r1", "r2", "r3"], ["r0", "r1"]]


def test_a_row_that_the_failed_step_was_to_release_is_released_again() -> None:
    long = limits(num_blocks=200, max_num_seqs=2, max_model_len=512)
    first, second, third = request("first", [1], 3), request("second", [2], 300), request("third", [3], 100)

    runner = PoorRunner(long.block_size, lambda number, plan: plan.release == [1] and not runner.failures, "before")
    core = EngineCore(Scheduler(long), runner)
    events: dict[str, list[Event]] = {asked.request_id: [] for asked in (first, second, third)}
    core.submit([second, first])
    while not runner.failures:
        for event in events_of(core.step()):
            events[event.request_id].append(event)
    core.submit([third])
    drain(core, events)
    # The third had the first's row, once two requests could run again.
    assert core.scheduler.throttle.rows == 2
    assert_undisturbed([first, second, third], events, long)


def test_memory_is_given_back_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    class Activations:
        pass

    held: list[weakref.ref[Activations]] = []
    freed: list[bool] = []

    def computing(number: int, plan: StepPlan) -> bool:
        activations = Activations()
        held.append(weakref.ref(activations))
        if len(held) == 3:
            raise torch.OutOfMemoryError("the test took it all")
        return False

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(held[-1]() is None))
    asked = [request("a", [1], 8)]
    events, _, _ = serve(asked, computing)
    assert_undisturbed(asked, events)
    assert freed == [True]


def test_any_other_fault_is_not_survived() -> None:
    def breaks(number: int, plan: StepPlan) -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        serve(MIXED, breaks)


def test_no_memory_to_prepare_with_is_no_fault() -> None:
    runner = PoorRunner(4, lambda number, plan: False)
    assert EngineCore(Scheduler(ROOMY), runner).prepare() is False
    assert runner.preparations == 1


@settings(max_examples=75 * EFFORT)
@given(
    seed=st.integers(0, 2**32),
    where=st.sampled_from(WHERE),
    overlap=st.booleans(),
    share=st.sampled_from([0.02, 0.1, 0.3]),
    num_blocks=st.integers(18, 60),
    prefix=st.booleans(),
    every=st.sampled_from([0, 0, 3]),
)
def test_whatever_fails_every_request_ends_once(
    seed: int, where: str, overlap: bool, share: float, num_blocks: int, prefix: bool, every: int
) -> None:
    rnd = random.Random(seed)
    shape = limits(
        num_blocks=num_blocks,
        max_num_seqs=5,
        enable_prefix_caching=prefix,
        force_preempt_every=every,
        max_preemptions=1,
    )
    work = [
        request(f"r{i}", [rnd.randrange(50) for _ in range(rnd.randint(1, 40))], rnd.randint(1, 20), stop=i % 2 == 0)
        for i in range(rnd.randint(1, 8))
    ]
    runner = PoorRunner(shape.block_size, lambda number, plan: rnd.random() < share, where)
    core = EngineCore(Scheduler(shape), runner, overlap=overlap)
    core.submit(work)
    tokens: dict[str, list[int]] = {asked.request_id: [] for asked in work}
    ends: Counter[str] = Counter()
    errors: set[str] = set()
    aborted: set[str] = set()
    while core.has_work:
        if core.scheduler.cursors and rnd.random() < 0.02:
            aborted.add(rnd.choice(list(core.scheduler.cursors)))
            core.abort(aborted)
        for event in events_of(core.step()):
            tokens[event.request_id] += event.token_ids
            if event.finish is not None:
                ends[event.request_id] += 1
            if event.error:
                errors.add(event.request_id)
        check_integrity(core.scheduler)
    core.settle()
    for asked in work:
        name, expected = asked.request_id, expected_output(asked, shape.max_model_len)
        got = tokens[name]
        if name in aborted or name in errors:
            assert got == expected[: len(got)]
        else:
            assert got == expected
        assert ends[name] == (name not in aborted)
