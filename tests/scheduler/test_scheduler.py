"""The scheduler, one behaviour at a time. C.. and G.. are the review findings that a behaviour answers."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import weakref
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.scheduler.simulation import STOP_TOKEN, VOCAB, Simulation, expected_output, limits, next_token, request
from weft.errors import InvalidRequest
from weft.plan import Limits, StepResult
from weft.scheduler import policy
from weft.scheduler.cursors import TokenCursor
from weft.scheduler.scheduler import Scheduler
from weft.types import FinishReason, Request

DELAYS = pytest.mark.parametrize("delay", [0, 1, 2])
NUMBERS = [(i * 7 + i // 50) % VOCAB for i in range(200)]


def tight(**changes: object) -> Limits:
    """Blocks for one request of the longest kind, and no more."""
    return limits(num_blocks=17, **changes)


@functools.cache
def prompt_that_stops_at(*indices: int) -> list[int]:
    """A prompt whose answer has the stop token at these places, and nowhere between or before."""
    for prompt in itertools.product(range(4), range(VOCAB), range(VOCAB)):
        answer = expected_output(request("", list(prompt), indices[-1] + 1), 64)
        if tuple(i for i, token in enumerate(answer) if token == STOP_TOKEN) == indices:
            return list(prompt)
    raise AssertionError("no such prompt")


def assert_answers(simulation: Simulation, *requests: Request) -> None:
    for asked in requests:
        expected = expected_output(asked, simulation.scheduler.limits.max_model_len)
        assert simulation.outputs[asked.request_id] == expected[len(asked.output_token_ids) :]


def chunks(simulation: Simulation, name: str) -> list[tuple[int, int]]:
    return [(row.start, row.count) for row in simulation.rows_of(name)]


def assert_nothing_is_left(scheduler: Scheduler) -> None:
    assert not scheduler.has_work
    assert not scheduler.cursors and not scheduler.waiting and not scheduler.running
    assert not scheduler._under_way, "promises of steps that were read are still in the books"
    assert sorted(scheduler.free_rows) == list(range(scheduler.limits.max_num_seqs))
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    assert len(scheduler.pool.by_key) <= scheduler.pool.num_usable


# C9: a prompt is computed in the slices that were scheduled.


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50, 63])
def test_the_scheduled_slices_cover_a_prompt_exactly_once(length: int) -> None:
    simulation = Simulation(limits())
    asked = request("r", NUMBERS[:length], 1)
    simulation.add(asked)
    simulation.run()
    position = 0
    for start, count in chunks(simulation, "r"):
        assert start == position and 1 <= count <= 32
        position += count
    assert position == length
    assert [row.samples for row in simulation.rows_of("r")].count(True) == 1 and simulation.rows_of("r")[-1].samples
    assert_answers(simulation, asked)


def test_each_decode_step_computes_the_one_new_token() -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", NUMBERS[:10], 5))
    simulation.run()
    assert chunks(simulation, "r") == [(0, 10), (10, 1), (11, 1), (12, 1), (13, 1)]


def test_blocks_are_named_to_the_worker_once_and_only_as_they_are_needed() -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", NUMBERS[:20], 8))
    simulation.run()
    rows = simulation.rows_of("r")
    named = [block for row in rows for block in row.new_blocks]
    assert len(named) == len(set(named)) == 7  # 27 computed tokens in blocks of 4.
    held = 0
    for row in rows:
        held += len(row.new_blocks)
        assert held == -(-(row.start + row.count) // 4)


# Who is in a step.


def test_decodes_come_first_though_an_older_prompt_is_still_computed() -> None:
    simulation = Simulation(limits())
    simulation.add(request("older", NUMBERS[:60], 4), request("newer", [1, 2, 3], 8))
    simulation.step()
    simulation.step()
    plan, owners = simulation.plans[1], simulation.owners[1]
    assert [owners[row.row] for row in plan.rows] == ["newer", "older"]


def test_prompt_tokens_are_bounded_in_every_step_that_decodes() -> None:
    rnd = random.Random(1)
    simulation = Simulation(limits(num_blocks=60, max_prefill_chunk=5, max_num_batched_tokens=32, max_num_seqs=6))
    mixed = 0
    for i in range(150):
        if i < 120:
            simulation.add(request(f"r{i}", [rnd.randrange(VOCAB) for _ in range(rnd.randint(2, 50))], 9))
        simulation.step()
        plan = simulation.plans[-1]
        admitted = {admission.row for admission in plan.admit}
        decodes = [r for r in plan.rows if r.count == 1 and r.samples and r.row not in admitted]
        prompt_tokens = plan.num_tokens - len(decodes)
        if decodes:
            assert prompt_tokens <= 5
            mixed += prompt_tokens > 0
    assert mixed > 20, "the workload did not mix decodes and prompts"


def test_every_running_answer_gets_its_token_while_a_long_prompt_is_computed() -> None:
    simulation = Simulation(limits(max_prefill_chunk=4))
    simulation.add(request("a", [1, 2], 30), request("b", [3, 4], 30))
    simulation.step()
    simulation.add(request("long", NUMBERS[:40], 4))
    while not simulation.outputs["long"]:
        heard = len(simulation.events)
        simulation.step()
        assert {"a", "b"} <= {event.request_id for event in simulation.events[heard:]}


def test_a_long_prompt_advances_in_every_step_that_decodes() -> None:
    simulation = Simulation(limits(max_prefill_chunk=4))
    simulation.add(request("a", [1, 2], 30))
    simulation.step()
    simulation.add(request("long", NUMBERS[:40], 4))
    for _ in range(10):
        simulation.step()
    assert chunks(simulation, "long") == [(start, 4) for start in range(0, 40, 4)]


def test_a_deep_queue_is_worked_off_in_larger_steps() -> None:
    simulation = Simulation(
        limits(max_prefill_chunk=16, max_mixed_prefill=4, num_blocks=200, max_num_seqs=16, max_num_batched_tokens=24)
    )
    simulation.add(request("first", [1, 2], 60))
    simulation.step()
    simulation.add(*(request(f"r{i}", NUMBERS[i : i + 10], 2) for i in range(6)))
    assert prompt_tokens_of_steps(simulation, 4) == [15, 14, 4, 4], "60 tokens wait, then 40, then 30"


def test_few_decodes_have_few_prompt_tokens_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MIN_PREFILL_BUDGET", 5)
    simulation = Simulation(limits(max_prefill_chunk=16, max_mixed_prefill=8, num_blocks=100, max_num_seqs=6))
    for name in ("a", "b", "c"):
        simulation.add(request(name, [1, 2], 60))
        simulation.step()
        if name != "b":
            simulation.add(request(f"prompt{name}", [ord(name) % VOCAB] * 20, 1))
            room = {"a": 5, "c": 8}[name]
            assert prompt_tokens_of_steps(simulation, 2) == [room, room]
            simulation.scheduler.abort(f"prompt{name}")


def prompt_tokens_of_steps(simulation: Simulation, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        simulation.step()
        plan = simulation.plans[-1]
        tokens.append(plan.num_tokens - sum(row.count == 1 for row in plan.rows))
    return tokens


def test_several_prompts_share_a_step_when_nothing_decodes() -> None:
    simulation = Simulation(limits())
    simulation.add(*(request(f"r{i}", NUMBERS[i : i + 10], 2) for i in range(4)))
    simulation.step()
    assert [row.count for row in simulation.plans[0].rows] == [10, 10, 10, 2]
    assert simulation.worker.largest_batch == 4


@pytest.mark.parametrize("budget", [4, 7, 32])
def test_no_step_is_larger_than_its_budget(budget: int) -> None:
    simulation = Simulation(limits(max_num_batched_tokens=budget))
    asked = [request(f"r{i}", NUMBERS[i : i + 5 + i], 6) for i in range(8)]
    simulation.add(*asked)
    simulation.run()
    assert max(plan.num_tokens for plan in simulation.plans) <= budget
    assert_answers(simulation, *asked)


def test_no_step_has_more_rows_than_there_are() -> None:
    simulation = Simulation(limits(max_num_seqs=3))
    simulation.add(*(request(f"r{i}", [i], 5) for i in range(9)))
    simulation.run()
    assert simulation.worker.largest_batch == 3


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    simulation = Simulation(limits())
    names = [f"r{i}" for i in range(12)]
    for i, name in enumerate(names):
        simulation.add(request(name, NUMBERS[i : i + 1 + i * 5 % 17], 3 + i % 4))
    simulation.run()
    assert simulation.admissions() == names


def test_a_small_request_does_not_overtake_a_large_one_that_does_not_fit_yet() -> None:
    simulation = Simulation(tight())
    simulation.add(request("first", [1] * 20, 20))
    simulation.step()
    simulation.add(request("large", NUMBERS[:60], 2), request("small", [1, 2], 2))
    simulation.run()
    assert simulation.admissions() == ["first", "large", "small"]


def test_a_row_is_given_on_within_one_plan() -> None:
    simulation = Simulation(limits(max_num_seqs=1))
    asked = [request("a", [1, 2], 3), request("b", [3, 4], 3)]
    simulation.add(*asked)
    simulation.run()
    (handover,) = [plan for plan in simulation.plans if plan.release]
    assert handover.release == [0] and [admission.row for admission in handover.admit] == [0]
    assert_answers(simulation, *asked)


def test_every_released_row_is_named_to_the_worker_exactly_once() -> None:
    simulation = Simulation(tight())
    simulation.add(*(request(f"r{i}", [i] * 5, 30) for i in range(4)))
    simulation.run()
    simulation.add(request("last", [1], 1))
    simulation.run()
    released = [row for plan in simulation.plans for row in plan.release]
    assert len(released) == len(simulation.admissions()) - 1  # The last one's is named in the next plan.


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(limits())
    assert scheduler.schedule() is None and not scheduler.has_work and scheduler.stats().steps == 0


def test_a_pool_that_cannot_hold_one_request_is_refused() -> None:
    Scheduler(limits(num_blocks=17))
    with pytest.raises(ValueError, match="16 blocks cannot hold one request of 64 tokens"):
        Scheduler(limits(num_blocks=16))


# C6: the context limit is hard.


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    scheduler = Scheduler(limits())
    for length in (64, 65, 500):
        with pytest.raises(InvalidRequest, match=f"{length} tokens; the context of 64") as refusal:
            scheduler.add(request("r", [1] * length))
        assert refusal.value.param == "prompt"
    assert not scheduler.has_work and scheduler.stats().prompt_tokens == 0


@pytest.mark.parametrize("max_tokens", [None, 1000])
@pytest.mark.parametrize("length", [1, 40, 60, 63])
@DELAYS
def test_an_answer_ends_exactly_at_the_context_limit(delay: int, length: int, max_tokens: int | None) -> None:
    simulation = Simulation(limits(), delay)
    asked = request("r", NUMBERS[:length], max_tokens)
    simulation.add(asked)
    simulation.run()
    assert len(simulation.outputs["r"]) == 64 - length
    assert simulation.ends["r"].finish is FinishReason.LENGTH
    assert max(start + count for start, count in chunks(simulation, "r")) == 63, "no plan may pass the last token"
    assert_answers(simulation, asked)


@DELAYS
def test_an_answer_has_max_tokens_and_no_more(delay: int) -> None:
    simulation = Simulation(limits(), delay)
    asked = [request(f"r{n}", NUMBERS[n : n + 6], n) for n in (1, 2, 3, 9)]
    simulation.add(*asked)
    simulation.run()
    assert [len(simulation.outputs[r.request_id]) for r in asked] == [1, 2, 3, 9]
    assert {end.finish for end in simulation.ends.values()} == {FinishReason.LENGTH}
    computed = sum(len(r.prompt_token_ids) + r.params.max_tokens - 1 for r in asked)
    assert simulation.worker.computed == computed, "a step was spent on a request that had all its tokens"


# C5: preemption changes nothing that a user can see.


@pytest.mark.parametrize("caching", [True, False])
@DELAYS
def test_answers_are_the_same_after_preemption(delay: int, caching: bool) -> None:
    simulation = Simulation(tight(enable_prefix_caching=caching), delay)
    asked = [request(f"r{i}", NUMBERS[i : i + 6 + i], 40) for i in range(4)]
    simulation.add(*asked)
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    assert_answers(simulation, *asked)


def test_a_preempted_request_is_admitted_with_the_tokens_it_has_already_given() -> None:
    simulation = Simulation(tight(enable_prefix_caching=False))
    asked = [request(f"r{i}", NUMBERS[i : i + 6], 40) for i in range(3)]
    simulation.add(*asked)
    simulation.run()
    seen = set()
    resumed = 0
    for plan, owners in zip(simulation.plans, simulation.owners, strict=True):
        for admission in plan.admit:
            name = owners[admission.row]
            if name in seen:
                output = admission.token_ids[admission.num_prompt_tokens :]
                assert output and output == simulation.outputs[name][: len(output)]
                first = next(row for row in plan.rows if row.row == admission.row)
                assert first.start == 0, "what was computed before the preemption is gone"
                resumed += 1
            seen.add(name)
    assert resumed > 0


@pytest.mark.parametrize("every", [1, 2, 5])
@DELAYS
def test_answers_are_the_same_under_forced_preemption(delay: int, every: int) -> None:
    simulation = Simulation(limits(force_preempt_every=every), delay)
    asked = [request(f"r{i}", NUMBERS[i : i + 6 + 3 * i], 20) for i in range(5)]
    simulation.add(*asked)
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    assert_answers(simulation, *asked)


# G1: who gives way.


def cursors(count: int) -> list[TokenCursor]:
    return [TokenCursor(request(f"r{i}", [1]), max_model_len=64, block_size=4) for i in range(count)]


def test_the_victim_is_the_newest_that_nothing_was_promised_to() -> None:
    oldest, middle, newest = running = cursors(3)
    assert policy.victim(running, ()) is newest
    assert policy.victim(running, {newest: 0}) is middle
    assert policy.victim(running, {newest: 0, middle: 0}) is oldest
    assert policy.victim(running, dict.fromkeys(running, 0)) is None


def test_a_request_that_holds_all_its_blocks_is_no_victim() -> None:
    older, newer = running = cursors(2)
    newer.holds_all = True
    assert policy.victim(running, ()) is older
    older.holds_all = True
    assert policy.victim(running, ()) is None


def test_a_prompt_that_runs_out_of_blocks_does_not_take_those_of_a_planned_decode() -> None:
    simulation = Simulation(tight(max_prefill_chunk=2))
    scheduler = simulation.scheduler
    simulation.add(request("before", NUMBERS[100:133], 1))
    simulation.run()
    asked = [request("older", NUMBERS[:24], 4), request("newest", NUMBERS[100:133], 20)]
    simulation.add(*asked)
    simulation.step()
    assert [cursor.id for cursor in scheduler.running] == ["older", "newest"]
    assert scheduler.cursors["newest"].decoding and not scheduler.cursors["older"].decoding
    while scheduler.stats().preemptions == 0:
        simulation.step()
    # The newest request decodes, and the step had promised it a token: the older one gave way itself.
    assert scheduler.cursors["older"].preemptions == 1
    assert [simulation.owners[-1][row.row] for row in simulation.plans[-1].rows] == ["newest"]
    assert [cursor.id for cursor in scheduler.waiting] == ["older"]
    simulation.run()
    assert_answers(simulation, *asked)


def test_a_short_prompt_passes_a_long_one_and_leaves_it_half_of_the_budget() -> None:
    simulation = Simulation(limits(max_num_batched_tokens=8, max_prefill_chunk=8))
    scheduler = simulation.scheduler
    simulation.add(request("long", NUMBERS[:40], 2))
    simulation.step()
    simulation.add(
        *(request(f"short{i}", NUMBERS[50 + i : 53 + i], 2) for i in range(3)), request("other", NUMBERS[:30], 2)
    )
    planned: list[dict[str, int]] = []
    for _ in range(3):
        simulation.step()
        owners = simulation.owners[-1]
        planned.append({owners[row.row]: row.count for row in simulation.plans[-1].rows})
    # Beside a decode there is less budget; a prompt that does not fit into half of it waits for its turn.
    assert planned[0] == {"short0": 3, "long": 5}
    assert planned[1].keys() == {"short0", "short1", "long"} and planned[1]["long"] >= 4
    assert "other" not in planned[2] and scheduler.cursors["other"].row < 0
    simulation.run()


def test_a_short_prompt_does_not_take_the_blocks_of_one_that_has_begun() -> None:
    simulation = Simulation(tight(max_num_batched_tokens=8, max_prefill_chunk=8))
    simulation.add(request("long", NUMBERS[:56], 2))
    simulation.step()
    simulation.add(*(request(f"short{i}", NUMBERS[60 + i : 63 + i], 2) for i in range(6)))
    simulation.run()
    assert simulation.scheduler.stats().preemptions == 0


@DELAYS
def test_a_victim_is_in_no_row_of_the_plan_and_waits_at_least_until_the_next(delay: int) -> None:
    simulation = Simulation(tight(max_num_seqs=6), delay)
    scheduler = simulation.scheduler
    simulation.add(*(request(f"r{i}", NUMBERS[i : i + 3 + 4 * i], 30) for i in range(8)))
    victims = 0
    while scheduler.has_work:
        before = {name: cursor.preemptions for name, cursor in scheduler.cursors.items()}
        events, planned = len(simulation.events), len(simulation.plans)
        preempted_before = scheduler.stats().preemptions
        simulation.step()
        if scheduler.stats().preemptions == preempted_before:
            continue
        ended = {event.request_id for event in simulation.events[events:] if event.finish}
        preempted = {name for name, c in scheduler.cursors.items() if c.preemptions > before[name]}
        assert preempted or ended
        victims += len(preempted)
        assert preempted <= {cursor.id for cursor in scheduler.waiting}
        for plan, owners in zip(simulation.plans[planned:], simulation.owners[planned:], strict=True):
            assert not plan.admit, "a preemption made room, and a waiting request took it in the same step"
            assert preempted.isdisjoint(owners[row.row] for row in plan.rows)
            assert {row.row for row in plan.rows} <= owners.keys()
    assert victims > 3


def test_a_victim_is_not_admitted_again_in_the_step_that_preempted_it_though_it_would_fit() -> None:
    """Of two requests with the same prompt each computed its own blocks; without them the second fits at once, for
    it finds those of the first."""
    simulation = Simulation(tight())
    asked = [request("a", NUMBERS[:20], 30), request("b", NUMBERS[:20], 30)]
    simulation.add(*asked)
    while simulation.scheduler.stats().preemptions == 0:
        simulation.step()
    assert simulation.plans[-1].admit == []
    assert [cursor.id for cursor in simulation.scheduler.waiting] == ["b"]
    simulation.step()
    assert simulation.admissions() == ["a", "b", "b"] and simulation.rows_of("b")[-1].start == 32
    simulation.run()
    assert_answers(simulation, *asked)


def test_a_preempted_request_goes_on_before_those_that_wait() -> None:
    simulation = Simulation(tight(max_num_seqs=2))
    simulation.add(request("a", [1] * 9, 40), request("b", [2] * 9, 40))
    simulation.step()
    simulation.add(request("c", [3] * 9, 4))
    simulation.run()
    assert simulation.admissions() == ["a", "b", "b", "c"]


def test_requests_preempted_one_after_the_other_keep_their_order() -> None:
    simulation = Simulation(limits(force_preempt_every=1, max_num_seqs=3), delay=1)
    simulation.add(*(request(name, [ord(name) % VOCAB] * 5, 9) for name in "abcd"))
    orders = []
    for _ in range(4):
        simulation.step()
        orders.append([cursor.id for cursor in simulation.scheduler.waiting])
    assert ["b", "c", "d"] in orders
    assert all(order == sorted(order) for order in orders)


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
@pytest.mark.parametrize("every", [0, 2])
def test_preemptions_of_one_request_are_bounded(max_preemptions: int, every: int) -> None:
    for seed in range(2):
        rnd = random.Random(seed)
        simulation = Simulation(
            tight(max_num_seqs=6, max_preemptions=max_preemptions, force_preempt_every=every), delay=seed
        )
        scheduler = simulation.scheduler
        most = 0
        for i in range(14):
            length = rnd.randint(1, 40)
            simulation.add(request(f"r{i}", [rnd.randrange(VOCAB) for _ in range(length)], rnd.randint(1, 30)))
        while scheduler.has_work:
            simulation.step()
            for cursor in scheduler.cursors.values():
                most = max(most, cursor.preemptions)
                assert cursor.preemptions <= max_preemptions + 1
                if cursor.preemptions > max_preemptions and cursor.row >= 0:
                    assert cursor.holds_all and len(cursor.blocks) * 4 >= cursor.limit
        assert most > 0


# C7, G3: an ended request leaves nothing behind.


@DELAYS
def test_ended_requests_leave_nothing_behind(delay: int) -> None:
    simulation = Simulation(tight(), delay)
    scheduler = simulation.scheduler
    simulation.add(*(request(f"r{i}", NUMBERS[i : i + 9], 20, stop=i % 2 == 0) for i in range(10)))
    alive = [weakref.ref(cursor) for cursor in scheduler.cursors.values()]
    for _ in range(6):
        simulation.step()
    simulation.abort("r1")
    simulation.abort("r9")
    simulation.run()
    assert_nothing_is_left(scheduler)
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == [], "something still refers to an ended request"


def test_an_id_can_be_used_again_after_its_end() -> None:
    simulation = Simulation(limits())
    for prompt in ([1, 2], [3, 4]):
        simulation.add(request("r", prompt, 3))
        simulation.ends.clear()
        simulation.run()
        assert simulation.outputs["r"] == expected_output(request("r", prompt, 3), 64)


@DELAYS
def test_an_id_can_be_used_again_while_the_results_of_its_aborted_request_are_under_way(delay: int) -> None:
    simulation = Simulation(limits(), delay)
    simulation.add(request("r", [1, 2], 9))
    simulation.step()
    simulation.step()
    simulation.abort("r")
    again = request("r", [3, 4, 5], 4)
    simulation.add(again)
    simulation.run()
    assert_answers(simulation, again)
    assert_nothing_is_left(simulation.scheduler)


# Abort.


def queued(simulation: Simulation) -> None:
    simulation.add(*(request(f"filler {i}", [i], 30) for i in range(4)))
    simulation.step()
    simulation.add(request("r", NUMBERS[:20], 9))
    simulation.step()
    assert simulation.scheduler.cursors["r"].row < 0


def mid_prompt(simulation: Simulation) -> None:
    simulation.add(request("other", [1, 2], 30))
    simulation.step()
    simulation.add(request("r", NUMBERS[:50], 9))
    simulation.step()
    assert 0 < simulation.scheduler.cursors["r"].computed < 50


def decoding(simulation: Simulation) -> None:
    simulation.add(request("other", [1, 2], 30), request("r", NUMBERS[:10], 30))
    for _ in range(5):
        simulation.step()
    assert simulation.outputs["r"]


def preempted(simulation: Simulation) -> None:
    simulation.add(request("other", [1, 2], 30), request("r", NUMBERS[:10], 30))
    for _ in range(4):
        simulation.step()
    simulation.scheduler._preempt(simulation.scheduler.cursors["r"])


@pytest.mark.parametrize("stage", [queued, mid_prompt, decoding, preempted], ids=lambda stage: stage.__name__)
@DELAYS
def test_an_abort_gives_everything_back_at_once_and_no_event_follows(
    delay: int, stage: Callable[[Simulation], None]
) -> None:
    simulation = Simulation(limits(), delay)
    scheduler = simulation.scheduler
    stage(simulation)
    cursor = scheduler.cursors["r"]
    alone = sum(block.refs == 1 for block in cursor.blocks)
    free, rows, heard = scheduler.pool.num_free, len(scheduler.free_rows), len(simulation.events)
    had_row = cursor.row >= 0
    assert simulation.abort("r")
    assert scheduler.pool.num_free == free + alone and len(scheduler.free_rows) == rows + had_row
    assert "r" not in scheduler.cursors
    simulation.run()
    assert "r" not in {event.request_id for event in simulation.events[heard:]}
    for name, output in simulation.outputs.items():
        if name != "r":
            assert len(output) == 30 and simulation.ends[name].finish is FinishReason.LENGTH
    assert_nothing_is_left(scheduler)


def test_an_abort_while_the_last_token_is_under_way_leaves_no_event() -> None:
    simulation = Simulation(limits(), delay=1)
    simulation.add(request("r", [1, 2], 1))
    simulation.step()
    assert simulation.scheduler.cursors["r"].pending == 1
    assert simulation.abort("r")
    simulation.run()
    assert simulation.events == []
    assert_nothing_is_left(simulation.scheduler)


def test_aborting_the_unknown_or_the_ended_says_so() -> None:
    simulation = Simulation(limits())
    assert not simulation.abort("nobody")
    simulation.add(request("r", [1], 1))
    simulation.run()
    assert not simulation.abort("r")


# How an answer ends.


@DELAYS
def test_a_stop_token_ends_the_answer_and_is_reported(delay: int) -> None:
    simulation = Simulation(limits(), delay)
    simulation.add(request("r", prompt_that_stops_at(4), 20, stop=True))
    simulation.run()
    end = simulation.ends["r"]
    assert (end.finish, end.stop_token_id, end.token_ids) == (FinishReason.STOP, STOP_TOKEN, [STOP_TOKEN])
    assert len(simulation.outputs["r"]) == 5
    assert [event.stop_token_id for event in simulation.events[:-1]] == [None] * 4


def test_a_stop_token_at_the_last_place_ends_the_answer_as_a_stop() -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", prompt_that_stops_at(4), 5, stop=True))
    simulation.run()
    assert simulation.ends["r"].finish is FinishReason.STOP


def test_a_token_that_nobody_asked_to_stop_at_does_not_stop() -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", prompt_that_stops_at(4), 9))
    simulation.run()
    end = simulation.ends["r"]
    assert (end.finish, end.stop_token_id) == (FinishReason.LENGTH, None)
    assert len(simulation.outputs["r"]) == 9


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 3), (2, 3), (3, 7), (6, 7)])
def test_a_stop_token_counts_only_after_min_tokens(min_tokens: int, length: int) -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", prompt_that_stops_at(2, 6), 20, stop=True, min_tokens=min_tokens))
    simulation.run()
    assert len(simulation.outputs["r"]) == length
    assert simulation.ends["r"].finish is FinishReason.STOP


@pytest.mark.parametrize("delay", [1, 2])
def test_what_was_computed_after_a_stop_is_discarded(delay: int) -> None:
    simulation = Simulation(limits(), delay)
    asked = [request("stops", prompt_that_stops_at(4), 20, stop=True), request("goes on", [1, 2, 3], 20)]
    simulation.add(*asked)
    simulation.run()
    assert len(simulation.rows_of("stops")) == 5 + delay, "the steps under way went beyond the stop"
    assert_answers(simulation, *asked)
    assert [event.request_id for event in simulation.events].count("stops") == 5
    assert simulation.scheduler.stats().generation_tokens == 5 + 20
    assert_nothing_is_left(simulation.scheduler)


@pytest.mark.parametrize("delay", [1, 2])
def test_late_results_give_the_answers_of_prompt_ones(delay: int) -> None:
    asked = [request(f"r{i}", NUMBERS[i : i + 3 + 5 * i], 12, stop=True) for i in range(8)]
    outputs = []
    for steps_late in (0, delay):
        simulation = Simulation(limits(), steps_late)
        simulation.add(*asked)
        simulation.run()
        outputs.append(simulation.outputs)
    assert outputs[0] == outputs[1]


@DELAYS
def test_broken_logits_end_that_request_alone(delay: int) -> None:
    simulation = Simulation(limits(), delay)
    simulation.worker.broken = {49}
    asked = [request("a", [1, 2, 3], 9, stop=True), request("b", [4, 5, 6], 9, stop=True)]
    assert not {49} & set(expected_output(asked[0], 64) + expected_output(asked[1], 64))
    simulation.add(asked[0], request("broken", [1, 49], 9), asked[1])
    simulation.run()
    end = simulation.ends["broken"]
    assert (end.finish, end.error, end.token_ids) == (FinishReason.ERROR, "not a number", [])
    assert simulation.outputs["broken"] == []
    assert_answers(simulation, *asked)
    assert_nothing_is_left(simulation.scheduler)


def test_broken_logits_in_the_middle_of_an_answer_leave_its_tokens() -> None:
    simulation = Simulation(limits(), delay=1)
    prompt = [2, 3, 4]
    answer = expected_output(request("r", prompt, 9), 64)
    at = next(i for i, token in enumerate(answer) if i > 1 and token not in prompt and token not in answer[:i])
    simulation.worker.broken = {answer[at]}
    simulation.add(request("r", prompt, 9))
    simulation.run()
    assert simulation.outputs["r"] == answer[: at + 1]
    assert simulation.ends["r"].finish is FinishReason.ERROR
    assert simulation.scheduler.stats().generation_tokens == at + 1


def test_a_result_is_taken_once() -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", [1], 9))
    plan = simulation.scheduler.schedule()
    result = simulation.worker.execute(plan)
    simulation.scheduler.apply(plan, result)
    with pytest.raises(KeyError):
        simulation.scheduler.apply(plan, result)


def test_a_result_with_too_few_tokens_is_noticed() -> None:
    simulation = Simulation(limits())
    simulation.add(request("r", [1], 9))
    plan = simulation.scheduler.schedule()
    with pytest.raises((StopIteration, ValueError, RuntimeError)):
        simulation.scheduler.apply(plan, StepResult(plan.step_id, []))


# The last check before anything is computed.


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on() -> None:
    simulation = Simulation(limits())
    first = request("r", [1, 2], 5)
    simulation.add(first)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="already"):
            simulation.scheduler.add(request("r", [3], 2))
        simulation.step()
    simulation.run()
    assert_answers(simulation, first)


BAD_IDS = [-1, VOCAB, VOCAB + 1, 2**40]


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize(
    ("param", "make"),
    [
        ("prompt", lambda bad: request("r", [1, bad, 2])),
        ("output_token_ids", lambda bad: request("r", [1], output=[2, bad])),
        ("stop_token_ids", lambda bad: replace(request("r", [1]), stop_token_ids=[bad])),
        ("stop_token_ids", lambda bad: request("r", [1], stop_token_ids=(bad,))),
        ("logit_bias", lambda bad: request("r", [1], logit_bias={bad: 1.0})),
    ],
    ids=["prompt", "output", "stop", "own stop", "logit_bias"],
)
def test_a_token_id_beyond_the_logits_is_refused(param: str, make: Callable[[int], Request], bad: int) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(InvalidRequest) as refusal:
        scheduler.add(make(bad))
    assert refusal.value.param == param and str(bad) in refusal.value.message
    assert not scheduler.has_work


def test_the_first_and_the_last_token_id_are_accepted() -> None:
    simulation = Simulation(limits())
    edges = [0, VOCAB - 1]
    asked = replace(
        request("r", edges, 4, output=edges, logit_bias=dict.fromkeys(edges, 1.0)), stop_token_ids=list(edges)
    )
    simulation.add(asked)
    simulation.run()
    assert_answers(simulation, asked)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (request("r", []), "prompt"),
        (request("r", [1], 0), "max_tokens"),
        (request("r", [1], 4, min_tokens=5), "min_tokens"),
        (request("r", [1], 4, temperature=float("nan")), "temperature"),
        (request("r", [1], 4, output=[1, 2, 3, 4]), "max_tokens"),
    ],
    ids=["empty prompt", "no tokens", "min above max", "nan", "all tokens already"],
)
def test_a_request_that_cannot_be_served_is_refused(asked: Request, param: str) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(InvalidRequest) as refusal:
        scheduler.add(asked)
    assert refusal.value.param == param
    assert not scheduler.has_work


# A request that goes on in a new engine.


@pytest.mark.parametrize("cut", [1, 3, 11])
@DELAYS
def test_a_resumed_request_goes_on_where_it_was(delay: int, cut: int) -> None:
    whole = expected_output(request("r", NUMBERS[:7], 12), 64)
    simulation = Simulation(limits(), delay)
    simulation.add(request("r", NUMBERS[:7], 12, output=whole[:cut]))
    simulation.run()
    assert simulation.outputs["r"] == whole[cut:]
    assert simulation.ends["r"].finish is FinishReason.LENGTH
    assert simulation.plans[0].admit[0].num_prompt_tokens == 7
    assert simulation.scheduler.stats().prompt_tokens == 0, "its prompt was counted by the engine before"


def test_a_resumed_request_ends_at_the_context_limit_of_its_first_run() -> None:
    whole = expected_output(request("r", NUMBERS[:50], None), 64)
    simulation = Simulation(limits())
    simulation.add(request("r", NUMBERS[:50], None, output=whole[:6]))
    simulation.run()
    assert simulation.outputs["r"] == whole[6:] and len(whole) == 14


def test_min_tokens_of_a_resumed_request_count_from_its_prompt() -> None:
    prompt = prompt_that_stops_at(2, 6)
    whole = expected_output(request("r", prompt, 20, stop=True, min_tokens=6), 64)
    simulation = Simulation(limits())
    simulation.add(request("r", prompt, 20, stop=True, min_tokens=6, output=whole[:4]))
    simulation.run()
    assert simulation.outputs["r"] == whole[4:] and len(whole) == 7


@pytest.mark.parametrize(("num_output", "max_tokens"), [(4, None), (10, 50)])
def test_a_resumed_request_that_fills_the_context_already_is_refused(num_output: int, max_tokens: int | None) -> None:
    """Accepted, it can never be planned: it stands at the head of the queue for ever, and everybody behind it."""
    scheduler = Scheduler(limits())
    with pytest.raises(InvalidRequest):
        scheduler.add(request("r", NUMBERS[:60], max_tokens, output=[1] * num_output))
    assert not scheduler.has_work


# Nobody waits for ever.


@pytest.mark.parametrize(
    ("shape", "delay"),
    [(limits(num_blocks=65), 0), (tight(), 0), (tight(max_preemptions=0), 1), (tight(max_num_batched_tokens=4), 2)],
    ids=["room for all", "tight", "tight, no preemption twice", "tight, small steps"],
)
def test_nobody_waits_for_ever_under_a_stream_of_arrivals(shape: Limits, delay: int) -> None:
    """The bound: with n requests before it, a request ends within (n + 1) * max_model_len steps of its arrival,
    as if all had been served one after the other, a token a step. Later arrivals do not count."""
    rnd = random.Random(7)
    simulation = Simulation(shape, delay)
    scheduler = simulation.scheduler
    deadlines: dict[str, int] = {}
    arrivals = served = 0
    for step in range(400):
        # One arrival for each end, and now and then one more: the queue never empties, and grows slowly.
        while len(scheduler.cursors) < 6 + step // 100:
            name = f"r{arrivals}"
            length = rnd.choice([2, 5, 30, 55])
            prompt = [rnd.randrange(VOCAB) for _ in range(length)]
            deadlines[name] = step + (len(scheduler.cursors) + 1) * 64 + delay
            simulation.add(request(name, prompt, rnd.randint(1, 30)))
            arrivals += 1
        assert simulation.step()
        for name in list(deadlines):
            if name in simulation.ends:
                del deadlines[name]
                served += 1
            else:
                assert step <= deadlines[name], f"{name} still waits: {scheduler.cursors[name]}"
    assert served > 20


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    """The bound: while three others decode without a pause, a prompt of 60 tokens in chunks of 4 has its first
    token 15 steps after its admission, which is at the next end of a request."""
    simulation = Simulation(limits(max_prefill_chunk=4, max_num_seqs=4))
    arrivals = 0
    arrived_at = None
    for step in range(60):
        while len(simulation.scheduler.cursors) < 8:
            simulation.add(request(f"short {arrivals}", [arrivals % VOCAB, 1], 6))
            arrivals += 1
        if step == 5:
            ahead = len(simulation.scheduler.cursors)
            simulation.add(request("long", NUMBERS[:60], 2))
            arrived_at = step
        simulation.step()
        if simulation.outputs.get("long"):
            break
    assert arrived_at is not None and ahead == 8
    # Two generations of short ones of at most 7 steps each were before it.
    assert step - arrived_at <= 2 * 7 + 15


def test_the_simulated_model_tells_any_two_sequences_apart() -> None:
    """What the tests above rest on: with another prefix the answer is another."""
    answers = {tuple(expected_output(request("", [a, b], 12), 64)) for a in range(20) for b in range(20)}
    assert len(answers) == 400 and next_token([1, 2]) == expected_output(request("", [1, 2], 1), 64)[0]
