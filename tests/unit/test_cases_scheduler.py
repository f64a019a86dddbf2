"""Faults that other engines had, one test per case; the id in each docstring names it.

Some cases have their tests elsewhere: B016 queue order below; B017 also over HTTP; B024, B028, B038, B044, B049, B058,
B119 in test_scheduler_exactness.py; B029, B031, B034 in test_prefix_index.py; B113, B114, B123 in
test_scheduler_requests.py; B002 with steps planned ahead in test_scheduler_preemption.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvern.request import BlockedBy, Request, RequestStatus
from kvern.sampling_params import SamplingParams
from kvern.scheduler.waiting_queue import WaitingQueue
from kvern.step import SchedulerOutput
from kvern.testing import SchedulerHarness, reference_tokens

STEM = [random.Random(3).randint(3, 242) for _ in range(128)]


def steps_of(h: SchedulerHarness, max_steps: int = 2000) -> list[SchedulerOutput]:
    """Run until everybody is done; the plans."""
    plans = []
    while h.scheduler.has_work():
        assert len(plans) < max_steps, "does not drain"
        plans.append(h.schedule())
        h.update(plans[-1])
        h.check_invariants()
    return plans


def add_plain(h: SchedulerHarness, rid: str, prompt: list[int], sampling: SamplingParams, **kwargs: Any) -> None:
    """A request with sampling parameters that the harness has no short form for."""
    request = Request(rid, prompt, sampling, **kwargs)
    h.scheduler.add_request(request)
    h.requests[rid], h.delivered[rid] = request, []


# ---- admission and limits


def test_prompt_larger_than_the_pool_ends_at_once() -> None:
    """B001: within max_model_len, but more blocks than there are: an error at once, and nobody waits behind it."""
    h = SchedulerHarness(num_blocks=9, block_size=16, max_model_len=256)
    big, small = h.add(130), h.add(10, max_tokens=2)
    out = h.schedule()
    assert out.num_scheduled_tokens == {small: 10} and out.ignored_req_ids == [big]
    ended = h.update(out).finished
    assert [(f.request.id, f.status) for f in ended] == [(big, RequestStatus.FINISHED_IGNORED)]
    assert "128 tokens (8 blocks of 16)" in (ended[0].error or "")
    assert [r.id for r in h.scheduler.waiting()] == []


@pytest.mark.parametrize(("length", "fits"), [(128, True), (129, False)])
def test_border_of_what_fits_the_pool(length: int, fits: bool) -> None:
    """B001: exactly the whole pool is fine, one token more is not."""
    h = SchedulerHarness(num_blocks=9, block_size=16, max_model_len=256)
    rid = h.add(length, max_tokens=1)
    h.run()
    assert (h.request(rid).status is RequestStatus.FINISHED_LENGTH) is fits and (h.request(rid).error is None) is fits


@pytest.mark.parametrize(("length", "fits"), [(31, True), (32, False)])
def test_border_of_max_model_len(length: int, fits: bool) -> None:
    """B001: room for one output token is part of what must fit."""
    h = SchedulerHarness(max_model_len=32)
    rid = h.add(length, max_tokens=5)
    h.run()
    assert len(h.delivered[rid]) == (1 if fits else 0)
    assert fits or "max_model_len is 32" in (h.request(rid).error or "")


def test_that_can_never_fit_does_not_block_even_from_behind_a_blocked_head() -> None:
    """B001: it ends although the queue before it does not move."""
    h = SchedulerHarness(num_blocks=9, block_size=16, max_model_len=256)
    h.add(100, max_tokens=20)
    h.step()
    h.add(60)
    never = h.add(140)
    assert never in [f.request.id for f in h.step().finished]


def test_last_request_that_cannot_grow_ends_alone() -> None:
    """B002: it fills the pool and needs one block more: it ends with what it has, the engine lives on."""
    h = SchedulerHarness(num_blocks=3, block_size=16)
    rid = h.add(32, max_tokens=8)
    plans = steps_of(h, 10)
    assert h.request(rid).status is RequestStatus.FINISHED_LENGTH and len(h.delivered[rid]) == 1
    assert "2 blocks of 16" in (h.request(rid).error or "") and h.request(rid).num_preemptions == 0
    after = h.add(5, max_tokens=3)
    h.run()
    assert len(h.delivered[after]) == 3 and len(plans) == 2


def test_queue_moves_on_in_the_step_in_which_the_last_request_ends() -> None:
    """B002: what it gives back is used at once; no step is empty."""
    h = SchedulerHarness(num_blocks=3, block_size=16)
    h.add(32, max_tokens=8)
    h.step()
    waiting = h.add(32, max_tokens=1)
    assert h.schedule().num_scheduled_tokens == {waiting: 32}


def test_resumed_request_that_has_outgrown_the_pool_ends() -> None:
    """B002: preempted while others ran, with one token more than the whole pool holds: it must not wait for ever."""
    h = SchedulerHarness(num_blocks=3, block_size=4, policy="priority")
    rid = h.add(8, max_tokens=5, priority=1)
    h.step()
    h.scheduler.preempt(rid)
    behind = h.add(3, max_tokens=2, priority=1)
    h.run(20)
    assert h.request(rid).status is RequestStatus.FINISHED_LENGTH and len(h.delivered[rid]) == 1
    assert len(h.delivered[behind]) == 2


# ---- order


def test_bounded_bypass() -> None:
    """B006: small ones may pass a head that lacks blocks, but only so many, although more keep arriving."""
    h = SchedulerHarness(num_blocks=21, block_size=16, max_num_seqs=64, max_bypass=3)
    h.add(12 * 16 - 8, max_tokens=8)
    h.step()
    head = h.add(15 * 16 - 2, max_tokens=2)
    passed: list[str] = []
    for _ in range(30):
        h.add(8, max_tokens=8)
        out = h.schedule()
        if head in out.num_scheduled_tokens:
            break
        passed += [new.request_id for new in out.new_requests]
        h.update(out)
    else:
        pytest.fail("the head starved")
    assert len(passed) == 3


def test_bypass_off_means_strict_order() -> None:
    """B006: the other choice."""
    h = SchedulerHarness(num_blocks=21, block_size=16, max_bypass=0)
    h.add(12 * 16 - 8, max_tokens=8)
    h.step()
    head, small = h.add(15 * 16 - 2, max_tokens=2), h.add(8)
    plans = steps_of(h)
    first = {rid: next(i for i, p in enumerate(plans) if rid in p.num_scheduled_tokens) for rid in (head, small)}
    assert first[head] <= first[small]


@pytest.mark.parametrize("max_bypass", [0, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_no_livelock_above_capacity(policy: str, max_bypass: int) -> None:
    """B007: 200 arrivals on 32 blocks; never two empty steps in a row, and all finish."""
    rng = random.Random(7)
    h = SchedulerHarness(num_blocks=33, block_size=4, max_num_seqs=16, policy=policy, max_bypass=max_bypass)
    left, empty = 200, 0
    while left or h.scheduler.has_work():
        for _ in range(min(left, rng.choice([0, 0, 1, 4]))):
            h.add(rng.randint(1, 60), max_tokens=rng.randint(1, 30), priority=rng.randint(0, 3), at=h.clock.now())
            left -= 1
        h.clock.advance(1.0)
        out = h.schedule()
        empty = empty + 1 if out.empty and h.scheduler.requests else 0
        assert empty <= 1
        h.update(out)
    lengths = {rid: len(tokens) for rid, tokens in h.delivered.items()}
    assert lengths == {rid: r.sampling.max_tokens for rid, r in h.requests.items()}


def test_cap_counts_who_is_running_and_all_of_them_decode() -> None:
    """B008: never more than max_num_seqs resident, and each resident gets a token in every step."""
    h = SchedulerHarness(max_num_seqs=2)
    ids = [h.add(10, max_tokens=12) for _ in range(3)]
    for plan in steps_of(h):
        assert len(plan.request_ids) <= 2 and plan.running_queue_size <= 2
        assert plan.empty or plan.running_queue_size == len(plan.request_ids)
    assert [len(h.delivered[rid]) for rid in ids] == [12, 12, 12]


def test_prompts_are_admitted_only_if_they_will_fit() -> None:
    """B009: four prompts of 30 blocks in a pool of 40, in chunks, cache off: nobody throws the others' work away."""
    h = SchedulerHarness(num_blocks=41, enable_prefix_caching=False, max_num_batched_tokens=64)
    for _ in range(4):
        h.add(30 * 16 - 5, max_tokens=4)
    plans = steps_of(h)
    computed = sum(plan.total_num_scheduled_tokens for plan in plans)
    assert computed <= 1.2 * 4 * (30 * 16 - 5 + 3)
    assert h.scheduler.stats.preemptions <= 4 and h.scheduler.stats.recomputed_tokens == 0


@pytest.mark.parametrize(("with_decode", "expected"), [(False, 4), (True, 16)])
def test_prefill_cap_only_under_contention(with_decode: bool, expected: int) -> None:
    """B011: alone a long prompt uses the whole budget; beside a decode it is cut."""
    h = SchedulerHarness(max_num_batched_tokens=256, long_prefill_token_threshold=64)
    if with_decode:
        h.add(4, max_tokens=100)
        h.step()
    rid = h.add(1024, max_tokens=1)
    plans = 0
    while not h.request(rid).status.finished:
        h.step()
        plans += 1
    assert plans == expected


# ---- priority


def test_urgent_request_starts_in_the_next_step() -> None:
    """B012: all rows taken by others; the urgent one starts at once, and every text is as without preemption."""
    h = SchedulerHarness(max_num_seqs=2, policy="priority")
    ids = [h.add(20, max_tokens=64) for _ in range(2)]
    for _ in range(5):
        h.step()
    urgent = h.add(20, max_tokens=8, priority=-10, at=h.clock.now())
    assert urgent in h.schedule().num_scheduled_tokens
    h.run()
    for rid in [*ids, urgent]:
        prompt = h.requests[rid].token_ids[:20].tolist()
        assert h.delivered[rid] == reference_tokens(prompt, len(h.delivered[rid]))
    assert [len(h.delivered[rid]) for rid in [*ids, urgent]] == [64, 64, 8]


@pytest.mark.parametrize(
    ("limit", "starts"),
    [
        ({"max_num_seqs": 2}, True),
        ({"num_blocks": 5}, True),
        ({"max_num_batched_tokens": 2}, False),
    ],
    ids=["rows", "memory", "token-budget"],
)
def test_which_limits_make_running_requests_give_way(limit: dict[str, int], starts: bool) -> None:
    """B013: rows and memory are taken from the least urgent; the tokens of a step are not, running ones have theirs
    first."""
    h = SchedulerHarness(**({"max_num_seqs": 8, "policy": "priority"} | limit))
    low = [h.add(30 if "num_blocks" in limit else 1, max_tokens=40, priority=5 + i) for i in range(2)]
    h.step()
    urgent = h.add(10, max_tokens=3, priority=0)
    out = h.schedule()
    assert (urgent in out.num_scheduled_tokens) is starts
    assert out.preempted_req_ids == ([low[1]] if starts else [])
    assert starts or h.request(urgent).blocked_by is BlockedBy.TOKEN_BUDGET


def test_equal_priority_never_preempts_for_a_newcomer() -> None:
    """B013, B014: only a strictly more urgent one makes room, whatever the arrival."""
    h = SchedulerHarness(max_num_seqs=1, policy="priority")
    first = h.add(10, max_tokens=5, priority=1, at=5.0)
    h.step()
    h.add(10, max_tokens=5, priority=1, at=1.0)
    out = h.schedule()
    assert list(out.num_scheduled_tokens) == [first] and not out.preempted_req_ids


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_resumed_requests_go_first_among_equals(policy: str) -> None:
    """B014: A ran and was preempted, B came earlier and never ran: A goes first, and its kept blocks are hit."""
    h = SchedulerHarness(max_num_seqs=1, policy=policy)
    a = h.add(40, max_tokens=8, at=1.0)
    h.step()
    b = h.add(40, max_tokens=2, at=0.0)
    h.scheduler.preempt(a)
    out = h.schedule()
    assert out.num_scheduled_tokens == {a: 41 - 32} and h.request(b).blocked_by is BlockedBy.MAX_NUM_SEQS
    h.update(out)
    h.run()
    assert h.scheduler.stats.recomputed_tokens == 40 - 32


def test_more_urgent_newcomer_goes_before_a_resumed_request() -> None:
    """B014: resumed first holds within a rank only."""
    h = SchedulerHarness(max_num_seqs=1, policy="priority")
    a = h.add(10, max_tokens=8, priority=1)
    h.step()
    h.scheduler.preempt(a)
    b = h.add(10, max_tokens=1, priority=0)
    assert list(h.schedule().num_scheduled_tokens) == [b]


@pytest.mark.parametrize("rank", [lambda r: (), lambda r: (r.priority,)], ids=["fcfs", "priority"])
def test_queue_order_is_a_full_sort(rank: Callable[[Request], tuple[int, ...]]) -> None:
    """B016: after any adds and removals the order is that of sorting everybody at once; keys never change inside."""
    rng = random.Random(16)
    for _ in range(500):
        queue, inside = WaitingQueue(rank), list[Request]()
        for serial in range(rng.randint(1, 25)):
            if inside and rng.random() < 0.3:
                queue.remove(inside.pop(rng.randrange(len(inside))))
            arrival, priority = rng.randint(0, 3), rng.randint(-2, 2)
            request = Request(f"r{serial}", [1], SamplingParams(), arrival_time=arrival, priority=priority)
            request.serial, request.resumed = serial, rng.random() < 0.3
            queue.add(request)
            inside.append(request)
        want = sorted(inside, key=lambda r: (rank(r), not r.resumed, r.arrival_time, r.serial))
        assert list(queue) == want and queue.num_ready == len(queue) == len(want)
        assert [queue.at(i) for i in range(len(want))] == want


def test_ties_are_broken_by_the_order_of_arrival_at_the_scheduler() -> None:
    """B017: equal priority and equal arrival time, as children of one request have: no comparison fails."""
    h = SchedulerHarness(max_num_seqs=2, policy="priority", num_blocks=8)
    ids = [h.add(20, max_tokens=4, priority=1, at=2.0) for _ in range(8)]
    starts = [new.request_id for plan in steps_of(h) for new in plan.new_requests]
    assert list(dict.fromkeys(starts)) == ids


# ---- prefix cache


def test_lookup_then_budget_then_allocation() -> None:
    """B026: 64 requests share a prefix, somebody is preempted every 5 steps: no step runs past a request's tokens."""
    h = SchedulerHarness(num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64)
    ids = [h.add([*STEM[: 16 * (i % 5)], *range(3, 9 + i % 7)], max_tokens=6) for i in range(64)]
    step = 0
    while h.scheduler.has_work():
        if step % 5 == 4 and h.scheduler.running():
            h.scheduler.preempt(h.scheduler.running()[step % h.scheduler.num_running].id)
        step += 1
        out = h.schedule()
        for rid, start, n in zip(out.request_ids, out.num_computed.tolist(), out.num_new.tolist(), strict=True):
            view = h.request(rid)
            assert n >= 1 and start + n <= view.num_tokens and start + n == view.num_computed_tokens
        h.update(out)
    assert all(len(h.delivered[rid]) == 6 for rid in ids) and h.scheduler.stats.preemptions >= 5


def test_resumed_request_computes_prompt_and_output_again() -> None:
    """B027: preempted at output token 7: what it computes is derived from lengths, not from having output."""
    h = SchedulerHarness(enable_prefix_caching=False)
    rid = h.add(20, max_tokens=12)
    for _ in range(7):
        h.step()
    h.scheduler.preempt(rid)
    out = h.schedule()
    assert out.num_scheduled_tokens == {rid: 27} and out.samples.tolist() == [True]
    assert out.new_requests[0].num_prompt_tokens == 20 and len(out.new_requests[0].token_ids) == 27
    h.update(out)
    assert h.schedule().num_scheduled_tokens == {rid: 1}


def test_every_block_is_in_exactly_one_state_after_every_step() -> None:
    """B039: only full blocks of final tokens are hittable; free, cached and held add up (the checker does the sums)."""
    h = SchedulerHarness(num_blocks=20, block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    for i in range(12):
        h.add([*STEM[: 3 * i], 5 + i], max_tokens=7)
    while h.scheduler.has_work():
        h.step()
        h.check_invariants()
        cache = h.scheduler.state.cache
        computed = {
            block
            for r in h.scheduler.running()
            for block in h.request(r.id).block_ids[: h.request(r.id).num_computed_tokens // 4]
        }
        hittable = {block for block, _ in cache.index.items()}
        assert hittable <= computed | set(cache.pool.free_blocks())


def test_hits_are_counted_once_at_admission() -> None:
    """B041: a head that waits ten steps is looked up, but queried tokens grow by its prompt, once; resuming counts
    apart."""
    h = SchedulerHarness(num_blocks=11)
    h.add(STEM[:120], max_tokens=12)
    h.step()
    before = h.scheduler.stats.prefix_queried_tokens
    rid = h.add([*STEM[:64], *range(3, 60)], max_tokens=2)
    for _ in range(10):
        h.step()
    assert h.request(rid).blocked_by is BlockedBy.NO_FREE_BLOCKS
    assert h.scheduler.stats.prefix_queried_tokens == before
    while h.request(rid).status is RequestStatus.WAITING:
        h.step()
    assert h.scheduler.stats.prefix_queried_tokens == before + 64 + 57
    assert h.scheduler.stats.prefix_hit_tokens == h.request(rid).num_cached_tokens == 64
    h.scheduler.preempt(rid)
    h.run()
    assert h.scheduler.stats.prefix_queried_tokens == before + 64 + 57 and h.request(rid).num_cached_tokens == 64
    assert h.requests[rid].num_recached_tokens > 0


def test_second_of_two_equal_prompts_hits() -> None:
    """B042: the cache has an effect on every backend, for it is in the scheduler."""
    h = SchedulerHarness()
    for expected in (0, 32):
        rid = h.add(STEM[:40], max_tokens=2)
        h.run()
        assert h.request(rid).num_cached_tokens == expected


def test_prompt_logprobs_never_come_from_cached_positions() -> None:
    """B043: whoever asks for them computes all positions, and may still fill the cache for others."""
    h = SchedulerHarness()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for rid in ("a", "b"):
        add_plain(h, rid, STEM[:33], params)
        assert h.schedule().num_scheduled_tokens == {rid: 33}
        h.update(h._planned[0])
        h.run()
    other = h.add(STEM[:33], max_tokens=1)
    h.run()
    assert h.request(other).num_cached_tokens == 32


# ---- preemption


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_preemption_is_invisible(ahead: bool) -> None:
    """B044: eight streams, memory for three: same text, same ending, no token lost or told twice."""
    h = SchedulerHarness(num_blocks=13, block_size=4, max_num_seqs=8, async_scheduling=ahead)
    prompts = [STEM[i : i + 9] for i in range(8)]
    ids = [h.add(prompt, max_tokens=15) for prompt in prompts]
    flight: list[SchedulerOutput] = []
    while h.scheduler.has_work():
        flight.append(h.schedule())
        if len(flight) > ahead:
            h.update(flight.pop(0))
    assert h.scheduler.stats.preemptions > 3
    for rid, prompt in zip(ids, prompts, strict=True):
        assert h.delivered[rid] == reference_tokens(prompt, 15) == h.request(rid).output_token_ids
        assert h.request(rid).status is RequestStatus.FINISHED_LENGTH
    assert h.scheduler.stats.generated_tokens == 8 * 15


def preemptions_without_progress(h: SchedulerHarness, ahead: int) -> int:
    """The most times in a row that a request was preempted without having gained a token."""
    worst, seen = 0, Counter[tuple[str, int]]()
    flight: list[SchedulerOutput] = []
    while h.scheduler.has_work():
        flight.append(h.schedule())
        waiting_results = {rid for out in flight[:-1] for rid in out.request_ids}
        for rid in flight[-1].preempted_req_ids:
            if rid not in waiting_results:  # else the token under way is its progress
                seen[rid, h.request(rid).num_tokens] += 1
                worst = max(worst, seen[rid, h.request(rid).num_tokens])
        if len(flight) > ahead:
            h.update(flight.pop(0))
    return worst


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_token_of_progress_between_two_preemptions(ahead: int) -> None:
    """B046: nobody is preempted twice without a new token, as long as a request is recomputed in one step."""
    for seed in range(30):
        rng = random.Random(seed)
        h = SchedulerHarness(num_blocks=12, block_size=2, max_num_seqs=8, async_scheduling=ahead > 0)
        for _ in range(10):
            h.add(rng.randint(1, 9), max_tokens=rng.randint(1, 12))
        assert preemptions_without_progress(h, ahead) <= 1
        assert all(r.status is RequestStatus.FINISHED_LENGTH for r in h.requests.values())


def test_preemption_is_bounded_when_recomputing_takes_many_steps() -> None:
    """B046: in small chunks a resumed request can be met by the growth of those before it; few times, not for ever."""
    for seed in range(30):
        rng = random.Random(seed)
        h = SchedulerHarness(
            num_blocks=13, block_size=2, max_num_seqs=8, max_num_batched_tokens=4, enable_prefix_caching=False
        )
        for _ in range(10):
            h.add(rng.randint(1, 16), max_tokens=rng.randint(1, 12))
        assert preemptions_without_progress(h, 0) <= 4


def test_no_more_victims_than_needed() -> None:
    """B047: one request needs one block, five run: one victim."""
    h = SchedulerHarness(num_blocks=11, block_size=4, max_num_seqs=5, enable_prefix_caching=False)
    ids = [h.add(8 if i == 0 else 6, max_tokens=20) for i in range(5)]
    h.step()
    assert h.num_free_blocks == 0
    out = h.schedule()
    assert out.preempted_req_ids == [ids[4]] and sorted(out.num_scheduled_tokens) == ids[:4]


def test_drafts_of_a_preempted_request_are_gone() -> None:
    """B048: they were made for a state that is no more; after resuming the request starts without."""
    h = SchedulerHarness(num_speculative_tokens=3, enable_prefix_caching=False)
    rid = h.add(10, max_tokens=9)
    h.update(h.schedule(), drafts={rid: [50, 51, 52]})
    h.scheduler.preempt(rid)
    out = h.schedule()
    assert out.num_scheduled_tokens == {rid: 11} and out.draft_tokens == {}
    h.update(out)
    h.run()
    assert h.delivered[rid] == reference_tokens(h.requests[rid].token_ids[:10].tolist(), 9)


@pytest.mark.parametrize("limit", ["max_model_len", "max_tokens"])
@pytest.mark.parametrize("k", [1, 5])
def test_drafts_end_where_the_request_ends(limit: str, k: int) -> None:
    """B052: drafting near a limit: no step passes it, and the text has exactly the length asked for."""
    max_tokens = 4 if limit == "max_tokens" else 500
    h = SchedulerHarness(max_model_len=64, num_speculative_tokens=k)
    rid = h.add(60, max_tokens=max_tokens)
    text = reference_tokens(h.requests[rid].token_ids.tolist(), 20)
    while h.scheduler.has_work():
        out = h.schedule()
        assert all(end <= 63 for end in (out.num_computed + out.num_new).tolist())
        known = len(h.delivered[rid]) + 1 + sum(map(len, out.draft_tokens.values()))
        h.update(out, drafts={rid: text[known : known + k]})
    assert h.delivered[rid] == text[:4] and h.request(rid).status is RequestStatus.FINISHED_LENGTH


def test_tokens_after_a_stop_within_accepted_drafts_are_cut() -> None:
    """B053: ids end at the stop, whatever was accepted behind it."""
    h = SchedulerHarness(num_speculative_tokens=4)
    rid = h.add(STEM[:6], max_tokens=30, stop_token_ids=[reference_tokens(STEM[:6], 4)[3]])
    text = reference_tokens(STEM[:6], 8)
    h.update(h.schedule(), drafts={rid: text[1:5]})
    out = h.schedule()
    ended = h.update(out)
    stop = text.index(text[3]) + 1
    assert ended.tokens()[rid] == text[1:stop] and h.delivered[rid] == text[:stop]
    assert ended.finished[0].stop_reason == text[3] and h.request(rid).status is RequestStatus.FINISHED_STOPPED


def test_prompt_border_stays_where_it_is_after_a_preemption() -> None:
    """B064: presence and frequency penalties count output tokens only, repetition both; also after resuming."""
    few = {70: 20.0, 90: 20.0, 91: 20.0, 92: 20.0}  # tokens that will come again and again

    def text(preempt_at: int | None, **penalties: float) -> list[int]:
        h = SchedulerHarness()
        params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias=few, **penalties)
        add_plain(h, "it", [70, 71, 70, 72, 80, 80], params)
        for step in range(13):
            if step == preempt_at:
                assert h.scheduler.preempt("it")
            h.step()
        return h.delivered["it"]

    for penalties in ({"presence_penalty": 1.5, "frequency_penalty": 0.7}, {"repetition_penalty": 1.2}):
        undisturbed = text(None, **penalties)
        assert text(3, **penalties) == text(7, **penalties) == undisturbed != text(None)
        assert len(undisturbed) == 12 and set(undisturbed) <= set(few)


def test_memory_that_all_share_aborts_nobody() -> None:
    """B119: 64 tokens of memory, four requests that want 50 each: all finish, in turn."""
    h = SchedulerHarness(num_blocks=5, block_size=16, max_num_seqs=4, max_num_batched_tokens=64)
    ids = [h.add(20, max_tokens=30) for _ in range(4)]
    steps_of(h)
    assert all(h.request(rid).status is RequestStatus.FINISHED_LENGTH for rid in ids)
    assert all(len(h.delivered[rid]) == 30 and h.request(rid).error is None for rid in ids)


# ---- metrics


def test_each_request_is_counted_once() -> None:
    """B124: first scheduled once, each token once, each ending once, also after preemptions, aborts and refusals."""
    h = SchedulerHarness(num_blocks=13, block_size=4, max_num_seqs=8, preempt_probability=0.3, seed=3)
    ids = [h.add(9, max_tokens=10) for _ in range(12)]
    ids.append(h.add(4000))
    endings: Counter[RequestStatus] = Counter()
    first: dict[str, float] = {}
    while h.scheduler.has_work():
        h.clock.advance(1.0)
        out = h.schedule()
        if h.clock.now() == 3.0:
            h.abort(ids[11])
        endings.update(f.status for f in h.update(out).finished)
        for rid in out.request_ids:
            first.setdefault(rid, h.clock.now())
            assert h.requests[rid].first_scheduled_time == first[rid]
    wanted = {RequestStatus.FINISHED_LENGTH: 11, RequestStatus.FINISHED_ABORTED: 1, RequestStatus.FINISHED_IGNORED: 1}
    assert endings == wanted
    assert h.scheduler.stats.generated_tokens == sum(map(len, h.delivered.values()))


def test_preemptions_add_up_and_recomputed_tokens_are_told_apart() -> None:
    """B126: the requests' own counts sum to the total; work done twice is what was scheduled beyond what was new."""
    h = SchedulerHarness(num_blocks=13, block_size=4, max_num_seqs=8, preempt_probability=0.2, seed=4)
    for i in range(12):
        h.add([*STEM[: 2 * i], 3 + i], max_tokens=10)
    plans = steps_of(h)
    stats = h.scheduler.stats
    assert stats.preemptions == sum(r.num_preemptions for r in h.requests.values()) > 5
    assert stats.preemptions == sum(len(plan.preempted_req_ids) for plan in plans)
    assert stats.scheduled_tokens == sum(plan.total_num_scheduled_tokens for plan in plans)
    new = sum(r.num_tokens - 1 - r.num_cached_tokens for r in h.requests.values())
    assert stats.scheduled_tokens == new + stats.recomputed_tokens


# ---- cost


@pytest.mark.parametrize("max_bypass", [0, 1000])
@pytest.mark.parametrize("blocked_by", list(BlockedBy)[:3])
def test_ten_thousand_waiting_requests_are_not_walked(
    blocked_by: BlockedBy, max_bypass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B126: a step's work does not grow with the queue, whatever it waits for; nor do the counts by reason."""
    limits: dict[BlockedBy, dict[str, int]] = {
        BlockedBy.TOKEN_BUDGET: {"max_num_batched_tokens": 2},
        BlockedBy.MAX_NUM_SEQS: {"max_num_seqs": 2},
        BlockedBy.NO_FREE_BLOCKS: {"num_blocks": 5},
    }
    h = SchedulerHarness(policy="priority", max_bypass=max_bypass, **limits[blocked_by])
    for _ in range(2):
        h.add([3] * (30 if blocked_by is BlockedBy.NO_FREE_BLOCKS else 1), max_tokens=1000)
    h.step()
    h.step()
    for i in range(10_000):
        h.add([4, 5 + i % 50] * 17, max_tokens=4)
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    state = h.scheduler.state
    counted(type(state.waiting), "at")
    counted(type(state.waiting), "__iter__")
    counted(state.cache, "lookup")
    counted(state, "never_fits")
    counted(state.policy, "rank")
    counted(state.policy, "may_preempt")
    h.step()
    assert calls.total() <= 6 * 32 + 10, calls  # max_bypass looks past so many at most
    calls.clear()
    assert h.scheduler.waiting_by_reason() == {blocked_by: 10_000}
    assert not calls


def test_lookup_of_a_waiting_head_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """B041: while the cache does not change the index is not asked again."""
    h = SchedulerHarness(num_blocks=11, block_size=16)
    h.add(STEM[:100], max_tokens=60)
    h.step()
    h.add([*STEM[:64], *range(3, 70)], max_tokens=2)
    h.step()
    asked = 0
    longest_prefix = h.scheduler.state.cache.index.longest_prefix

    def counted(hashes: list[bytes]) -> list[int]:
        nonlocal asked
        asked += 1
        return longest_prefix(hashes)

    monkeypatch.setattr(h.scheduler.state.cache.index, "longest_prefix", counted)
    changes = h.scheduler.state.cache.index.version
    for _ in range(40):
        h.step()
    changes = h.scheduler.state.cache.index.version - changes
    assert 0 < changes <= 3 and asked <= 2 * changes + 1


def test_steady_decode_touches_no_request_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step in which nothing happens asks nothing of single requests, however many run."""
    h = SchedulerHarness(num_blocks=600, max_num_seqs=256)
    for i in range(256):
        h.add([3 + i % 200] * 4, max_tokens=12)
    h.step()
    touched: list[str] = []
    state = h.scheduler.state
    monkeypatch.setattr(state.batch, "request_at", lambda row: touched.append("request_at"))
    monkeypatch.setattr(state.cache, "publish", lambda *a: touched.append("publish"))
    monkeypatch.setattr(state.policy, "rank", lambda r: touched.append("rank"))
    out = h.schedule()
    assert out.num_new.tolist() == [1] * 256 and out.new_requests == [] and not len(out.new_blocks.rows)
    h.update(out)
    assert touched == []
    assert np.all(state.batch.num_tokens[state.batch.order] == 6)
