"""When a step has rows with grammars, its sampling is launched once the steps before it are read; and a request waits
for its grammar without holding up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from tests.engine.stand_in import StandIns
from tests.engine.test_client import client_of
from tests.engine.test_client import request as sent
from tests.scheduler.simulation import SimulatedWorker, events_of, expected_output, limits, request
from tests.waiting import PATIENCE, until
from weft.engine.core import EngineCore
from weft.engine.wire import StepOutput, Submit, Vocabulary
from weft.engine_stats import EngineStats
from weft.errors import InvalidRequest
from weft.plan import StepPlan, StepResult
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.types import FinishReason, Request
from weft.worker.runner import Deferred

Call = tuple[str, int]
BOTH = pytest.mark.parametrize("overlap", [False, True])


class Launched(NamedTuple):
    plan: StepPlan
    computed: StepResult
    note: Callable[[str, int], None]

    @property
    def has_ended(self) -> bool:
        return False

    def result(self) -> StepResult:
        self.note("read", self.plan.step_id)
        return self.computed


class Grammars:
    """Grammars that are built when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[str, Future[Any]] = {}

    def build(self, grammar: str) -> Future[Any]:
        return self.asked.setdefault(grammar, Future())


class DeferringRunner:
    """Every step of these numbers is deferred. `poor` names the calls for which there is no memory, once."""

    def __init__(self, deferred: Callable[[int], bool], poor: set[Call]) -> None:
        self.worker = SimulatedWorker(limits().block_size)
        self.constraints = Grammars()
        self.calls: list[Call] = []
        self._deferred = deferred
        self._poor = poor

    def execute(self, plan: StepPlan) -> Launched | Deferred:
        self._note("launch", plan.step_id)
        known = [row for row in dict.fromkeys(plan.release) if row in self.worker.rows]
        launched = Launched(plan, self.worker.execute(replace(plan, release=known)), self._note)
        if not self._deferred(plan.step_id):
            return launched
        return Deferred(plan, lambda: self._sample(launched))

    def _sample(self, launched: Launched) -> Any:
        self._note("sample", launched.plan.step_id)
        return launched

    def _note(self, what: str, step_id: int) -> None:
        self.calls.append((what, step_id))
        if (what, step_id) in self._poor:
            raise torch.OutOfMemoryError("the test took it all")


def core_of(
    *, overlap: bool = False, deferred: Callable[[int], bool] = lambda step: True, poor: set[Call] | None = None
) -> tuple[EngineCore, Any]:
    runner: Any = DeferringRunner(deferred, poor or set())
    return EngineCore(Scheduler(limits()), runner, overlap=overlap), runner


def served(core: EngineCore) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    for _ in range(500):
        if not core.has_work:
            core.settle()
            return outputs
        for event in events_of(core.step()):
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
            assert not event.error
        check_integrity(core.scheduler)
    raise AssertionError("the engine does not come to rest")


def test_without_overlap_a_step_is_launched_sampled_and_read() -> None:
    core, runner = core_of()
    core.submit([request("a", [1], 3)])
    served(core)
    assert runner.calls == [(call, step) for step in range(3) for call in ("launch", "sample", "read")]


def test_with_overlap_the_last_step_is_read_between_launch_and_sampling() -> None:
    core, runner = core_of(overlap=True)
    core.submit([request("a", [1], 3)])
    served(core)
    assert runner.calls == [
        ("launch", 0),
        ("sample", 0),
        ("launch", 1),
        ("read", 0),
        ("sample", 1),
        ("launch", 2),
        ("read", 1),
        ("sample", 2),
        ("read", 2),
    ]


def test_a_step_without_grammars_waits_for_nothing() -> None:
    core, runner = core_of(overlap=True, deferred=lambda step: step == 1)
    core.submit([request("a", [1], 4)])
    served(core)
    assert runner.calls == [
        ("launch", 0),
        ("launch", 1),
        ("read", 0),
        ("sample", 1),
        ("launch", 2),
        ("read", 1),
        ("launch", 3),
        ("read", 2),
        ("read", 3),
    ]


@BOTH
@pytest.mark.parametrize("poor", [(what, step) for what in ("launch", "sample", "read") for step in (0, 2, 3)], ids=str)
def test_a_step_without_memory_is_taken_back_wherever_it_fails(overlap: bool, poor: Call) -> None:
    core, runner = core_of(overlap=overlap, deferred=lambda step: step % 3 != 1, poor={poor})
    asked = [request(f"r{i}", [3 * i + 1, 5], 9) for i in range(3)]
    core.submit(asked)
    assert served(core) == {one.request_id: expected_output(one, limits().max_model_len) for one in asked}
    assert (poor in runner.calls) == (poor[0] != "sample" or poor[1] % 3 != 1)


# Grammars in the making.


def with_grammar(name: str, grammar: str) -> Request:
    made = request(name, [1, 2], 4)
    return replace(made, params=replace(made.params, grammar=grammar, min_tokens=0, ignore_eos=False))


def test_others_are_served_while_a_grammar_is_built() -> None:
    core, runner = core_of()
    other = request("other", [1], 4)
    assert core.submit([with_grammar("held", "slow"), other]) == []
    for _ in range(4):
        core.step()
    assert core.has_work and core.stats().running == 0, "the other has ended"
    assert not core.step() and core.has_work
    runner.constraints.asked["slow"].set_result(None)
    assert len(served(core)["held"]) == 4


def test_a_grammar_that_cannot_be_built_rejects_its_request_alone() -> None:
    core, runner = core_of()
    core.submit([with_grammar("bad", "bad"), with_grammar("good", "good")])
    runner.constraints.asked["bad"].set_exception(InvalidRequest("no such rule"))
    runner.constraints.asked["good"].set_result(None)
    refused, *_ = core.step().events
    assert (refused.request_id, refused.finish, refused.error) == ("bad", FinishReason.REJECTED, "no such rule")
    assert list(served(core)) == ["good"]


def test_whoever_leaves_while_his_grammar_is_built_is_forgotten() -> None:
    core, runner = core_of()
    core.submit([with_grammar("gone", "slow")])
    core.abort(["gone"])
    assert not core.has_work
    runner.constraints.asked["slow"].set_result(None)
    assert not core.step() and runner.calls == []


# The vocabulary.


def test_every_engine_learns_the_vocabulary_once_and_before_the_first_grammar() -> None:
    vocabulary = Vocabulary([b"a", b"<end>"], [1], [1])

    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            client.vocabulary = vocabulary

            async def heard(engine: int, count: int) -> list[object]:
                inbox = launch.launched[engine].inbox
                return [await asyncio.to_thread(inbox.get, timeout=PATIENCE) for _ in range(count)]

            def formed(name: str) -> Request:
                return replace(sent(name), params=replace(sent(name).params, grammar="start: X"))

            for made in (sent("free"), formed("first"), formed("second")):
                client.submit(made)
            messages = await heard(0, 4)
            assert [type(message) for message in messages] == [Submit, Vocabulary, Submit, Submit]
            assert messages[1] == vocabulary
            launch.launched[0].kill()
            await until(lambda: len(launch.launched) == 2, "the next engine")
            assert [type(message) for message in await heard(1, 1)] == [Submit], "under suspicion, alone"
            launch.launched[1].send(StepOutput({"free": 7}, [], EngineStats()))
            assert [type(message) for message in await heard(1, 2)] == [Vocabulary, Submit]

    asyncio.run(scenario())
