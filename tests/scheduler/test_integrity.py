"""`check_integrity` notices damage: each test does one kind to a scheduler in the middle of its work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scheduler.simulation import Simulation, limits, request
from weft.scheduler.integrity import IntegrityError, check_integrity
from weft.scheduler.scheduler import Scheduler


@pytest.fixture
def scheduler() -> Scheduler:
    """Two requests run ("a" decodes, "b" shares a's prefix), "c" waits for a row and "d" for "c"; some free blocks
    are cached."""
    simulation = Simulation(limits(max_num_seqs=2))
    simulation.add(request("before", [9] * 20, 2))
    simulation.run()
    simulation.add(request("a", [1] * 13, 20))
    simulation.step()
    simulation.add(request("b", [1] * 40, 20), request("c", [3] * 5, 4))
    simulation.add(request("d", [3] * 5, 4, sibling_of="c", tenant="other"))
    simulation.step()
    scheduler = simulation.scheduler
    assert [c.id for c in scheduler.running] == ["a", "b"] and [c.id for c in scheduler.waiting] == ["c"]
    assert [c.id for c in scheduler.siblings] == ["d"]
    check_integrity(scheduler)
    return scheduler


def leaked_block(scheduler: Scheduler) -> None:
    scheduler.pool.free.popleft()


def block_taken_for_nobody(scheduler: Scheduler) -> None:
    scheduler.pool.allocate(1)


def block_lost_by_its_holder(scheduler: Scheduler) -> None:
    scheduler.running[0].blocks.pop()


def one_reference_too_many(scheduler: Scheduler) -> None:
    scheduler.running[0].blocks[0].refs += 1


def block_held_by_two_and_counted_once(scheduler: Scheduler) -> None:
    scheduler.running[1].blocks.append(scheduler.running[0].blocks[-1])


def block_twice_in_one_table(scheduler: Scheduler) -> None:
    scheduler.running[0].blocks.append(scheduler.running[0].blocks[0])


def block_in_use_and_free(scheduler: Scheduler) -> None:
    scheduler.pool.free.append(scheduler.running[0].blocks[0])


def block_released_under_its_holder(scheduler: Scheduler) -> None:
    scheduler.pool.release(scheduler.running[0].blocks[-1:])


def null_block_in_use(scheduler: Scheduler) -> None:
    scheduler.running[0].blocks.append(scheduler.pool.blocks[0])


def null_block_free(scheduler: Scheduler) -> None:
    scheduler.pool.free.append(scheduler.pool.blocks[0])


def free_list_that_miscounts(scheduler: Scheduler) -> None:
    scheduler.pool.free._length += 1


def block_found_under_anothers_key(scheduler: Scheduler) -> None:
    one, other, *_ = scheduler.pool.by_key
    scheduler.pool.by_key[one] = scheduler.pool.by_key[other]


def block_with_another_key(scheduler: Scheduler) -> None:
    next(iter(scheduler.pool.by_key.values())).key = b"another"


def reused_block_still_found(scheduler: Scheduler) -> None:
    next(iter(scheduler.pool.by_key.values())).key = None


def request_in_both_queues(scheduler: Scheduler) -> None:
    scheduler.waiting.add(scheduler.running[0])


def request_waits_twice(scheduler: Scheduler) -> None:
    scheduler.waiting.put_back(scheduler.cursors["c"])


def request_runs_twice(scheduler: Scheduler) -> None:
    scheduler.running.append(scheduler.running[0])


def request_in_no_queue(scheduler: Scheduler) -> None:
    scheduler.waiting.remove(scheduler.cursors["c"])


def sibling_in_no_place(scheduler: Scheduler) -> None:
    scheduler.siblings.remove(scheduler.cursors["d"])


def sibling_waits_and_is_queued(scheduler: Scheduler) -> None:
    scheduler.waiting.add(scheduler.cursors["d"])


def request_waits_for_a_sibling_that_it_has_not(scheduler: Scheduler) -> None:
    cursor = scheduler.cursors["c"]
    scheduler.waiting.remove(cursor)
    scheduler.siblings.add(cursor)


def preempted_request_waits_for_a_sibling(scheduler: Scheduler) -> None:
    """It would never be admitted if its leader went before."""
    scheduler.cursors["d"].preemptions = 1


def queue_that_miscounts(scheduler: Scheduler) -> None:
    scheduler.waiting._length += 1


def queue_that_miscounts_tokens(scheduler: Scheduler) -> None:
    """Steps would be larger, or smaller, than the queue is deep."""
    scheduler.waiting.num_tokens += 1


def tenant_that_is_never_forgotten(scheduler: Scheduler) -> None:
    scheduler.waiting.tenants.opened("nobody")


def tenant_forgotten_too_early(scheduler: Scheduler) -> None:
    scheduler.waiting.tenants.closed("other")


def tenant_said_to_wait(scheduler: Scheduler) -> None:
    """It would be asked for a request that it has not."""
    scheduler.waiting.tenants.queued("other")


def shares_more_than_is_computed(scheduler: Scheduler) -> None:
    scheduler.running[0].settled = scheduler.running[0].computed + 1


def ended_request_still_waits(scheduler: Scheduler) -> None:
    del scheduler.cursors["c"]


def ended_request_still_runs(scheduler: Scheduler) -> None:
    del scheduler.cursors["a"]


def waiting_request_has_a_row(scheduler: Scheduler) -> None:
    scheduler.cursors["c"].row = 1


def waiting_request_has_computed_tokens(scheduler: Scheduler) -> None:
    scheduler.cursors["c"].computed = 4


def waiting_request_holds_blocks(scheduler: Scheduler) -> None:
    scheduler.cursors["c"].blocks = scheduler.pool.allocate(1)


def more_computed_than_the_blocks_hold(scheduler: Scheduler) -> None:
    cursor = scheduler.running[1]
    cursor.computed = len(cursor.blocks) * 4 + 1


def more_computed_than_known(scheduler: Scheduler) -> None:
    cursor = scheduler.running[0]
    cursor.computed = cursor.known + 1


def more_known_than_the_request_may_have(scheduler: Scheduler) -> None:
    scheduler.running[0].tokens += [1] * 30


def limit_beyond_the_context(scheduler: Scheduler) -> None:
    scheduler.running[0].limit = 65


def lost_row(scheduler: Scheduler) -> None:
    scheduler.running[0].row = -1


def row_with_two_owners(scheduler: Scheduler) -> None:
    scheduler.running[0].row = scheduler.running[1].row


def row_in_use_and_free(scheduler: Scheduler) -> None:
    scheduler.free_rows.append(scheduler.running[0].row)


def row_that_does_not_exist(scheduler: Scheduler) -> None:
    scheduler.running[0].row = 2


# Damage that is neither to a block's references nor to a request's place, and that stops or falsifies answers.


def block_keeps_a_key_that_finds_nothing(scheduler: Scheduler) -> None:
    """Such a block can never be made findable again while it is held."""
    key = next(iter(scheduler.pool.by_key))
    del scheduler.pool.by_key[key]


def null_block_is_found(scheduler: Scheduler) -> None:
    """Somebody would read the padding of others as a cached prefix."""
    null = scheduler.pool.blocks[0]
    null.key = b"padding"
    scheduler.pool.by_key[b"padding"] = null


def request_filed_under_anothers_id(scheduler: Scheduler) -> None:
    """Its abort would not find it."""
    scheduler.cursors["nobody"] = scheduler.cursors.pop("a")


def request_said_to_have_ended_still_runs(scheduler: Scheduler) -> None:
    """Its results would be thrown away for ever."""
    scheduler.running[0].ended = True


def waiting_request_expects_a_token_of_no_step(scheduler: Scheduler) -> None:
    """It would never be admitted, nor anybody behind it."""
    scheduler.cursors["c"].pending = 1


def running_request_expects_a_token_of_no_step(scheduler: Scheduler) -> None:
    """The worker would be asked for a token that nobody sampled."""
    scheduler.running[0].pending += 1


DAMAGES = [
    leaked_block,
    block_taken_for_nobody,
    block_lost_by_its_holder,
    one_reference_too_many,
    block_held_by_two_and_counted_once,
    block_twice_in_one_table,
    block_in_use_and_free,
    block_released_under_its_holder,
    null_block_in_use,
    null_block_free,
    free_list_that_miscounts,
    block_found_under_anothers_key,
    block_with_another_key,
    reused_block_still_found,
    request_in_both_queues,
    request_waits_twice,
    request_runs_twice,
    request_in_no_queue,
    sibling_in_no_place,
    sibling_waits_and_is_queued,
    request_waits_for_a_sibling_that_it_has_not,
    preempted_request_waits_for_a_sibling,
    queue_that_miscounts,
    queue_that_miscounts_tokens,
    tenant_that_is_never_forgotten,
    tenant_forgotten_too_early,
    tenant_said_to_wait,
    shares_more_than_is_computed,
    ended_request_still_waits,
    ended_request_still_runs,
    waiting_request_has_a_row,
    waiting_request_has_computed_tokens,
    waiting_request_holds_blocks,
    more_computed_than_the_blocks_hold,
    more_computed_than_known,
    more_known_than_the_request_may_have,
    limit_beyond_the_context,
    lost_row,
    row_with_two_owners,
    row_in_use_and_free,
    row_that_does_not_exist,
    block_keeps_a_key_that_finds_nothing,
    null_block_is_found,
    request_filed_under_anothers_id,
    request_said_to_have_ended_still_runs,
    waiting_request_expects_a_token_of_no_step,
    running_request_expects_a_token_of_no_step,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_noticed(scheduler: Scheduler, damage: Callable[[Scheduler], None]) -> None:
    damage(scheduler)
    with pytest.raises(IntegrityError):
        check_integrity(scheduler)


def test_a_scheduler_at_work_is_whole(scheduler: Scheduler) -> None:
    assert scheduler.pool.by_key and any(block.refs == 2 for block in scheduler.pool.blocks)
    check_integrity(scheduler)


def test_a_scheduler_with_a_step_under_way_is_whole(scheduler: Scheduler) -> None:
    assert scheduler.schedule() is not None
    check_integrity(scheduler)


def test_a_new_scheduler_is_whole() -> None:
    check_integrity(Scheduler(limits()))
