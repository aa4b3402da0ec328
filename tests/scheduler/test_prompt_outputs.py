"""Requests for more than tokens: log probabilities of a prompt, the vector of a prompt, and how long it queued."""

from __future__ import annotations

import pytest

from tests.scheduler.simulation import (
    VOCAB,
    SimulatedWorker,
    Simulation,
    assert_prompt_logprobs,
    expected_output,
    expected_vector,
    limits,
    request,
    score,
)
from weft.errors import InvalidRequest
from weft.plan import Pooled, PromptLogprobs
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import NO_MEMORY, Scheduler
from weft.scheduler.step import MAX_PROMPT_LOGPROBS
from weft.types import Event, FinishReason, Pooling, Request

NUMBERS = [(i * 7 + i // 50) % VOCAB for i in range(200)]
DELAYS = pytest.mark.parametrize("delay", [0, 1, 2])
BOTH = pytest.mark.parametrize("pooling", Pooling)


def asked_extras(simulation: Simulation, name: str) -> list[object]:
    return [row.request for row in simulation.rows_of(name)]


# Log probabilities of a prompt.


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
@DELAYS
def test_every_prompt_token_but_the_first_is_scored_once(delay: int, length: int) -> None:
    simulation = Simulation(limits(), delay)
    asked = [request("r", NUMBERS[:length], 6, prompt_logprobs=3), request("other", NUMBERS[:20], 9)]
    simulation.add(*asked)
    simulation.run()
    for one in asked:
        assert_prompt_logprobs(simulation, one)
        assert simulation.outputs[one.request_id] == expected_output(one, 64)
    chunks = [extra for extra in asked_extras(simulation, "r") if extra is not None]
    assert set(chunks) <= {PromptLogprobs(3)} and len(chunks) == -(-(length - 1) // 16)
    assert set(asked_extras(simulation, "other")) == {None}


def test_nothing_is_taken_from_the_cache_but_it_is_filled() -> None:
    simulation = Simulation(limits())
    for name, scored in (("first", None), ("scored", 0), ("last", None)):
        simulation.add(request(name, NUMBERS[:30], 2, prompt_logprobs=scored))
        simulation.run()
    assert [event.cached_tokens for event in simulation.events if event.cached_tokens is not None] == [0, 0, 28]
    stats = simulation.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (60, 28), "who asks for nothing misses nothing"
    filled = Simulation(limits())
    for name, scored in (("scored", 0), ("after", None)):
        filled.add(request(name, NUMBERS[:30], 2, prompt_logprobs=scored))
        filled.run()
    assert filled.rows_of("after")[0].start == 28


def test_a_step_scores_no_more_than_there_is_memory_for() -> None:
    simulation = Simulation(
        limits(max_model_len=1000, num_blocks=1000, max_num_batched_tokens=900, max_prefill_chunk=900)
    )
    simulation.add(*(request(f"r{i}", [i] * 300, 2, prompt_logprobs=1) for i in range(3)), request("p", [9] * 300, 2))
    simulation.run()
    for plan in simulation.plans:
        assert sum(row.count for row in plan.rows if row.request is not None) <= MAX_PROMPT_LOGPROBS
    assert simulation.rows_of("p")[0].count == 300, "others are not cut"
    for i in range(3):
        assert_prompt_logprobs(simulation, request(f"r{i}", [i] * 300, 2, prompt_logprobs=1))


@pytest.mark.parametrize("every", [1, 2, 5])
@DELAYS
def test_a_preempted_request_delivers_them_once_and_whole(delay: int, every: int) -> None:
    simulation = Simulation(limits(force_preempt_every=every), delay)
    asked = [request(f"r{i}", NUMBERS[i : i + 20 + 6 * i], 8, prompt_logprobs=1) for i in range(4)]
    simulation.add(*asked)
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    for one in asked:
        assert_prompt_logprobs(simulation, one)
        assert simulation.outputs[one.request_id] == expected_output(one, 64)


def test_after_its_first_token_a_preempted_request_may_take_from_the_cache() -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", NUMBERS[:30], 9, prompt_logprobs=1))
    while len(simulation.outputs["r"]) < 2:
        simulation.step()
    simulation.scheduler._preempt(simulation.scheduler.cursors["r"])
    simulation.run()
    assert simulation.rows_of("r")[-1].extra is None and 28 in [row.start for row in simulation.rows_of("r")]


def test_a_resumed_request_scores_nothing_again() -> None:
    whole = expected_output(request("r", NUMBERS[:30], 9), 64)
    simulation = Simulation(limits())
    simulation.add(request("r", NUMBERS[:30], 9, output=whole[:3], prompt_logprobs=1))
    simulation.run()
    assert set(asked_extras(simulation, "r")) == {None}
    assert simulation.outputs["r"] == whole[3:] and {event.prompt_logprobs for event in simulation.events} == {None}


def test_scores_that_are_no_numbers_end_that_request_alone() -> None:
    simulation = Simulation(limits())
    simulation.worker.broken = {49}
    simulation.add(request("broken", [1, 49] + [2] * 30, 5, prompt_logprobs=1), request("r", [1, 2, 3], 3))
    simulation.run()
    assert (simulation.ends["broken"].finish, simulation.ends["broken"].error) == (FinishReason.ERROR, "not a number")
    assert simulation.outputs["r"] == expected_output(request("r", [1, 2, 3], 3), 64)


def test_a_score_is_its_own_tokens() -> None:
    assert len({score(token, position).logprob for token in range(VOCAB) for position in range(60)}) == VOCAB * 60


# The vector of a prompt.


@BOTH
@pytest.mark.parametrize("length", [1, 16, 17, 50, 63])
@DELAYS
def test_a_prompt_becomes_a_vector_in_one_event(delay: int, length: int, pooling: Pooling) -> None:
    simulation = Simulation(limits(), delay)
    asked = request("r", NUMBERS[:length], 1, pooling=pooling)
    other = request("other", NUMBERS[:20], 9)
    simulation.add(asked, other)
    simulation.run()
    (event,) = [event for event in simulation.events if event.request_id == "r"]
    assert event == Event(
        request_id="r", cached_tokens=0, finish=FinishReason.STOP, queue_seconds=event.queue_seconds,
        embedding=expected_vector(asked),
    )  # fmt: skip
    assert simulation.outputs["other"] == expected_output(other, 64)
    stats = simulation.scheduler.stats()
    assert stats.prompt_tokens == length + 20 and stats.generation_tokens == 9
    assert stats.computed_tokens == length + 20 + 8
    extras = asked_extras(simulation, "r")
    assert extras[-1] == Pooled(pooling, True)
    assert set(extras[:-1]) <= ({Pooled(pooling, False)} if pooling is Pooling.MEAN else {None})


@pytest.mark.parametrize(("pooling", "start"), [(Pooling.LAST, 28), (Pooling.MEAN, 0)])
def test_only_the_last_state_can_do_with_cached_tokens(pooling: Pooling, start: int) -> None:
    simulation = Simulation(limits())
    simulation.add(request("first", NUMBERS[:30], 2))
    simulation.run()
    simulation.add(request("r", NUMBERS[:30], pooling=pooling))
    simulation.run()
    assert simulation.rows_of("r")[0].start == start == simulation.ends["r"].cached_tokens


@BOTH
def test_it_fills_the_cache(pooling: Pooling) -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", NUMBERS[:30], pooling=pooling))
    simulation.run()
    simulation.add(request("after", NUMBERS[:30], 2))
    simulation.run()
    assert simulation.rows_of("after")[0].start == 28


@BOTH
@pytest.mark.parametrize("every", [1, 3])
@DELAYS
def test_preempted_it_is_computed_again(delay: int, every: int, pooling: Pooling) -> None:
    simulation = Simulation(limits(force_preempt_every=every), delay)
    asked = [request(f"r{i}", NUMBERS[i : i + 20 + 6 * i], pooling=pooling) for i in range(5)]
    simulation.add(*asked)
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    assert [simulation.ends[one.request_id].embedding for one in asked] == [expected_vector(one) for one in asked]


def test_a_vector_of_no_numbers_is_an_error() -> None:
    simulation = Simulation(limits())
    simulation.worker.broken = {49}
    simulation.add(request("r", [1, 2, 49], pooling=Pooling.MEAN))
    simulation.run()
    assert simulation.ends["r"].finish is FinishReason.ERROR and simulation.ends["r"].embedding is None


@pytest.mark.parametrize(
    "asked",
    [
        request("r", [1], 9, pooling=Pooling.MEAN, output=[1]),
        request("r", [1], pooling=Pooling.MEAN, prompt_logprobs=1),
    ],
    ids=["output", "logprobs"],
)
def test_a_vector_goes_with_no_tokens(asked: Request) -> None:
    with pytest.raises(InvalidRequest, match="vector") as refusal:
        Scheduler(limits()).add(asked)
    assert refusal.value.param == "pooling"


@BOTH
def test_a_step_without_memory_is_computed_again(pooling: Pooling) -> None:
    scheduler, worker = Scheduler(limits()), SimulatedWorker(4)
    asked = request("r", NUMBERS[:40], pooling=pooling)
    scheduler.add(asked)
    events: list[Event] = []
    for step in range(40):
        plan = scheduler.schedule()
        if plan is None:
            break
        result = worker.execute(plan)
        events += scheduler.take_back(plan) if step == 1 else scheduler.apply(plan, result)
        check_integrity(scheduler)
    assert [event.embedding for event in events] == [expected_vector(asked)]


def test_one_that_never_fits_ends_with_an_error() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("r", NUMBERS[:40], pooling=Pooling.MEAN))
    events: list[Event] = []
    while (plan := scheduler.schedule()) is not None:
        events += scheduler.take_back(plan)
        check_integrity(scheduler)
    assert [(event.finish, event.error) for event in events] == [(FinishReason.ERROR, NO_MEMORY)]


# How long a request queued.


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_event_says_how_long_a_request_queued() -> None:
    clock = Clock()
    simulation = Simulation(limits(max_num_seqs=1))
    simulation.scheduler._clock = clock
    simulation.add(request("a", [1], 3), request("b", [2], 2))
    resumed = expected_output(request("c", [3], 4), 64)[:2]
    simulation.add(request("c", [3], 4, output=resumed))
    while simulation.step():
        clock.now += 1
    heard = {name: [e.queue_seconds for e in simulation.events if e.request_id == name] for name in "abc"}
    assert heard == {"a": [0, None, None], "b": [3, None], "c": [None, None]}, "c has told of its own before"
    assert [e.cached_tokens for e in simulation.events if e.request_id == "c"] == [None, None]


def test_a_preempted_request_queued_until_it_was_first_admitted() -> None:
    clock = Clock()
    simulation = Simulation(limits())
    simulation.scheduler._clock = clock
    simulation.add(request("r", NUMBERS[:40], 3))
    clock.now += 5
    simulation.step()
    simulation.scheduler._preempt(simulation.scheduler.cursors["r"])
    clock.now += 5
    simulation.run()
    assert [event.queue_seconds for event in simulation.events] == [5, None, None]
