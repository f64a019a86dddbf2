"""Keys and values that come from, or go to, another engine: who waits, who holds what, and what a failure undoes."""

from __future__ import annotations

from typing import Any

import pytest

from kvern.request import BlockedBy, Request, RequestStatus
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.faults import FakeConnector
from kvern.testing.harness import own_tokens

PROMPT = own_tokens("prompt", 50)


class Lossy(FakeConnector):
    """The blocks at the places `lost`, {request id: places}, come as garbage."""

    def __init__(self, matched_tokens: int, load_async: bool) -> None:
        super().__init__(matched_tokens, load_async)
        self.lost: dict[str, list[int]] = {}

    def allocated(self, request: Request, tables: list[list[int]], start: int, end: int) -> None:
        super().allocated(request, tables, start, end)
        for place in self.lost.get(request.id, []):
            for position in range(max(16 * place, start), min(16 * place + 16, end)):
                self._loads[-1]["token_ids"][position - start] = 999


def remote(matched: int = 32, load_async: bool = True, **config: Any) -> tuple[SchedulerHarness, Lossy]:
    connector = Lossy(matched, load_async)
    return SchedulerHarness(**{"num_blocks": 33} | config, connector=connector), connector


# ---- loads


def test_an_answer_that_is_not_known_yet_is_asked_for_again_and_holds_up_nobody() -> None:
    h, connector = remote(max_num_seqs=1, load_async=False)
    connector.undecided = ["late"]
    h.add(PROMPT, max_tokens=1, request_id="late")
    h.add(1, max_tokens=1, request_id="short")
    assert h.schedule().request_ids == ["short"]
    assert h.request("late").blocked_by is BlockedBy.REMOTE_KV
    h.update(h._planned[0])
    connector.undecided = []
    assert h.schedule().num_scheduled_tokens == {"late": 18}


def test_at_least_one_token_is_computed() -> None:
    h, _ = remote(matched=50, load_async=False)
    rid = h.add(PROMPT, max_tokens=3)
    assert h.schedule().num_scheduled_tokens == {rid: 1}
    h.update(h._planned[0])
    assert h.run()[rid] == reference_tokens(PROMPT, 3)


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("matched", [1, 15, 16, 17, 32, 49, 50])
def test_what_is_loaded_is_as_good_as_computed(matched: int, load_async: bool) -> None:
    h, _ = remote(matched, load_async)
    rid = h.add(PROMPT, max_tokens=5)
    out = h.schedule()
    h.update(out, kv_arrived=[rid] if load_async else [])
    assert h.run()[rid] == reference_tokens(PROMPT, 5)
    assert h.scheduler.stats.scheduled_tokens == 50 - min(matched, 49) + 4


def test_what_was_loaded_can_be_hit_once_its_owner_runs() -> None:
    h, _ = remote()
    first = h.add(PROMPT, max_tokens=5)
    h.step()
    second = h.add([*PROMPT[:48], 5], max_tokens=5)
    h.schedule()
    assert h.request(second).num_cached_tokens == 0  # nothing has come yet
    h.update(h._planned[0], kv_arrived=[first, second])
    h.step()
    third = h.add([*PROMPT[:48], 6], max_tokens=5)
    h.schedule()
    assert h.request(third).num_cached_tokens == 48


def test_words_from_transfers_that_nobody_waits_for_are_ignored() -> None:
    h, _ = remote()
    rid = h.add(PROMPT, max_tokens=2)
    h.step()
    h.update(h.schedule(), kv_arrived=["nobody", rid], kv_failed={"ghost": [0]}, kv_sent=["spirit"])
    h.update(h.schedule(), kv_arrived=[rid], kv_sent=[rid])  # told twice
    assert h.run()[rid] == reference_tokens(PROMPT, 2)


@pytest.mark.parametrize("places", [[0], [1], [0, 1], [2]])
@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("groups", [("full",), ("window:20",), ("full", "window:20")])
def test_blocks_that_did_not_come_are_computed(places: list[int], load_async: bool, groups: tuple[str, ...]) -> None:
    h, connector = remote(40, load_async, kv_groups=groups, num_blocks=80)
    connector.lost["r0"] = places
    alone = SchedulerHarness(kv_groups=groups)
    alone.add(PROMPT, max_tokens=5)
    reference = alone.run()["r0"]
    rid = h.add(PROMPT, max_tokens=5)
    outputs = h.update(h.schedule(), kv_failed={rid: places})
    nobody_reads_it = groups == ("window:20",) and places == [0] and not load_async
    assert outputs.tokens() == ({rid: [reference[0]]} if nobody_reads_it else {})
    assert h.run()[rid] == reference == h.delivered[rid]


def test_who_shares_blocks_that_did_not_come_computes_again_too() -> None:
    h, connector = remote(32, load_async=False)
    connector.lost["r0"] = [1]
    other = [*PROMPT[:40], 5, 6]
    first, second, third = h.add(PROMPT, max_tokens=4), h.add(other, max_tokens=4), h.add(20, max_tokens=4)
    out = h.schedule()
    assert h.request(second).num_cached_tokens == 32
    h.update(out, kv_failed={first: [1]})
    assert h.delivered[first] == h.delivered[second] == [] and len(h.delivered[third]) == 1
    assert h.schedule().num_scheduled_tokens == {first: 34, second: 26, third: 1}
    h.update(h._planned[0])
    texts = h.run()
    assert texts[first] == reference_tokens(PROMPT, 4) and texts[second] == reference_tokens(other, 4)


@pytest.mark.parametrize("then", ["abort", "preempt"])
def test_what_did_not_come_is_not_left_in_the_cache(then: str) -> None:
    """Its owner has left before that was known."""
    h, connector = remote(32, load_async=False)
    connector.lost["r0"] = [0]
    rid = h.add(PROMPT, max_tokens=4)
    out = h.schedule()
    getattr(h.scheduler, then)(rid)
    h.update(out, kv_failed={rid: [0]})
    assert h.delivered[rid] == []
    connector.matched = 0
    again = h.add(PROMPT, max_tokens=4)
    texts = h.run()
    assert texts[again] == reference_tokens(PROMPT, 4)
    assert texts[rid] == ([] if then == "abort" else reference_tokens(PROMPT, 4))


def test_a_failed_load_can_be_an_error() -> None:
    h, _ = remote(kv_load_failure="fail")
    rid = h.add(PROMPT)
    outputs = h.update(h.schedule(), kv_failed={rid: [0]})
    assert [(f.request.id, f.status.name, f.error) for f in outputs.finished] == [
        (rid, "FINISHED_ERROR", "its remote keys and values could not be loaded")
    ]
    assert h.num_free_blocks == 32


def test_a_failed_load_is_not_asked_for_again() -> None:
    h, connector = remote()
    rid = h.add(PROMPT, max_tokens=3)
    h.update(h.schedule(), kv_failed={rid: [0]})
    h.update(h.schedule())
    h.scheduler.preempt(rid)
    connector.matched = 50
    assert h.schedule().connector_metadata is None and h.request(rid).status is RequestStatus.RUNNING


# ---- leases


def test_the_lease_of_a_load_ends_it_and_what_comes_later_is_ignored() -> None:
    h, _ = remote(transfer_lease=2.0)
    rid = h.add(PROMPT, max_tokens=3)
    h.step()
    h.clock.advance(1.9)
    h.step()
    assert h.request(rid).status is RequestStatus.WAITING_FOR_REMOTE_KV
    h.clock.advance(0.1)
    assert h.schedule().num_scheduled_tokens == {rid: 50}
    h.update(h._planned[0], kv_arrived=[rid])
    assert h.run()[rid] == reference_tokens(PROMPT, 3)


def test_the_lease_of_an_aborted_load_frees_its_blocks() -> None:
    h, _ = remote(transfer_lease=2.0)
    rid = h.add(PROMPT)
    h.step()
    h.abort(rid)
    h.step()
    assert h.num_free_blocks == 30
    h.clock.advance(2.0)
    h.step()
    assert h.num_free_blocks == 32


def test_blocks_of_an_ended_request_stay_until_they_are_sent() -> None:
    h, connector = remote(matched=0, transfer_lease=9.0)
    connector.keep_finished = True
    rid = h.add(PROMPT, max_tokens=1)
    h.step()
    assert h.request(rid).status is RequestStatus.FINISHED_LENGTH and h.num_free_blocks == 28
    assert not h.scheduler.requests and h.scheduler.state.transfers.under_way()
    h.update(h.schedule(), kv_sent=[rid])
    assert h.num_free_blocks == 32


def test_blocks_of_an_ended_request_stay_no_longer_than_their_lease() -> None:
    h, connector = remote(matched=0, transfer_lease=9.0)
    connector.keep_finished = True
    h.add(PROMPT, max_tokens=1)
    h.step()
    h.clock.advance(8.9)
    h.step()
    assert h.num_free_blocks == 28
    h.clock.advance(0.1)
    h.step()
    assert h.num_free_blocks == 32
    h.check_invariants()


# ---- many at once


@pytest.mark.parametrize("load_async", [False, True])
def test_many_loads_drain_in_a_pool_that_is_too_small_for_them(load_async: bool) -> None:
    h, _ = remote(32, load_async, num_blocks=9)
    prompts = {h.add(own_tokens(f"p{i}", 45 + i), max_tokens=6): own_tokens(f"p{i}", 45 + i) for i in range(10)}
    steps = 0
    while h.scheduler.has_work():
        out = h.schedule()
        h.update(out, kv_arrived=list(h.scheduler.state.transfers.loading)[:1])
        h.check_invariants()
        steps += 1
        assert steps < 500, "the loads have wedged each other"
    texts = {rid: h.request(rid).output_token_ids for rid in prompts}
    assert texts == {rid: reference_tokens(prompt, 6) for rid, prompt in prompts.items()}


def test_the_last_running_request_takes_blocks_from_who_has_loaded_and_waits() -> None:
    """r0 grows into the whole pool; r1, loaded and without a row, gives up what it has and is computed later."""
    h, connector = remote(32, load_async=True, num_blocks=8, max_num_seqs=1)
    connector.matched = 0
    first = h.add(own_tokens("first", 60), max_tokens=40)
    h.step()
    connector.matched = 32
    second = h.add(own_tokens("second", 40), max_tokens=3)
    h.step()
    h.update(h.schedule(), kv_arrived=[second])
    assert h.num_free_blocks == 1 and second in [r.id for r in h.scheduler.waiting()]
    while not h.request(first).status.finished:
        h.step()
        h.check_invariants()
    connector.matched = 0
    texts = h.run()
    assert texts[first] == reference_tokens(own_tokens("first", 60), 40)
    assert texts[second] == reference_tokens(own_tokens("second", 40), 3)


def test_a_policy_that_changes_reorders_who_has_loaded() -> None:
    h, _ = remote(max_num_seqs=1)
    busy = h.add(1, max_tokens=20)
    low, high = h.add(PROMPT, priority=5), h.add(40, priority=0)
    h.step()
    h.update(h.schedule(), kv_arrived=[low, high])
    assert [r.id for r in h.scheduler.waiting()] == [low, high]
    h.scheduler.set_policy("priority")
    assert [r.id for r in h.scheduler.waiting()] == [high, low]
    assert h.request(low).blocked_by is BlockedBy.MAX_NUM_SEQS
    h.abort(busy)
    assert list(h.schedule().num_scheduled_tokens) == [high]


# ---- files


@pytest.mark.parametrize("then", ["go on", "abort", "preempt"])
def test_a_damaged_file_is_computed_and_leaves_nothing_in_the_cache(then: str) -> None:
    """Also when the request that was to read it has left before the damage was known."""
    h = SchedulerHarness(num_blocks=6, block_size=4, disk_blocks=20)
    prompt = PROMPT[:13]
    h.add(prompt, max_tokens=1)
    h.step()
    h.add(20, max_tokens=1)  # takes all blocks
    for _ in range(3):
        h.step()
    rid = h.add(prompt, max_tokens=3)
    out = h.schedule()
    assert len(out.blocks_from_disk) == 3 and out.num_scheduled_tokens == {rid: 1}
    for name, _ in out.blocks_from_disk:
        h.executor.disk[name][:] = 999
    if then != "go on":
        getattr(h.scheduler, then)(rid)
    result = h.executor.execute(out)
    result.lost = out.blocks_from_disk
    assert h.scheduler.update_from_output(out, result, 0.0).tokens() == {}
    h._planned.clear()
    again = h.add(prompt, max_tokens=3)
    texts = h.run()
    assert texts[again] == reference_tokens(prompt, 3)
    assert texts[rid] == ([] if then == "abort" else reference_tokens(prompt, 3))
