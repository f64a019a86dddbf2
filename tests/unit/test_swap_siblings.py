"""Siblings are swapped together: each shared block goes once, and is shared again when they come back."""

from __future__ import annotations

from typing import Any

import pytest

from kvern.cache.block_pool import BlockPool
from kvern.cache.groups import make_group
from kvern.cache.swap import Swapped, SwapSpace
from kvern.cache.tiers import HostTier
from kvern.request import RequestStatus
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens

PROMPT = own_tokens("prompt", 14)  # three full blocks and two tokens of a fourth
SWAPPED, PREEMPTED, RUNNING = RequestStatus.SWAPPED, RequestStatus.PREEMPTED, RequestStatus.RUNNING


def roomy(**config: Any) -> SchedulerHarness:
    return SchedulerHarness(
        **{"num_blocks": 40, "block_size": 4, "preemption": "swap", "host_blocks": 40, "enable_prefix_caching": False}
        | config
    )


def forked(h: SchedulerHarness, steps: int, count: int = 2, max_tokens: int = 9) -> list[str]:
    """Siblings after the prompt's step and `steps` more; with one or more each has its own last block."""
    first = h.add(PROMPT, max_tokens=max_tokens)
    h.step()
    ids = [first, *(h.fork(first) for _ in range(count - 1))]
    for _ in range(steps):
        h.step()
    return ids


def statuses(h: SchedulerHarness, ids: list[str]) -> list[RequestStatus]:
    return [h.request(rid).status for rid in ids]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_siblings_of_a_victim_go_with_it_and_share_again(victim: int) -> None:
    h = roomy()
    ids = forked(h, steps=1, count=3)
    h.scheduler.preempt(ids[victim])
    assert statuses(h, ids) == [SWAPPED] * 3 and h.num_free_blocks == 39
    h.check_invariants()
    out = h.schedule()
    assert len(out.blocks_to_swap_out) == len(out.blocks_to_swap_in) == 3 + 3  # three shared, one of each
    assert sorted(out.num_scheduled_tokens) == sorted(ids) and h.num_free_blocks == 39 - 6
    assert len({tuple(h.request(rid).block_ids[:3]) for rid in ids}) == 1
    h.update(out)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 9) for rid in ids)
    assert h.scheduler.stats.scheduled_tokens == 14 + 8 * 3 and h.scheduler.stats.recomputed_tokens == 0


def test_a_last_block_that_all_will_write_to_goes_once_and_comes_back_for_each() -> None:
    """Forked and not run since: they share the open block too."""
    h = roomy()
    ids = forked(h, steps=0)
    h.scheduler.preempt(ids[1])
    out = h.schedule()
    assert (len(out.blocks_to_swap_out), len(out.blocks_to_swap_in)) == (4, 5)
    h.update(out, tokens={ids[0]: [50], ids[1]: [60]})
    texts = h.run()
    for rid, token in zip(ids, (50, 60), strict=True):
        branch = [*reference_tokens(PROMPT, 1), token]
        assert texts[rid] == branch + reference_tokens(PROMPT + branch, 7)


def test_who_only_has_the_same_prefix_stays() -> None:
    h = roomy(enable_prefix_caching=True)
    ids = [h.add(PROMPT, max_tokens=9), h.add(PROMPT, max_tokens=9)]
    h.step()
    assert h.request(ids[0]).block_ids[:3] == h.request(ids[1]).block_ids[:3]
    h.scheduler.preempt(ids[1])
    assert statuses(h, ids) == [RUNNING, SWAPPED]


def test_siblings_that_share_nothing_any_more_are_swapped_one_by_one() -> None:
    h = roomy(kv_groups=("window:4",), preemption="swap")
    ids = forked(h, steps=6, max_tokens=12)
    h.scheduler.preempt(ids[1])
    assert statuses(h, ids) == [RUNNING, SWAPPED]


@pytest.mark.parametrize(("host_blocks", "together"), [(5, True), (4, False), (0, False)])
def test_without_room_for_all_the_victim_alone_is_computed_again(host_blocks: int, together: bool) -> None:
    """Five different blocks: three shared and one of each."""
    h = roomy(host_blocks=host_blocks)
    ids = forked(h, steps=1)
    h.scheduler.preempt(ids[1])
    assert statuses(h, ids) == ([SWAPPED, SWAPPED] if together else [RUNNING, PREEMPTED])
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 9) for rid in ids)


def test_auto_weighs_the_moves_of_all_against_the_tokens_of_all() -> None:
    """Five blocks there and back are 10 copies; the two have 15 tokens each."""
    for compute_token, expected in ((10 / 30 + 0.01, [SWAPPED, SWAPPED]), (10 / 30 - 0.01, [RUNNING, PREEMPTED])):
        h = roomy(preemption="auto")
        h.scheduler.set_preemption_costs(1.0, compute_token)
        ids = forked(h, steps=1)
        h.scheduler.preempt(ids[0])
        assert statuses(h, ids) == (expected if expected[0] is SWAPPED else [PREEMPTED, RUNNING])


def test_they_wait_until_all_fit() -> None:
    """Each needs four blocks, of which three are shared. Another request has taken eight of twelve meanwhile."""
    h = roomy(num_blocks=13)
    other = h.add(26, max_tokens=9)
    h.step()
    ids = forked(h, steps=1)
    h.scheduler.preempt(ids[0])
    out = h.schedule()
    assert list(out.num_scheduled_tokens) == [other] and h.num_free_blocks == 4
    assert out.blocks_to_swap_in == [] and statuses(h, ids) == [SWAPPED, SWAPPED]
    assert h.request(ids[0]).explanation.blocks_short == 1  # type: ignore[union-attr]
    h.update(out)
    h.abort(other)
    assert sorted(h.schedule().num_scheduled_tokens) == sorted(ids)


def test_a_group_that_cannot_come_back_together_does_so_bit_by_bit() -> None:
    """Six siblings grow to 3 + 6 * 3 blocks in a pool of 12."""
    h = roomy(num_blocks=13, max_num_seqs=8)
    ids = forked(h, steps=0, count=6)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 9) for rid in ids)
    stats = h.scheduler.stats
    assert stats.swapped_out_blocks and stats.recomputed_tokens == 0
    assert stats.scheduled_tokens == 14 + 8 * 6


def test_siblings_wait_for_the_token_that_is_under_way_for_one_of_them() -> None:
    """A step is planned for one of them when both are swapped: who runs again before it is known would lose it."""
    h = roomy(async_scheduling=True)
    ids = forked(h, steps=2)
    under_way = h.schedule()
    h.scheduler.state.batch.num_computed[h.requests[ids[0]].row] -= 1  # as if only the other were in that step
    h.scheduler.preempt(ids[0])
    assert [h.requests[rid].num_tokens - h.requests[rid].num_computed_tokens for rid in ids] == [1, 0]
    empty = h.schedule()
    assert empty.empty and statuses(h, ids) == [SWAPPED, SWAPPED]
    h.update(under_way, tokens={ids[1]: [50]})
    h.update(empty)
    assert sorted(h.schedule().num_scheduled_tokens) == sorted(ids)


def test_more_siblings_than_tokens_in_a_step() -> None:
    h = roomy(max_num_batched_tokens=2)
    first = h.add(PROMPT, max_tokens=9)
    while not h.request(first).output_token_ids:
        h.step()
    ids = [first, *(h.fork(first) for _ in range(3))]
    h.step()
    h.scheduler.preempt(first)
    out = h.schedule()
    assert sum(out.num_scheduled_tokens.values()) == 2 and statuses(h, ids) == [RUNNING] * 4
    h.update(out)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 9) for rid in ids)


def test_the_copy_that_was_to_be_made_in_this_step_goes_from_its_source() -> None:
    """Both rows are to get an open block of their own, but only one can: who leaves for it has its content in the block
    that both share still."""
    h = roomy(num_blocks=6)
    ids = forked(h, steps=0, count=3, max_tokens=5)
    out = h.schedule()
    assert statuses(h, ids) == [SWAPPED] * 3 and len(out.blocks_to_swap_out) == 4 and out.blocks_to_copy == []
    h.update(out)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 5) for rid in ids)


def test_a_victim_of_an_urgent_one_takes_its_siblings_along() -> None:
    h = roomy(policy="priority", num_blocks=8, max_num_seqs=8)
    first = h.add(PROMPT, max_tokens=9, priority=5)
    h.step()
    ids = [first, h.fork(first)]
    h.step()
    urgent = h.add(12, max_tokens=2)
    out = h.schedule()
    assert list(out.num_scheduled_tokens) == [urgent] and statuses(h, ids) == [SWAPPED, SWAPPED]
    h.check_invariants()
    h.update(out)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 9) for rid in ids)


def test_a_sibling_that_may_not_be_preempted_keeps_the_others() -> None:
    """The urgent request outranks one of the two only."""
    h = roomy(policy="priority", num_blocks=8, max_num_seqs=8)
    first = h.add(PROMPT, max_tokens=9, priority=1)
    h.step()
    h.requests["second"] = second = h.requests[h.fork(first, "second")]
    second.priority = 5
    h.step()
    h.scheduler.set_policy("priority")
    urgent = h.add(12, max_tokens=2, priority=3)
    out = h.schedule()
    assert urgent not in out.num_scheduled_tokens and statuses(h, [first, "second"]) == [RUNNING, RUNNING]
    h.update(out)
    assert h.run()["second"] == reference_tokens(PROMPT, 9)


def test_one_that_is_preempted_too_often_ends_and_its_sibling_is_kept() -> None:
    h = roomy(max_preemptions=1)
    ids = forked(h, steps=1)
    h.scheduler.preempt(ids[0])
    h.step()
    late = h.fork(ids[0])
    h.step()
    h.scheduler.preempt(late)
    assert statuses(h, [*ids, late]) == [RequestStatus.FINISHED_ERROR] * 2 + [SWAPPED]
    assert h.run()[late] == reference_tokens(PROMPT, 9)


def test_a_block_that_is_full_for_one_and_open_for_another_is_not_shared() -> None:
    pool, host = BlockPool(20), HostTier(10, None)
    space = SwapSpace(pool, host, [make_group("full", 4)], 4)
    blocks = pool.allocate(3)
    (first, second), moves = space.swap_out([[blocks], [blocks[:2]]], {})
    assert len(moves) == 3 and first[0][:2] == second[0] and host.pool.num_free == 7
    back, moves = space.swap_in([Swapped(first, 12, 13), Swapped(second, 6, 7)])
    (a,), (b,) = back
    assert (len(a), len(b), len(moves)) == (4, 2, 4) and a[0] == b[0] and a[1] != b[1]
    assert pool.ref_count[a[0]] == 2 and pool.ref_count[a[1]] == pool.ref_count[b[1]] == 1
    host.end_step()
    assert host.pool.num_free == 10


def test_a_swapped_sibling_of_one_whose_blocks_did_not_load_is_computed_again() -> None:
    """What was copied to the host before the loss was known is wrong for both."""
    h = roomy(num_blocks=8, disk_blocks=20, host_blocks=8, enable_prefix_caching=True, kv_groups=("full",))
    first = h.add(PROMPT, max_tokens=3)
    h.run()
    h.scheduler.state.cache.pool.free(h.scheduler.state.cache.allocate(7))  # evicts all of it
    second = h.add(PROMPT, max_tokens=9)
    out = h.schedule()
    loaded = [block for _, block in out.blocks_to_swap_in]
    assert h.request(second).num_cached_tokens == 12 and len(loaded) == 3
    third = h.fork(second)
    h.scheduler.preempt(second)
    if h.request(third).status is RUNNING:
        h.scheduler.preempt(third)
    assert SWAPPED in statuses(h, [second, third])
    h.scheduler.state.transfers.blocks_lost(out, loaded)
    assert statuses(h, [second, third]) == [PREEMPTED, PREEMPTED]
    h.check_invariants()
    assert first in h.requests
