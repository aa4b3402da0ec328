"""The prefix cache: what is found again, by whom, and that a hit never changes an answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.scheduler.simulation import VOCAB, Simulation, expected_output, limits, request
from weft.plan import Limits
from weft.scheduler.block_pool import BlockPool
from weft.scheduler.cursors import KeyChain, block_key, root_key
from weft.scheduler.prefix_cache import find_prefix
from weft.types import Adapter, Request

LONG = [(i * 7 + i // 50) % VOCAB for i in range(1000)]


def long_context() -> Limits:
    return limits(block_size=16, max_model_len=2048, num_blocks=400, max_num_batched_tokens=512, max_prefill_chunk=256)


@dataclass
class Cost:
    computed: int
    cached: int


def serve(simulation: Simulation, asked: Request) -> Cost:
    """Run one request to its end, check its answer, and say what the worker computed for it."""
    before, first_event = simulation.worker.computed, len(simulation.events)
    simulation.add(asked)
    simulation.run()
    max_model_len = simulation.scheduler.limits.max_model_len
    assert simulation.outputs[asked.request_id] == expected_output(asked, max_model_len)
    cached = simulation.events[first_event].cached_tokens
    assert cached is not None
    return Cost(simulation.worker.computed - before, cached)


# Keys.


def test_a_key_depends_on_parent_and_tokens() -> None:
    root = root_key("")
    keys = {
        block_key(root, [1, 2]),
        block_key(root, [2, 1]),
        block_key(root, [1, 3]),
        block_key(block_key(root, [1, 2]), [1, 2]),
    }
    assert len(keys) == 4 and block_key(root, [1, 2]) in keys


def test_a_root_depends_on_salt_and_adapter() -> None:
    one, later = (Adapter(name="a", number=number, path="/a") for number in (1, 2))
    roots = {root_key(""), root_key("a"), root_key("", one), root_key("a", one), root_key("", later), root_key("', 1")}
    assert len(roots) == 6, "a name may be another adapter's later"


def test_what_was_computed_with_an_adapter_is_for_that_adapter_alone() -> None:
    simulation = Simulation(long_context())
    adapters = [None, *(Adapter(name=name, number=i, path=f"/{name}") for i, name in enumerate(("a", "b"), 1))]
    for turn in range(2):
        for number, adapter in enumerate(adapters):
            asked = replace(request(f"{turn}-{number}", LONG, 4), adapter=adapter)
            assert serve(simulation, asked).cached == (992 if turn else 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [([1, 23], [12, 3]), ([1, 2, 3], [1, 23]), ([256], [0, 1]), ([1, 0], [1]), ([0], [0, 0])],
)
def test_where_a_token_ends_is_part_of_the_key(one: list[int], other: list[int]) -> None:
    assert block_key(root_key(""), one) != block_key(root_key(""), other)


def test_a_chain_gives_the_same_keys_whether_its_tokens_came_at_once_or_one_by_one() -> None:
    whole = KeyChain(root_key(""), 4)
    grown = KeyChain(root_key(""), 4)
    for length in range(4, 13, 4):
        grown.of(LONG[:length], length // 4 - 1)
    assert [whole.of(LONG, i) for i in range(3)] == [grown.of(LONG[:12], i) for i in range(3)]


def test_the_longest_chain_ends_at_its_first_gap() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"0", b"1", b"3"), strict=True):
        pool.remember(block, key)
    assert find_prefix(pool, [b"0", b"1", b"2", b"3"]) == blocks[:2]


# Requests.


def test_a_second_request_computes_only_what_follows_the_shared_prefix() -> None:
    simulation = Simulation(long_context())
    first = serve(simulation, request("first", [*LONG, 1, 2, 3], 8))
    second = serve(simulation, request("second", [*LONG, *range(20)], 8))
    shared = 1000 // 16 * 16
    assert first == Cost(computed=1003 + 7, cached=0)
    assert second == Cost(computed=1020 - shared + 7, cached=shared)
    stats = simulation.scheduler.stats()
    assert stats.computed_tokens == simulation.worker.computed == first.computed + second.computed
    assert (stats.prefix_queries, stats.prefix_hits) == (1003 + 1020, shared)
    assert stats.prompt_tokens == 1003 + 1020


def test_requests_of_different_salts_share_nothing() -> None:
    simulation = Simulation(long_context())
    serve(simulation, request("first", LONG, 4, salt="a"))
    assert serve(simulation, request("other salt", LONG, 4, salt="b")) == Cost(computed=1003, cached=0)
    assert serve(simulation, request("no salt", LONG, 4)) == Cost(computed=1003, cached=0)
    assert serve(simulation, request("same salt", LONG, 4, salt="a")).cached == 992


def test_a_prefix_is_shared_while_its_first_holder_still_runs() -> None:
    simulation = Simulation(limits())
    first, second = request("first", LONG[:16], 30), request("second", [*LONG[:16], 1], 4)
    simulation.add(first)
    simulation.step()
    simulation.add(second)
    simulation.step()
    holders = [{block.id for block in cursor.blocks} for cursor in simulation.scheduler.running]
    assert len(holders[0] & holders[1]) == 4
    simulation.run()
    assert simulation.outputs["first"] == expected_output(first, 64)
    assert simulation.outputs["second"] == expected_output(second, 64)


@pytest.mark.parametrize("length", [4, 16, 32])
def test_a_wholly_cached_prompt_of_full_blocks_still_computes_its_last_token(length: int) -> None:
    """C8: nothing new to compute must not mean nothing is computed, and the request waits for ever."""
    simulation = Simulation(limits())
    serve(simulation, request("first", LONG[:length], 3))
    again = serve(simulation, request("again", LONG[:length], 3))
    assert again.cached == length - 4
    rows = simulation.rows_of("again")
    assert (rows[0].start, rows[0].count, rows[0].samples) == (length - 4, 4, True)
    assert simulation.ends["again"].finish is not None


def test_cached_tokens_are_reported_once_on_the_first_event() -> None:
    simulation = Simulation(limits())
    serve(simulation, request("first", LONG[:20], 5))
    seen = len(simulation.events)
    serve(simulation, request("second", LONG[:20], 5))
    assert [event.cached_tokens for event in simulation.events[seen:]] == [16, None, None, None, None]


def test_a_request_that_missed_the_cache_says_zero() -> None:
    simulation = Simulation(limits())
    serve(simulation, request("first", LONG[:20], 2))
    assert [event.cached_tokens for event in simulation.events] == [0, None]


def test_tokens_found_after_a_preemption_are_not_reported_as_cached() -> None:
    simulation = Simulation(limits(num_blocks=17))
    simulation.add(*(request(f"r{i}", [i] * 9, 40) for i in range(3)))
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    assert simulation.scheduler.stats().prefix_hits == 0
    assert sorted(event.cached_tokens for event in simulation.events if event.cached_tokens is not None) == [0, 0, 0]


def test_the_answer_is_found_again_by_the_next_turn() -> None:
    simulation = Simulation(limits())
    prompt = LONG[:10]
    serve(simulation, request("turn 1", prompt, 13))
    answer = simulation.outputs["turn 1"]
    second = serve(simulation, request("turn 2", [*prompt, *answer, 1, 2, 3], 4))
    # 22 of the 23 tokens were computed: the last sampled one never was. They fill 5 blocks of 4.
    assert second == Cost(computed=26 - 20 + 3, cached=20)


def test_cached_blocks_give_way_to_a_request_that_needs_them() -> None:
    simulation = Simulation(limits(num_blocks=17))
    serve(simulation, request("first", LONG[:40], 4))
    assert simulation.scheduler.pool.by_key
    large = serve(simulation, request("large", [1] * 60, 4))
    assert large.computed == 63
    assert serve(simulation, request("first again", LONG[:40], 4)).cached == 0


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    simulation = Simulation(limits(num_blocks=17))
    serve(simulation, request("first", LONG[:40], 1))
    serve(simulation, request("other", [1] * 39, 1))
    # 16 blocks: 10 were the first's, 10 the other's; the 4 that had to be reused were its tail.
    assert serve(simulation, request("again", LONG[:40], 1)).cached == 6 * 4


def test_a_prefix_that_was_used_again_outlives_one_that_was_not() -> None:
    simulation = Simulation(limits(num_blocks=17))
    kept, lost = LONG[:17], LONG[100:117]
    for name, prompt in (("kept", kept), ("lost", lost), ("kept again", kept)):
        serve(simulation, request(name, prompt, 1))
    serve(simulation, request("newcomer", [1] * 41, 1))
    assert serve(simulation, request("kept at last", kept, 1)).cached == 16
    assert serve(simulation, request("lost at last", lost, 1)).cached == 0


def test_nothing_is_found_with_prefix_caching_off() -> None:
    simulation = Simulation(limits(enable_prefix_caching=False))
    serve(simulation, request("first", LONG[:20], 4))
    assert serve(simulation, request("second", LONG[:20], 4)) == Cost(computed=23, cached=0)
    assert not simulation.scheduler.pool.by_key
    assert simulation.scheduler.stats().prefix_hits == 0


def test_a_block_is_not_found_before_the_step_that_fills_it_was_read() -> None:
    simulation = Simulation(limits(), delay=1)
    simulation.add(request("first", LONG[:16], 4))
    simulation.step()
    simulation.add(request("second", [*LONG[:16], 1], 4))
    simulation.step()
    assert simulation.rows_of("second")[0].start == 0
    simulation.run()
    assert simulation.outputs["second"] == expected_output(request("second", [*LONG[:16], 1], 4), 64)


def test_blocks_of_broken_logits_are_not_found_again() -> None:
    """A step whose logits were no numbers may have left no numbers in the cache. Whoever asks the same again must
    not read those blocks, or one fault ends every later request that begins alike."""
    simulation = Simulation(limits())
    prompt = [*[1, 2, 3] * 4, 49]
    simulation.worker.broken = {49}
    simulation.add(request("broken", prompt, 4))
    simulation.run()
    assert simulation.ends["broken"].error
    simulation.worker.broken = set()
    assert serve(simulation, request("again", prompt, 4)).cached == 0
