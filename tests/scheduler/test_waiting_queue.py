"""Who is next: by fair shares of the tenants, then by priority, then by arrival."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from tests.scheduler.simulation import Simulation, limits, request
from weft.errors import InvalidRequest
from weft.plan import Limits, Sampled, StepResult
from weft.scheduler.cursors import TokenCursor
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.step import MAX_PROMPT_LOGPROBS
from weft.scheduler.waiting_queue import WaitingQueue
from weft.types import Request

ARRIVALS = iter(range(10**9))


def cursor(name: str, **details: object) -> TokenCursor:
    return TokenCursor(request(name, [1, 2], **details), max_model_len=64, block_size=4, arrival=next(ARRIVALS))


def queue_of(*cursors: TokenCursor) -> WaitingQueue:
    queue = WaitingQueue()
    for one in cursors:
        queue.tenants.opened(one.tenant)
        queue.add(one)
    return queue


def drained(queue: WaitingQueue, charge: int = 0) -> list[str]:
    names = []
    while (head := queue.next()) is not None:
        names.append(head.id)
        queue.remove(head)
        queue.tenants.charge(head.tenant, charge)
    assert len(queue) == queue.num_tokens == 0
    return names


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    assert drained(queue_of(*(cursor(name) for name in "abcde")), 7) == list("abcde")


def test_lower_numbers_go_first_and_equal_ones_by_arrival() -> None:
    queue = queue_of(*(cursor(name, priority=p) for name, p in (("a", 5), ("b", -1), ("c", 5), ("d", 0), ("e", -1))))
    assert drained(queue) == ["b", "e", "d", "a", "c"]


def test_a_preempted_request_goes_first_among_its_priority_and_no_further() -> None:
    queue = queue_of(cursor("a"), cursor("urgent", priority=-1), cursor("b"))
    for name in ("newer", "older"):
        preempted = cursor(name)
        queue.tenants.opened("")
        queue.put_back(preempted)
    assert drained(queue) == ["urgent", "older", "newer", "a", "b"]


def test_tenants_take_turns_by_what_was_computed_for_them() -> None:
    queue = queue_of(*(cursor(f"a{i}", tenant="a") for i in range(4)), *(cursor(f"b{i}", tenant="b") for i in range(2)))
    assert drained(queue, 10) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_fairness_comes_before_priority() -> None:
    first = cursor("first", tenant="a")
    queue = queue_of(first, cursor("urgent", tenant="a", priority=-1), cursor("b", tenant="b", priority=9))
    queue.tenants.charge("a", 1000)
    assert drained(queue) == ["b", "urgent", "first"]


def test_a_preempted_request_of_another_tenant_goes_before_every_priority() -> None:
    """Its turn has come already; a better priority of its own tenant goes before it all the same."""
    queue = queue_of(cursor("urgent", tenant="a", priority=-1), cursor("b", tenant="b"))
    preempted = cursor("preempted", tenant="b")
    queue.tenants.opened("b")
    queue.put_back(preempted)
    queue.tenants.charge("b", 1000)
    assert drained(queue) == ["preempted", "urgent", "b"]
    queue.put_back(preempted)
    queue.tenants.opened("b")
    queue.add(cursor("better", tenant="b", priority=-1))
    assert drained(queue) == ["better", "preempted"]


def test_who_comes_back_has_saved_nothing_up() -> None:
    queue = queue_of(*(cursor(f"a{i}", tenant="a") for i in range(3)))
    queue.tenants.opened("b")
    queue.tenants.charge("a", 100)
    for i in range(3):
        queue.tenants.opened("b")
        queue.add(cursor(f"b{i}", tenant="b"))
    assert queue.tenants.served("b") == 100
    assert drained(queue, 10) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_idle_tenants_are_forgotten() -> None:
    scheduler = Scheduler(limits())
    for i in range(1000):
        scheduler.add(request(f"r{i}", [1], tenant=f"tenant {i}"))
        scheduler.abort(f"r{i}")
    assert len(scheduler.waiting.tenants) == 0 and len(scheduler.waiting) == 0 and not scheduler.waiting._queues


@pytest.mark.parametrize("priority", [-(2**31) - 1, 2**31])
def test_a_priority_is_a_number_of_32_bits(priority: int) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(InvalidRequest, match="priority") as refusal:
        scheduler.add(request("r", [1], priority=priority))
    assert refusal.value.param == "priority"
    for i, extreme in enumerate((-(2**31), 2**31 - 1)):
        scheduler.add(request(f"r{i}", [1], priority=extreme))


def test_nobody_runs_or_stops_running_for_a_later_priority() -> None:
    simulation = Simulation(limits(max_num_seqs=1))
    simulation.add(request("low", [1, 2], 10, priority=9), request("later", [3], 2, priority=9))
    simulation.step()
    simulation.add(request("high", [4], 2, priority=-9))
    simulation.run()
    assert simulation.admissions() == ["low", "high", "later"]
    assert simulation.scheduler.stats().preemptions == 0


def test_a_preempted_request_comes_back_before_its_equals_and_after_its_betters() -> None:
    simulation = Simulation(limits(max_num_seqs=2))
    simulation.add(request("a", [1] * 5, 30), request("b", [2] * 5, 30), request("c", [3] * 5, 3))
    simulation.step()
    simulation.scheduler._preempt(simulation.scheduler.cursors["b"])
    simulation.add(request("urgent", [4], 3, priority=-1))
    simulation.run()
    assert simulation.admissions() == ["a", "b", "urgent", "b", "c"]


def test_scored_prompts_that_have_no_room_let_others_pass() -> None:
    simulation = Simulation(
        limits(max_model_len=1000, num_blocks=1000, max_num_batched_tokens=2000, max_prefill_chunk=1000)
    )
    long = MAX_PROMPT_LOGPROBS + 50
    simulation.add(
        request("first", [1] * long, 2, prompt_logprobs=0),
        request("second", [2] * 20, 2, prompt_logprobs=0),
        request("plain", [3] * long, 2),
    )
    simulation.step()
    assert simulation.admissions() == ["first", "plain"]
    assert [row.count for row in simulation.plans[0].rows] == [MAX_PROMPT_LOGPROBS, long]
    simulation.step()
    assert simulation.admissions() == ["first", "plain", "second"]
    simulation.run()


class Bare:
    """A scheduler and the smallest worker there can be; it counts the tokens computed for each tenant."""

    def __init__(self, shape: Limits) -> None:
        self.scheduler = Scheduler(shape)
        self.served: Counter[str] = Counter()
        self.admitted: list[str] = []
        self.ended: set[str] = set()

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        assert plan is not None
        owners = {one.row: one for one in scheduler.running}
        self.admitted += [owners[admission.row].id for admission in plan.admit]
        for row in plan.rows:
            self.served[owners[row.row].tenant] += row.count
        result = StepResult(plan.step_id, [[Sampled(1)] for row in plan.rows if row.samples])
        self.ended |= {event.request_id for event in scheduler.apply(plan, result).events if event.finish}


@settings(max_examples=20 * EFFORT)
@given(
    rows=st.integers(1, 8), chunk=st.integers(4, 40), loads=st.lists(st.integers(1, 10), min_size=2, max_size=5),
    priorities=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)  # fmt: skip
@example(rows=4, chunk=32, loads=[7, 1], priorities=[[-1, 0, -2, 1], [0, 1], [0], [0], [0]], seed=166)
def test_a_greedy_tenant_gets_its_share_and_no_more(
    rows: int, chunk: int, loads: list[int], priorities: list[list[int]], seed: int
) -> None:
    """The bound: while both always have somebody waiting, what two tenants got differs by at most what the rows can
    hold, max_num_seqs * max_model_len tokens, however many requests each of them has, and of whatever priority."""
    rnd = random.Random(seed)
    shape = limits(max_num_seqs=rows, max_prefill_chunk=chunk, num_blocks=rows * 16 + 1, enable_prefix_caching=False)
    bare = Bare(shape)
    queued = {f"t{i}": 10 * load for i, load in enumerate(loads)}
    arrivals = 0
    asked: dict[str, int] = {}
    for _ in range(400):
        waiting = Counter(one.tenant for one in bare.scheduler.waiting)
        for tenant, depth in queued.items():
            while waiting[tenant] < depth:
                prompt = [1] * rnd.randint(1, 40)
                priority = rnd.choice(priorities[int(tenant[1:])])
                details = {"tenant": tenant, "priority": priority}
                bare.scheduler.add(request(f"{tenant} {arrivals}", prompt, rnd.randint(1, 20), **details))
                asked[f"{tenant} {arrivals}"] = priority
                waiting[tenant] += 1
                arrivals += 1
        bare.step()
        assert max(bare.served[t] for t in queued) - min(bare.served[t] for t in queued) <= rows * shape.max_model_len
    for tenant in queued:
        for priority in {*priorities[int(tenant[1:])]}:
            own = [
                int(name.split()[1]) for name in bare.admitted if name.split()[0] == tenant and asked[name] == priority
            ]
            assert own == sorted(own), "a tenant's requests of one priority changed places"
        best = min(asked[one.id] for one in bare.scheduler.waiting if one.tenant == tenant)
        waits = min(one.arrival for one in bare.scheduler.waiting if one.tenant == tenant and asked[one.id] == best)
        later = [name for name in bare.admitted if name.split()[0] == tenant and int(name.split()[1]) > waits]
        assert all(asked[name] <= best for name in later), "a tenant's worse priority went before its better"
    check_integrity(bare.scheduler)


def test_ten_thousand_requests_of_a_hundred_tenants() -> None:
    """One tenant sends half of them, at once. Nobody else waits behind them: another's request is admitted before
    the great tenant has got more than its bound."""
    shape = limits(max_num_seqs=32, num_blocks=32 * 16 + 1, max_num_batched_tokens=256, max_prefill_chunk=64)
    bare = Bare(shape)
    rnd = random.Random(0)
    asked: deque[Request] = deque()
    for i in range(10_000):
        tenant = "great" if i < 5000 else f"small {i % 100}"
        prompt = [rnd.randrange(50)] * rnd.randint(1, 20)
        asked.append(request(f"{tenant}/{i}", prompt, rnd.randint(1, 6), tenant=tenant))
    for one in asked:
        bare.scheduler.add(one)
    steps = 0
    while len({name.split("/")[0] for name in bare.admitted}) < 101:
        bare.step()
        steps += 1
    assert steps < 40, "a small tenant's first request waited behind the great one's"
    while len(bare.scheduler.waiting.tenants) > 1:
        bare.step()
        small = max(served for tenant, served in bare.served.items() if tenant != "great")
        assert bare.served["great"] - small <= 32 * 64
    while bare.scheduler.has_work:
        bare.step()
    assert len(bare.ended) == 10_000 and len(bare.scheduler.waiting.tenants) == 0
    check_integrity(bare.scheduler)
