"""The engine's loop over a simulated runner: what it refuses, tells, launches and reads, and in which order."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.scheduler.simulation import SimulatedWorker, events_of, expected_output, limits, request
from weft.engine.core import EngineCore
from weft.plan import Limits, StepPlan, StepResult
from weft.scheduler.integrity import IntegrityError
from weft.scheduler.scheduler import Scheduler
from weft.types import Event, FinishReason

Call = tuple[str, object]


class Launched(NamedTuple):
    plan: StepPlan
    computed: StepResult
    calls: list[Call]
    has_ended: bool = False

    def result(self) -> StepResult:
        self.calls.append(("read", self.plan.step_id))
        return self.computed


class SimulatedRunner:
    """A runner that writes down when it was asked for what."""

    def __init__(self, block_size: int) -> None:
        self.worker = SimulatedWorker(block_size)
        self.calls: list[Call] = []
        self.ends_early = False

    def execute(self, plan: StepPlan) -> Launched:
        self.calls.append(("launch", plan.step_id))
        return Launched(plan, self.worker.execute(plan), self.calls, self.ends_early)


def core_of(limits: Limits, *, overlap: bool = False) -> tuple[EngineCore, SimulatedRunner]:
    runner = SimulatedRunner(limits.block_size)
    return EngineCore(Scheduler(limits), runner, overlap=overlap), runner


def run(core: EngineCore, max_steps: int = 1000) -> list[Event]:
    events = []
    for _ in range(max_steps):
        if not core.has_work:
            core.settle()
            return events
        events += events_of(core.step())
    raise AssertionError("the engine does not come to rest")


def outputs(events: list[Event]) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    for event in events:
        answers.setdefault(event.request_id, []).extend(event.token_ids)
    return answers


BOTH = pytest.mark.parametrize("overlap", [False, True])
MIXED = [request(f"r{i}", [i * 3 + j for j in range(2 + 5 * i)], 10, stop=i % 2 == 0) for i in range(6)]


def test_a_refusal_is_an_event_and_the_others_are_served() -> None:
    core, _ = core_of(limits())
    good = request("good", [1, 2], 4)
    refused = core.submit([request("too long", [1] * 64), good, request("bad id", [1000])])
    assert [(event.request_id, event.finish) for event in refused] == [
        ("too long", FinishReason.REJECTED),
        ("bad id", FinishReason.REJECTED),
    ]
    assert "64 tokens" in refused[0].error and "1000" in refused[1].error
    assert outputs(run(core)) == {"good": expected_output(good, 64)}


def test_a_refused_request_leaves_nothing_to_do() -> None:
    core, runner = core_of(limits())
    assert len(core.submit([request("empty", [])])) == 1
    assert not core.has_work and not core.step() and runner.calls == []
    core.settle()


@BOTH
def test_a_request_is_named_before_the_first_step_that_computes_it(overlap: bool) -> None:
    core, runner = core_of(limits(max_num_seqs=2), overlap=overlap)
    core.submit([request("a", [1], 2), request("b", [2], 4), request("c", [3], 2)])
    while core.has_work:
        core.step(on_start=lambda ids: runner.calls.append(("start", ids)))
    starts = [(i, call[1]) for i, call in enumerate(runner.calls) if call[0] == "start"]
    assert [ids for _, ids in starts] == [["a", "b"], ["c"]]
    assert starts[0][0] == 0
    for place, _ in starts:
        assert runner.calls[place + 1][0] == "launch"


def test_a_step_that_admits_nobody_names_nobody() -> None:
    core, _ = core_of(limits())
    core.submit([request("a", [1], 5)])
    named: list[list[str]] = []
    while core.has_work:
        core.step(on_start=named.append)
    assert named == [["a"]]


def test_without_overlap_each_step_is_read_before_the_next_is_launched() -> None:
    core, runner = core_of(limits())
    core.submit([request("a", [1], 3)])
    run(core)
    assert runner.calls == [(call, step) for step in range(3) for call in ("launch", "read")]


def test_with_overlap_the_next_step_is_launched_before_the_last_is_read() -> None:
    core, runner = core_of(limits(), overlap=True)
    core.submit([request("a", [1], 4)])
    run(core)
    assert runner.calls == [
        ("launch", 0),
        ("launch", 1),
        ("read", 0),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("read", 3),
    ]


@pytest.mark.parametrize(
    "shape",
    [limits(), limits(num_blocks=17), limits(force_preempt_every=2), limits(max_num_seqs=1)],
    ids=["roomy", "tight", "preempted", "one row"],
)
def test_overlap_changes_no_answer(shape: Limits) -> None:
    answers = []
    for overlap in (False, True):
        core, _ = core_of(shape, overlap=overlap)
        assert core.submit(MIXED) == []
        answers.append(outputs(run(core)))
    assert answers[0] == answers[1] == {r.request_id: expected_output(r, 64) for r in MIXED}


@BOTH
def test_every_request_ends_exactly_once(overlap: bool) -> None:
    core, _ = core_of(limits(), overlap=overlap)
    core.submit(MIXED)
    ends = [event.request_id for event in run(core) if event.finish is not None]
    assert sorted(ends) == sorted(r.request_id for r in MIXED)


def test_a_token_and_nothing_else_comes_without_an_event() -> None:
    core, _ = core_of(limits())
    core.submit([request("a", [1], 4)])
    first, *others, last = [core.step() for _ in range(4)]
    assert not core.has_work
    assert [list(step.tokens) for step in (first, *others, last)] == [[], ["a"], ["a"], []]
    assert [len(step.events) for step in (first, *others, last)] == [1, 0, 0, 1]


@BOTH
def test_no_event_follows_an_abort_though_a_step_is_under_way(overlap: bool) -> None:
    core, _ = core_of(limits(), overlap=overlap)
    other = request("other", [2], 6)
    core.submit([request("gone", [1], 30), other])
    for _ in range(3):
        core.step()
    core.abort(["gone", "never was"])
    assert core.stats().running == 1
    after = run(core)
    assert "gone" not in outputs(after)
    assert outputs(after)["other"] == expected_output(other, 64)[-len(outputs(after)["other"]) :]


def test_a_step_under_way_is_read_though_nobody_waits_for_it() -> None:
    core, runner = core_of(limits(), overlap=True)
    core.submit([request("gone", [1], 30)])
    core.step()
    core.abort(["gone"])
    assert core.has_work, "the step that was launched is still to be read"
    assert not core.step() and not core.has_work
    assert runner.calls == [("launch", 0), ("read", 0)]
    core.settle()


@pytest.mark.parametrize("ends_early", [False, True])
def test_the_scheduler_is_told_whether_the_device_had_nothing_to_do(
    ends_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, runner = core_of(limits(), overlap=True)
    runner.ends_early, told = ends_early, list[bool]()
    launched = core.scheduler.launched

    def noted(plan: StepPlan, *, was_idle: bool) -> None:
        told.append(was_idle)
        launched(plan, was_idle=was_idle)

    monkeypatch.setattr(core.scheduler, "launched", noted)
    core.submit([request("a", [1], 6)])
    run(core)
    assert told == [True] + 5 * [ends_early]


def test_an_idle_engine_launches_nothing() -> None:
    core, runner = core_of(limits(), overlap=True)
    assert not core.has_work and not core.step() and runner.calls == []


def test_the_figures_are_those_of_the_work_done() -> None:
    core, runner = core_of(limits())
    core.submit([request("a", [1, 2, 3], 4), request("b", [4, 5], 4)])
    core.step()
    now = core.stats()
    assert (now.running, now.waiting, now.blocks_used, now.blocks_total) == (2, 0, 2, 32)
    run(core)
    at_rest = core.stats()
    assert (at_rest.running, at_rest.waiting, at_rest.blocks_used) == (0, 0, 0)
    assert at_rest.generation_tokens == 8 and at_rest.prompt_tokens == 5
    assert at_rest.computed_tokens == runner.worker.computed == 5 + 6
    assert at_rest.steps == 4


def test_settle_raises_when_the_books_do_not_add_up() -> None:
    core, _ = core_of(limits())
    core.submit([request("a", [1], 2)])
    run(core)
    core.scheduler.pool.free.popleft()
    with pytest.raises(IntegrityError):
        core.settle()
