"""Siblings: several answers to one prompt, which is computed once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import EFFORT
from tests.scheduler.simulation import VOCAB, Simulation, expected_output, limits, request
from weft.errors import InvalidRequest
from weft.plan import Limits
from weft.scheduler.scheduler import Scheduler
from weft.types import Adapter, FinishReason, Request

PROMPT = [(7 * i + i // 50) % VOCAB for i in range(500)]
BOTH = pytest.mark.parametrize("caching", [True, False])


def roomy(**changes: object) -> Limits:
    chosen = {
        "num_blocks": 2000, "max_model_len": 600, "max_num_seqs": 128, "max_num_batched_tokens": 512,
        "max_prefill_chunk": 200,
    } | changes  # fmt: skip
    return limits(**chosen)


def family(count: int, prompt: list[int], max_tokens: int = 6) -> list[Request]:
    """A leader and its siblings."""
    leader = request("0", prompt, max_tokens)
    return [leader, *(request(str(i), prompt, max_tokens, sibling_of="0") for i in range(1, count))]


def assert_answers(simulation: Simulation, *asked: Request) -> None:
    for one in asked:
        assert simulation.outputs[one.request_id] == expected_output(one, simulation.scheduler.limits.max_model_len)


@BOTH
@pytest.mark.parametrize("delay", [0, 1])
def test_128_siblings_compute_their_prompt_once(caching: bool, delay: int) -> None:
    simulation = Simulation(roomy(enable_prefix_caching=caching), delay)
    asked = family(128, PROMPT)
    simulation.add(*asked)
    simulation.run()
    assert_answers(simulation, *asked)
    # Blocks of 4: of 500 tokens the last 4 are everybody's own, and so are the answers' tokens but the last.
    stats = simulation.scheduler.stats()
    assert stats.computed_tokens == simulation.worker.computed == 500 + 127 * 4 + 128 * 5
    assert stats.prompt_tokens == 500
    assert [event.cached_tokens for event in simulation.events if event.cached_tokens] == [496] * 127


@BOTH
def test_more_siblings_than_rows(caching: bool) -> None:
    simulation = Simulation(roomy(enable_prefix_caching=caching, max_num_seqs=3))
    # Their answers are of different lengths: at any time one of the family runs, whose prompt the next one shares.
    asked = [request("0", PROMPT, 9), *(request(str(i), PROMPT, 3 + i % 5, sibling_of="0") for i in range(1, 20))]
    simulation.add(*asked)
    simulation.run()
    assert_answers(simulation, *asked)
    assert simulation.worker.largest_batch == 3
    answers = sum(one.params.max_tokens - 1 for one in asked)
    assert simulation.worker.computed == 500 + 19 * 4 + answers


def test_an_unready_sibling_is_in_nobodys_way_and_comes_before_later_arrivals() -> None:
    simulation = Simulation(limits(max_prefill_chunk=16, max_num_seqs=2, num_blocks=100, max_num_batched_tokens=16))
    simulation.add(*family(3, PROMPT[:40]), request("short", [1, 2], 2))
    simulation.step()
    assert simulation.admissions() == ["0"] and simulation.scheduler.stats().waiting == 3
    simulation.step()
    simulation.step()
    assert simulation.admissions() == ["0", "short"], "the prompt of the leader takes three steps"
    simulation.add(request("later", [3], 2))
    simulation.run()
    assert simulation.admissions() == ["0", "short", "1", "2", "later"]


def test_a_prompt_shorter_than_a_block_is_not_waited_for() -> None:
    simulation = Simulation(limits())
    asked = family(3, [1, 2, 3])
    simulation.add(*asked)
    simulation.step()
    assert simulation.admissions() == ["0", "1", "2"]
    simulation.run()
    assert_answers(simulation, *asked)


@pytest.mark.parametrize("end", ["unknown", "ended", "aborted", "preempted"])
def test_a_sibling_without_a_leader_goes_by_itself(end: str) -> None:
    simulation = Simulation(roomy(enable_prefix_caching=False))
    leader, sibling = family(2, PROMPT, 4)
    if end == "unknown":
        simulation.add(sibling)
    else:
        simulation.add(leader)
        if end == "ended":
            simulation.run()
        simulation.add(sibling)
        if end in ("aborted", "preempted"):
            simulation.step()
            assert list(simulation.scheduler.siblings)
        if end == "aborted":
            simulation.abort("0")
        if end == "preempted":
            simulation.scheduler._preempt(simulation.scheduler.cursors["0"])
    simulation.step()
    assert "1" in simulation.admissions() and simulation.rows_of("1")[0].start == 0
    simulation.run()
    assert_answers(simulation, sibling)


@pytest.mark.parametrize(
    "stranger",
    [
        request("s", PROMPT[:20], sibling_of="0"),
        request("s", PROMPT[:30], salt="x", sibling_of="0"),
        replace(request("s", PROMPT[:30], sibling_of="0"), adapter=Adapter(name="a", number=1, path="/a")),
    ],
)
def test_another_prompt_or_another_salt_or_another_adapter_is_no_sibling(stranger: Request) -> None:
    simulation = Simulation(limits())
    simulation.add(request("0", PROMPT[:30], 4))
    with pytest.raises(InvalidRequest, match="is no sibling of '0'") as refusal:
        simulation.scheduler.add(stranger)
    assert refusal.value.param == "sibling_of"
    simulation.run()


def test_two_that_name_the_same_unknown_leader_share_only_one_prompt_and_salt() -> None:
    """Nobody checked them against each other when they came."""
    simulation = Simulation(roomy(enable_prefix_caching=False))
    asked = [
        request("a", PROMPT[:60], 9, sibling_of="gone"),
        request("b", PROMPT[20:80], 9, sibling_of="gone"),
        request("c", PROMPT[:60], 9, sibling_of="gone", salt="x"),
        request("d", PROMPT[:60], 9, sibling_of="gone"),
    ]
    for one in asked:
        simulation.add(one)
        for _ in range(2):
            simulation.step()
    simulation.run()
    assert [simulation.rows_of(name)[0].start for name in "abcd"] == [0, 0, 0, 56]
    assert_answers(simulation, *asked)


def test_a_resumed_sibling_shares_the_whole_prompt() -> None:
    whole = expected_output(request("0", PROMPT[:40], 9), 600)
    simulation = Simulation(roomy(enable_prefix_caching=False))
    simulation.add(request("0", PROMPT[:40], 9, output=whole[:2]))
    simulation.step()
    simulation.add(request("1", PROMPT[:40], 9, output=whole[:3], sibling_of="0"))
    simulation.run()
    assert simulation.outputs == {"0": whole[2:], "1": whole[3:]}
    assert simulation.rows_of("1")[0].start == 40


def test_shared_blocks_outlive_the_leader() -> None:
    simulation = Simulation(roomy(enable_prefix_caching=False))
    asked = family(4, PROMPT, 20)
    simulation.add(*asked)
    while len(simulation.admissions()) < 4:
        simulation.step()
    shared = simulation.scheduler.cursors["0"].blocks[:124]
    assert {block.refs for block in shared} == {4}
    simulation.abort("0")
    assert {block.refs for block in shared} == {3}
    simulation.run()
    assert_answers(simulation, *asked[1:])


def test_the_order_of_siblings_is_kept_in_a_full_engine() -> None:
    scheduler = Scheduler(limits(max_num_seqs=1, num_blocks=200))
    for one in family(5, PROMPT[:20]):
        scheduler.add(one)
    assert [cursor.id for cursor in scheduler.siblings] == ["1", "2", "3", "4"]
    for _ in range(3):
        scheduler.schedule()
    assert [cursor.id for cursor in scheduler.waiting] == ["1", "2", "3", "4"]


@st.composite
def families(draw: st.DrawFn) -> dict[str, object]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    return {
        "limits": limits(
            block_size=block_size,
            num_blocks=-(-64 // block_size) + 1 + draw(st.integers(0, 20)),
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(6, 40)),
            max_prefill_chunk=draw(st.integers(1, 40)),
            enable_prefix_caching=draw(st.booleans()),
            force_preempt_every=draw(st.sampled_from([0, 0, 3, 7])),
        ),
        "delay": draw(st.integers(0, 2)),
        "abort_share": draw(st.sampled_from([0.0, 0.1, 0.4])),
        "seed": draw(st.integers(0, 2**32)),
    }


@settings(max_examples=35 * EFFORT)
@given(families())
def test_families_end_with_their_own_tokens_whoever_is_aborted(load: dict) -> None:
    rnd = random.Random(load["seed"])
    simulation = Simulation(load["limits"], load["delay"])
    to_come: list[Request] = []
    for number in range(rnd.randint(1, 3)):
        prompt = [rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 50))]
        for i in range(rnd.randint(1, 6)):
            name = f"{number}.{i}"
            leader = f"{number}.{rnd.randrange(i)}" if i else ""
            to_come.append(
                request(name, prompt, rnd.randint(1, 12), sibling_of=leader, tenant=rnd.choice("ab"), stop=True)
            )
    if rnd.random() < 0.3:
        rnd.shuffle(to_come)
    asked, aborted = {one.request_id: one for one in to_come}, set()
    for _ in range(5000):
        while to_come and rnd.random() < 0.6:
            simulation.add(to_come.pop(0))
        if simulation.scheduler.cursors and rnd.random() < load["abort_share"]:
            name = rnd.choice(list(simulation.scheduler.cursors))
            assert simulation.abort(name)
            aborted.add(name)
        if not simulation.step() and not to_come:
            break
    scheduler = simulation.scheduler
    assert not scheduler.has_work and len(scheduler.siblings) == len(scheduler.waiting.tenants) == 0
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    for name, one in asked.items():
        if name not in aborted:
            assert simulation.outputs[name] == expected_output(one, 64)
            assert simulation.ends[name].finish in (FinishReason.STOP, FinishReason.LENGTH)
