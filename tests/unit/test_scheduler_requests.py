"""Requests come and go: refusals, duplicates, aborts at any moment, ids used again, nothing left behind."""

from __future__ import annotations

import gc
import itertools

import pytest

from kvern.request import Request, RequestStatus
from kvern.sampling_params import InvalidRequest
from kvern.testing import SchedulerHarness, reference_tokens


@pytest.mark.parametrize("caching", [True, False])
def test_empty_prompt_is_refused_before_it_can_do_harm(caching: bool) -> None:
    h = SchedulerHarness(enable_prefix_caching=caching)
    with pytest.raises(InvalidRequest, match="empty"):
        h.add([])
    other = h.add(5, max_tokens=2)
    h.run()
    assert len(h.delivered[other]) == 2


def test_id_of_a_live_request_is_refused_and_the_first_is_unharmed() -> None:
    h = SchedulerHarness()
    h.add(20, max_tokens=4, request_id="x")
    h.step()
    with pytest.raises(InvalidRequest, match="'x' is in use"):
        h.scheduler.add_request(Request("x", [1, 2, 3], h.requests["x"].sampling))
    h.check_invariants()
    assert h.run()["x"] == h.delivered["x"] and len(h.delivered["x"]) == 4


def test_id_may_be_used_again_while_a_step_of_the_first_is_under_way() -> None:
    """What the old step samples belongs to the aborted request and must not reach the new one of that name."""
    for ahead in (1, 2, 3):
        h = SchedulerHarness(async_scheduling=True)
        h.add([5, 6, 7], max_tokens=9, request_id="x")
        old = [h.schedule() for _ in range(ahead)]
        h.abort("x")
        h.add([50, 60, 70, 80], max_tokens=4, request_id="x")
        new = h.schedule()
        for out in [*old, new]:
            h.update(out)
        h.run()
        assert h.delivered["x"] == reference_tokens([50, 60, 70, 80], 4)


def bring_to(state: str) -> tuple[SchedulerHarness, str]:
    """A harness with one request in the named state, beside one that runs."""
    h = SchedulerHarness(num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, async_scheduling=True)
    h.add(4, max_tokens=10, request_id="other")
    h.step()
    rid = h.add(200 if state == "ignored" else 14, max_tokens=1 if state == "finished" else 4, request_id="it")
    for _ in range({"prefill": 1, "finished": 1, "decode": 2, "preempted": 2}.get(state, 0)):
        h.step()
    if state == "preempted":
        h.scheduler.preempt(rid)
    return h, rid


STATES = ["waiting", "ignored", "prefill", "decode", "preempted", "finished"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("under_way", [0, 1, 2])
def test_abort_in_every_state_with_steps_under_way(state: str, under_way: int) -> None:
    """B114: an abort between schedule() and update, whatever the request is doing; and it is idempotent."""
    h, rid = bring_to(state)
    flight = [h.schedule() for _ in range(under_way)]
    before = list(h.delivered[rid])
    was_finished = h.request(rid).status.finished
    assert h.scheduler.abort(rid) is not was_finished
    assert not h.scheduler.abort(rid)
    h.check_invariants()
    told = []
    for out in flight:
        told += [f.request.id for f in h.update(out).finished]
        h.check_invariants()
    h.run()
    assert h.delivered[rid] == before  # what was under way is dropped
    assert h.request(rid).status in (RequestStatus.FINISHED_ABORTED, *([h.request(rid).status] if was_finished else []))
    assert len(h.delivered["other"]) == 10 and h.num_free_blocks == 7
    assert told.count(rid) <= 1


def test_unknown_ids_are_fine() -> None:
    h = SchedulerHarness()
    assert not h.scheduler.abort("nobody") and not h.scheduler.preempt("nobody")


@pytest.mark.parametrize("count", [1, 3, 5])
def test_any_subset_may_leave_between_plan_and_result(count: int) -> None:
    """B113: drop k of n rows, for all k and all choices, between schedule() and update."""
    for k in range(count + 1):
        for leaving in itertools.combinations(range(count), k):
            h = SchedulerHarness(num_blocks=64)
            ids = [h.add([3 + i] * (i + 1), max_tokens=3) for i in range(count)]
            h.step()
            out = h.schedule()
            for i in leaving:
                h.abort(ids[i])
            h.update(out)
            h.run()
            for i, rid in enumerate(ids):
                assert h.delivered[rid] == reference_tokens([3 + i] * (i + 1), 3)[: 1 if i in leaving else 3]
            assert h.num_free_blocks == 63


def test_every_ending_is_told_exactly_once() -> None:
    """Finished, aborted in any state, ignored: once to the executor's side and once to the owner."""
    h = SchedulerHarness(num_blocks=9, max_num_seqs=2)
    ids = [h.add(10, max_tokens=1 + i % 3) for i in range(6)]
    ids.append(h.add(1000))  # can never fit
    told: list[str] = []
    owners: list[str] = []
    for step in range(40):
        out = h.schedule()
        told += out.finished_req_ids
        if step == 1:
            h.abort(ids[2])
            h.abort(ids[5])
        owners += [f.request.id for f in h.update(out).finished]
    assert sorted(told) == sorted(owners) == sorted(ids)


def test_finished_requests_leave_no_memory_behind() -> None:
    """B123: after many small requests nothing in the scheduler holds on to any of them."""
    h = SchedulerHarness(num_blocks=65, max_num_seqs=8)
    gc.collect()
    before = sum(isinstance(o, Request) for o in gc.get_objects())
    for i in range(600):
        h.add([3 + i % 200, 4, 5], max_tokens=1 + i % 2)
        if i % 20 == 0:
            h.abort(f"r{i}")
        if i % 7 == 0:
            h.step()
    h.run()
    h.step()
    h.requests.clear()
    h.delivered.clear()
    gc.collect()
    assert sum(isinstance(o, Request) for o in gc.get_objects()) == before
    assert not h.scheduler.requests and not h.executor._rows and not h.scheduler.state.cache._memo


def test_row_that_failed_alone_leaves_nothing_in_the_cache() -> None:
    """It may have written or read damaged keys and values: the next request with its prefix computes them anew."""
    h = SchedulerHarness(block_size=4)
    prompt = [*range(3, 15)]
    other = h.add([200, 201], max_tokens=6)
    failing = h.add(prompt, max_tokens=6)
    h.step()
    out = h.schedule()
    result = h.executor.execute(out)
    result.errors[h.requests[failing].row] = "logits are not numbers"
    outputs = h.scheduler.update_from_output(out, result, 0.0)
    assert list(outputs.tokens()) == [other]  # whatever came out of the failed row is no token
    assert [(f.request.id, f.status, f.error) for f in outputs.finished] == [
        (failing, RequestStatus.FINISHED_ERROR, "logits are not numbers")
    ]
    h.check_invariants()
    again = h.add(prompt, max_tokens=6)
    assert h.schedule().num_scheduled_tokens == {other: 1, again: 12}
