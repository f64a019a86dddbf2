"""Where features meet: faults that random mixtures of them brought to light, each in its smallest form."""

from __future__ import annotations

from kvern.request import RequestStatus
from kvern.testing import SchedulerHarness, reference_tokens


def test_image_longer_than_a_chunk_is_computed_whole() -> None:
    """An image is never split, so a cap on chunks below its length must give way, or the request stands still for ever
    while others keep it from being alone."""
    h = SchedulerHarness(long_prefill_token_threshold=3, encoder_budget=10, encoder_cache_size=10)
    rid = h.add(12, max_tokens=2, images=[{"offset": 2, "length": 6, "id": "X"}])
    h.add(4, max_tokens=30)
    counts = []
    while not h.request(rid).status.finished:
        out = h.schedule()
        counts.append(out.num_scheduled_tokens.get(rid, 0))
        h.update(out)
    assert counts[:2] == [2, 6] and sum(counts) == 13


def test_request_does_not_throw_out_the_sibling_whose_prompt_it_shares() -> None:
    """An urgent fork of a running request lacks a row: its own parent is the one victim it cannot do without."""
    h = SchedulerHarness(policy="priority", max_num_seqs=1, block_size=4)
    parent = h.add([5, 6, 7, 8, 9, 10], max_tokens=6, priority=2)
    h.step()
    child = h.add([5, 6, 7, 8, 9, 10], max_tokens=4, priority=0, fork_of=parent)
    out = h.schedule()
    assert list(out.num_scheduled_tokens) == [parent] and not out.preempted_req_ids
    h.update(out)
    h.run()
    for rid, length in ((parent, 6), (child, 4)):
        assert h.delivered[rid] == reference_tokens([5, 6, 7, 8, 9, 10], length)


def test_lookups_made_for_a_policy_are_forgotten_with_the_request() -> None:
    """B123: the prefix policy looks up everybody, also while a request changes hands."""
    h = SchedulerHarness(policy="prefix", num_blocks=9, block_size=4, preemption="swap", host_blocks=16)
    for i in range(12):
        h.add([3 + i % 3, 4, 5, 6, 7, 8], max_tokens=8)
    h.run()
    assert h.scheduler.stats.preemptions > 0 and not h.scheduler.state.cache._memo


def test_loaded_request_that_has_outgrown_the_pool_ends() -> None:
    """A token that comes late makes a request one longer than the whole pool while its prompt is loaded again."""
    h = SchedulerHarness(
        num_blocks=9,
        block_size=1,
        async_scheduling=True,
        enable_prefix_caching=False,
        connector={"matched_tokens": 3, "load_async": True},
    )
    rid = h.add([5, 6, 7, 8], max_tokens=12)
    while h.request(rid).num_tokens < 8:
        h.update(h.schedule(), kv_arrived=list(h.scheduler.state.transfers.loading))
    decode = h.schedule()
    h.scheduler.preempt(rid)
    load = h.schedule()
    assert h.request(rid).status is RequestStatus.WAITING_FOR_REMOTE_KV
    h.update(decode)  # brings the ninth token
    h.update(load, kv_arrived=[rid])
    h.run(20)
    assert h.request(rid).status is RequestStatus.FINISHED_LENGTH and "8 blocks of 1" in (h.request(rid).error or "")
    assert h.delivered[rid] == reference_tokens([5, 6, 7, 8], len(h.delivered[rid]))


def test_swapped_request_needs_what_its_window_holds_and_no_more() -> None:
    """Six blocks of tokens, of which a window of two and a chunk are held at a time, in a pool of four: swapped out,
    it must come back."""
    h = SchedulerHarness(
        num_blocks=5,
        block_size=2,
        max_num_batched_tokens=2,
        kv_groups=("window:4",),
        preemption="swap",
        host_blocks=8,
        enable_prefix_caching=False,
    )
    solo = SchedulerHarness(block_size=2, kv_groups=("window:4",))
    rid, alone = (x.add(list(range(5, 17)), max_tokens=3) for x in (h, solo))
    for _ in range(3):
        h.step()
        h.scheduler.preempt(rid)
        assert h.request(rid).status is RequestStatus.SWAPPED
    h.run(50)
    assert h.delivered[rid] == solo.run()[alone] and h.request(rid).error is None
    assert h.scheduler.stats.recomputed_tokens == 0
