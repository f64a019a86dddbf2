"""The block pool: states of a block, order of reuse, errors that change nothing."""

from __future__ import annotations

import pytest

from kvern.cache.block_pool import NULL_BLOCK, BlockPool


def pool_with_content(num_blocks: int) -> tuple[BlockPool, set[int]]:
    hashed: set[int] = set()
    return BlockPool(num_blocks, hashed.__contains__, hashed.discard), hashed


def test_new_pool_gives_blocks_in_ascending_order_and_never_the_null_block() -> None:
    pool = BlockPool(6)
    assert (pool.num_free, pool.num_usable) == (5, 5)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0 and pool.free_blocks() == []


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_pool_needs_a_block_beside_the_null_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(num_blocks)


def test_too_much_asked_for_changes_nothing() -> None:
    pool, hashed = pool_with_content(4)
    hashed.update(pool.allocate(2))
    pool.free([2, 1])
    before = pool.free_blocks()
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    assert pool.free_blocks() == before and hashed == {1, 2} and pool.ref_count == [0] * 4


def test_blocks_without_content_are_reused_first_then_the_least_recently_used() -> None:
    pool, hashed = pool_with_content(7)
    first, second = pool.allocate(3), pool.allocate(2)
    hashed.update([*first[:2], *second])
    pool.free(reversed(first))  # tail first: 3 has no content, then 2, 1
    pool.free(reversed(second))
    assert set(pool.free_blocks()[:2]) == {3, 6}
    assert pool.free_blocks()[2:] == [2, 1, 5, 4]
    pool.allocate(3)
    assert hashed == {1, 4, 5}  # 2 lost its content when it was handed out, and only then


def test_touch_brings_a_free_block_back_and_shares_a_held_one() -> None:
    pool, hashed = pool_with_content(4)
    hashed.update(pool.allocate(2))
    pool.free([2])
    pool.touch([1, 2])
    assert pool.ref_count == [0, 2, 1, 0] and pool.num_free == 1 and hashed == {1, 2}
    pool.free([1])
    assert pool.ref_count[1] == 1 and 1 not in pool.free_blocks()


def test_touched_block_goes_to_the_end_of_the_order() -> None:
    pool, hashed = pool_with_content(4)
    hashed.update(pool.allocate(3))
    pool.free([1, 2, 3])
    pool.touch([1])
    pool.free([1])
    assert pool.free_blocks() == [2, 3, 1]


def test_null_blocks_in_a_table_are_passed_over() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.free([NULL_BLOCK, 1, NULL_BLOCK])
    assert pool.num_free == 2 and pool.ref_count[NULL_BLOCK] == 0 and NULL_BLOCK not in pool.free_blocks()


def test_allocating_nothing_and_everything() -> None:
    pool = BlockPool(3)
    assert pool.allocate(0) == [] and pool.num_free == 2
    pool.free(pool.allocate(2))
    assert sorted(pool.allocate(2)) == [1, 2]


def test_num_free_of_counts_what_a_touch_would_cost() -> None:
    pool, hashed = pool_with_content(5)
    hashed.update(pool.allocate(3))
    pool.free([2, 3])
    before = pool.num_free
    assert pool.num_free_of([1, 2, 3]) == 2
    pool.touch([1, 2, 3])
    assert before - pool.num_free == 2
