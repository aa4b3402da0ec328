"""Blocks: the order of the free list, the counting of holders, and what the prefix cache may find."""

from __future__ import annotations

import pytest

from weft.scheduler.block_pool import BlockPool


def ids(blocks) -> list[int]:
    return [block.id for block in blocks]


def test_the_block_let_go_longest_ago_is_reused_first() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block in (b, c, a):
        pool.release([block])
    assert ids(pool.allocate(3)) == [b.id, c.id, a.id]


def test_a_chain_is_freed_tail_first_so_that_its_head_survives_longest() -> None:
    pool = BlockPool(6)
    chain = pool.allocate(3)
    pool.release(chain)
    others = [block_id for block_id in range(1, 6) if block_id not in ids(chain)]
    assert ids(pool.free) == others + ids(reversed(chain))


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    for _ in range(3):
        taken = pool.allocate(pool.num_free)
        assert ids(taken).count(0) == 0 and len(taken) == pool.num_usable == 4
        pool.release(taken)


def test_taking_more_than_is_free_is_refused_and_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="2 blocks asked, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert block.refs == 1 and block not in list(pool.free)
    pool.release([block])
    assert block.refs == 0 and list(pool.free).count(block) == 1


def test_sharing_a_free_cached_block_takes_it_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(6)
    taken = pool.allocate(5)
    pool.remember(taken[2], b"key")
    pool.release(taken)
    pool.share(taken[2])
    assert ids(pool.free) == [5, 4, 2, 1] and pool.num_free == 4
    assert 3 not in ids(pool.allocate(4)), "a block in use was handed out"


def test_a_block_released_twice_is_refused() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(RuntimeError, match="released more often than it was taken"):
        pool.release([block])
    assert pool.num_free == 2


def test_a_free_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.remember(block, b"key")
    pool.release([block])
    assert pool.by_key[b"key"] is block
    pool.allocate(2)
    assert pool.by_key == {} and block.key is None


def test_the_second_block_of_the_same_content_stays_unknown() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.remember(first, b"key")
    pool.remember(second, b"key")
    assert pool.by_key[b"key"] is first and second.key is None


def test_reusing_a_block_keeps_another_blocks_mapping_of_the_same_key() -> None:
    """G4: the duplicate is evicted; the block that owns the key must still be found."""
    pool = BlockPool(3)
    owner, duplicate = pool.allocate(2)
    pool.remember(owner, b"key")
    pool.remember(duplicate, b"key")
    duplicate.key = b"key"  # As if it had been known under the key as well, by whatever way.
    pool.release([duplicate])
    assert pool.allocate(1) == [duplicate]
    assert pool.by_key[b"key"] is owner and owner.key == b"key" and duplicate.key is None


def test_a_known_block_is_not_known_under_a_second_key() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, b"one")
    pool.remember(block, b"two")
    assert pool.by_key == {b"one": block} and block.key == b"one"


def test_forgetting_all_leaves_every_block_where_it_is() -> None:
    pool = BlockPool(4)
    held, let_go = pool.allocate(2)
    pool.remember(held, b"one")
    pool.remember(let_go, b"two")
    pool.release([let_go])
    pool.forget_all()
    assert pool.by_key == {} and held.key is None and let_go.key is None
    assert held.refs == 1 and pool.num_free == 2


def test_cells_count_blocks_in_use_and_free_ones_that_are_cached() -> None:
    pool = BlockPool(11)
    taken = pool.allocate(6)
    for number, block in enumerate(taken):
        pool.remember(block, bytes([number]))
    pool.release(taken[3:])
    assert pool.cells(0, 10, 1) == ([1, 1, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0, 0, 0])
    assert pool.cells(0, 3, 4) == ([3, 0, 0], [1, 2, 0]), "the last cell has two blocks"
    assert pool.cells(4, 2, 2) == ([0, 0], [2, 0])
    pool.forget_all()
    assert pool.cells(0, 2, 5) == ([3, 0], [0, 0])
