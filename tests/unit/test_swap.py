"""Preemption that keeps what was computed: swap and auto."""

from __future__ import annotations

from typing import Any

import pytest

from kvern.request import BlockedBy, RequestStatus
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens


def crowded(**config: Any) -> SchedulerHarness:
    return SchedulerHarness(
        **{"num_blocks": 12, "block_size": 4, "preemption": "swap", "host_blocks": 40, "enable_prefix_caching": False}
        | config
    )


def play(h: SchedulerHarness, count: int = 8) -> int:
    """Run `count` requests; returns how many tokens were computed. Their texts are right."""
    prompts = [own_tokens(f"p{i}", 5 + 2 * i) for i in range(count)]
    ids = [h.add(prompt, max_tokens=12) for prompt in prompts]
    texts = h.run()
    assert [texts[rid] for rid in ids] == [reference_tokens(prompt, 12) for prompt in prompts]
    return h.scheduler.stats.scheduled_tokens


NEEDED = sum(5 + 2 * i + 11 for i in range(8))


def test_no_token_is_computed_twice() -> None:
    h = crowded()
    assert play(h) == NEEDED
    stats = h.scheduler.stats
    assert stats.preemptions > 3 and stats.recomputed_tokens == 0
    assert stats.swapped_out_blocks == stats.swapped_in_blocks > 0


def test_recompute_computes_them_twice() -> None:
    h = crowded(preemption="recompute")
    computed = play(h)
    assert computed == NEEDED + h.scheduler.stats.recomputed_tokens > NEEDED
    assert h.scheduler.stats.swapped_out_blocks == 0


@pytest.mark.parametrize("host_blocks", [0, 1, 3, 5])
def test_a_small_host_means_some_are_computed_again_and_nothing_fails(host_blocks: int) -> None:
    h = crowded(host_blocks=host_blocks)
    assert play(h) > NEEDED
    assert (h.scheduler.stats.swapped_out_blocks > 0) is (host_blocks >= 3)


@pytest.mark.parametrize(
    ("copy_block", "compute_token", "swaps"),
    [(1.0, 100.0, True), (100.0, 1.0, False), (0.0, 1.0, False), (1.0, 0.0, False)],
)
def test_auto_takes_the_cheaper_way(copy_block: float, compute_token: float, swaps: bool) -> None:
    h = crowded(preemption="auto")
    h.scheduler.set_preemption_costs(copy_block, compute_token)
    assert (play(h) == NEEDED) is swaps


@pytest.mark.parametrize(("compute_token", "status"), [(0.51, "SWAPPED"), (0.5, "PREEMPTED")])
def test_auto_weighs_both_ways_of_a_block_against_its_tokens(compute_token: float, status: str) -> None:
    """Eight tokens in two blocks: there and back is 4 copies of 1.0, to compute them 8 times compute_token."""
    h = crowded(preemption="auto")
    h.scheduler.set_preemption_costs(1.0, compute_token)
    rid = h.add(8, max_tokens=4)
    h.step()
    h.scheduler.preempt(rid)
    assert h.request(rid).status.name == status


def test_what_is_on_the_host_is_told_in_the_step_after_and_comes_back_to_other_blocks() -> None:
    h = crowded()
    prompt = own_tokens("p", 10)
    rid = h.add(prompt, max_tokens=5)
    h.step()
    before = h.request(rid).block_ids
    h.scheduler.preempt(rid)
    h.add(4, max_tokens=1, priority=0)
    out = h.schedule()
    assert [device for device, _ in out.blocks_to_swap_out] == before
    assert sorted(host for host, _ in out.blocks_to_swap_in) == sorted(host for _, host in out.blocks_to_swap_out)
    assert out.num_scheduled_tokens[rid] == 1  # in the very step in which it went, since there is room
    h.update(out)
    assert h.run()[rid] == reference_tokens(prompt, 5)


def test_who_was_never_computed_is_not_swapped() -> None:
    """Preempted in the step that admits it: nothing is there that could be kept."""
    h = SchedulerHarness(num_blocks=9, policy="priority", preemption="swap", host_blocks=8, enable_prefix_caching=False)
    low = h.add(60, priority=5, max_tokens=30)
    h.schedule()
    h.scheduler.state.planning = True  # as within a step
    h.scheduler.state.preempt(h.requests[low])
    assert h.request(low).status is RequestStatus.PREEMPTED


def test_swapped_requests_say_why_they_wait() -> None:
    h = crowded()
    ids = [h.add(18, max_tokens=9) for _ in range(2)]
    while h.scheduler.stats.preemptions == 0:
        h.step()
    assert h.request(ids[1]).status is RequestStatus.SWAPPED
    assert h.request(ids[1]).blocked_by is BlockedBy.NO_FREE_BLOCKS
    assert h.scheduler.waiting_by_reason() == {BlockedBy.NO_FREE_BLOCKS: 1}


@pytest.mark.parametrize("groups", [("window:6",), ("full", "window:6")])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_windows_and_steps_under_way(groups: tuple[str, ...], ahead: int) -> None:
    """Forced preemption while results are out; whoever lacks a block of its window computes it again."""
    texts = []
    for probability in (0.0, 0.3):
        h = crowded(
            num_blocks=40,
            kv_groups=groups,
            async_scheduling=ahead > 1,
            preempt_probability=probability,
            seed=ahead,
        )
        for i in range(5):
            h.add(own_tokens(f"p{i}", 6 + 3 * i), max_tokens=15)
        flight = []
        while h.scheduler.has_work():
            flight.append(h.schedule())
            if len(flight) == ahead:
                h.update(flight.pop(0))
            h.check_invariants()
        texts.append({rid: h.request(rid).output_token_ids for rid in h.requests})
    assert texts[0] == texts[1] and h.scheduler.stats.swapped_in_blocks > 0


def test_urgent_ones_are_swapped_in_first() -> None:
    h = crowded(policy="priority", num_blocks=30)
    low, high = h.add(8, priority=5, max_tokens=9), h.add(8, priority=1, max_tokens=9)
    h.step()
    for rid in (high, low):
        h.scheduler.preempt(rid)
    assert [request.id for request in h.scheduler.waiting()] == [high, low]


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize(("policy", "urgent_runs"), [("priority", True), ("fcfs", False)])
def test_a_swapped_one_that_cannot_come_back_does_not_hold_up_an_urgent_one(
    batching: str, policy: str, urgent_runs: bool
) -> None:
    """Three of eleven blocks are free: the swapped one needs six, the urgent one two."""
    h = crowded(policy=policy, batching=batching, max_num_batched_tokens=64)
    low = h.add(22, max_tokens=5, priority=5)
    h.step()
    h.scheduler.preempt(low)
    h.scheduler.state.swapped.remove(h.requests[low])  # it would come back at once
    middle = h.add(31, max_tokens=9, priority=3)
    h.step()
    h.scheduler.state.swapped.add(h.requests[low])
    urgent, behind = h.add(6, max_tokens=3, priority=0), h.add(2, max_tokens=3, priority=5)
    out = h.schedule()
    assert h.request(low).status is RequestStatus.SWAPPED and h.request(middle).status is RequestStatus.RUNNING
    assert (urgent in out.num_scheduled_tokens) is urgent_runs and behind not in out.num_scheduled_tokens
    assert h.request(behind).blocked_by is BlockedBy.NO_FREE_BLOCKS
    h.check_invariants()
    h.update(out)
    texts = h.run()
    assert len(texts[low]) == 5 and len(texts[urgent]) == len(texts[behind]) == 3


def test_one_whose_blocks_have_arrived_does_not_hold_up_an_urgent_one() -> None:
    """It waits for a row, which the urgent one takes from a running one."""
    connector = {"matched_tokens": 8, "load_async": True}
    h = SchedulerHarness(num_blocks=40, block_size=4, policy="priority", max_num_seqs=1, connector=connector)
    runs = h.add(3, max_tokens=20, priority=3)
    h.update(h.schedule(), kv_arrived=[runs])
    h.step()
    low = h.add(10, max_tokens=3, priority=5)
    h.update(h.schedule(), kv_arrived=[low])
    h.requests["urgent"] = h.requests[h.add(6, max_tokens=3, priority=0, request_id="urgent")]
    h.requests["urgent"].ask_connector = False
    out = h.schedule()
    assert list(out.num_scheduled_tokens) == ["urgent"] and out.preempted_req_ids == [runs]
    h.update(out)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_row_that_fails_after_its_request_left_it_ends_the_request(preemption: str) -> None:
    """With steps planned ahead: what the step was to give never comes, so nobody may wait for it."""
    h = crowded(preemption=preemption, async_scheduling=True)
    rid = h.add(own_tokens("p", 10), max_tokens=5)
    output = h.schedule()
    row = int(output.rows[0])
    h.scheduler.preempt(rid)
    result = h.executor.execute(output)
    result.errors, result.count[0] = {row: "not finite"}, 0
    outputs = h.scheduler.update_from_output(output, result, h.clock.now())
    assert [(ended.request.id, ended.error) for ended in outputs.finished] == [(rid, "not finite")]
    h.run()
    assert h.num_free_blocks == 11
