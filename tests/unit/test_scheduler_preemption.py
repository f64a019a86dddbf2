"""Preemption: who gives way, for whom, and what becomes of the one that did."""

from __future__ import annotations

from kvern.request import BlockedBy, RequestStatus
from kvern.testing import SchedulerHarness, reference_tokens

PREFIX = [11, 12, 13, 14, 15, 16, 17, 18]


def test_waiting_request_gains_blocks_that_only_its_victims_share() -> None:
    """Two batch jobs share a prompt; together they hold what an urgent request needs."""
    h = SchedulerHarness(num_blocks=9, block_size=4, policy="priority", max_num_seqs=4)
    shared = [*range(100, 124)]
    jobs = [h.add([*shared, 3 + i], max_tokens=20, priority=5) for i in range(2)]
    h.step()
    assert h.num_free_blocks == 0  # 6 shared and one of each
    urgent = h.add(30, max_tokens=2, priority=0)
    out = h.schedule()
    assert out.num_scheduled_tokens == {urgent: 30}
    assert sorted(out.preempted_req_ids) == sorted(jobs)
    h.check_invariants()


def test_watermark_is_not_held_against_who_would_run_alone() -> None:
    """It holds only while something runs; after the victims are gone nothing does."""
    h = SchedulerHarness(num_blocks=5, block_size=2, policy="priority", watermark=0.34, max_num_batched_tokens=5)
    small = h.add(3, max_tokens=5, priority=2)
    h.step()
    urgent = h.add(8, max_tokens=1, priority=0)
    out = h.schedule()
    assert out.preempted_req_ids == [small] and out.num_scheduled_tokens == {urgent: 5}


def test_victim_is_spared_while_the_waiting_request_would_read_its_work() -> None:
    """The hit of the waiting request hangs on a block that the victim fills in this very step: without the victim
    the block, and with it all that is cached behind it, could not be hit."""
    h = SchedulerHarness(
        num_blocks=6,
        block_size=4,
        policy="priority",
        max_num_seqs=2,
        long_prefill_token_threshold=3,
        max_num_batched_tokens=64,
    )
    first = PREFIX[:4]
    h.add(first, max_tokens=1)
    h.run()
    long = h.add(first, max_tokens=30)  # has a copy of the block that is cached
    h.step()
    h.add(12, max_tokens=1)  # evicts the original
    while len(h.request(long).block_ids) < 3:
        h.step()
    said = reference_tokens(first, 4)
    victim = h.add([*first, 3, 4], max_tokens=9, priority=5)
    h.step()
    assert h.request(victim).num_computed_tokens == 3
    urgent = h.add([*first, *said, 5, 6], max_tokens=3, priority=1)
    assert urgent not in h.schedule().num_scheduled_tokens  # the victim fills the first block now
    assert h.request(urgent).blocked_by is BlockedBy.MAX_NUM_SEQS
    out = h.schedule()
    assert out.preempted_req_ids == [victim] and h.request(urgent).num_cached_tokens == 8
    h.run()
    assert h.delivered[urgent] == reference_tokens([*first, *said, 5, 6], 3)
    assert h.delivered[victim] == reference_tokens([*first, 3, 4], 9)


def test_victim_is_spared_while_another_request_reads_its_work() -> None:
    """Of two urgent ones the first shares a block that the least urgent fills in this step; so the second cannot throw
    that one out, for then nobody would fill it. In the next step it can."""
    h = SchedulerHarness(num_blocks=32, block_size=4, policy="priority", max_num_seqs=2, max_num_batched_tokens=64)
    victim = h.add(PREFIX[:3], max_tokens=20, priority=5)
    h.step()
    said = reference_tokens(PREFIX[:3], 20)
    reader = h.add([*PREFIX[:3], *said[:1], 3, 4], max_tokens=3, priority=0)
    urgent = h.add(9, max_tokens=3, priority=1)
    out = h.schedule()
    assert out.num_scheduled_tokens == {victim: 1, reader: 2} and not out.preempted_req_ids
    assert h.request(reader).num_cached_tokens == 4 and h.request(urgent).blocked_by is BlockedBy.MAX_NUM_SEQS
    h.update(out)
    assert h.schedule().preempted_req_ids == [victim] and h.request(urgent).status is RequestStatus.RUNNING
    h.run()
    assert h.delivered[reader] == reference_tokens([*PREFIX[:3], *said[:1], 3, 4], 3)
    assert h.delivered[victim] == said


def test_last_request_gets_the_tokens_under_way_before_it_ends() -> None:
    """B002 with steps planned ahead: the same text as without, to the last token that fits."""
    texts = []
    for ahead in (False, True):
        h = SchedulerHarness(num_blocks=3, block_size=4, async_scheduling=ahead)
        rid = h.add(PREFIX[:6], max_tokens=9)
        flight = []
        while h.scheduler.has_work():
            flight.append(h.schedule())
            if len(flight) > (2 if ahead else 0):
                h.update(flight.pop(0))
        view = h.request(rid)
        assert view.status is RequestStatus.FINISHED_LENGTH and "2 blocks of 4" in (view.error or "")
        texts.append(h.delivered[rid])
    assert texts[0] == texts[1] == reference_tokens(PREFIX[:6], 3)  # 8 slots, and one token that needs none
