"""Forks go on from where a request is; siblings have its prompt computed once. Texts are those of each alone."""

from __future__ import annotations

from typing import Any

import pytest

from kvern.request import BlockedBy, Request, RequestStatus
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens

PROMPT = own_tokens("prompt", 22)


def small(**config: Any) -> SchedulerHarness:
    return SchedulerHarness(**{"num_blocks": 100, "block_size": 4, "enable_prefix_caching": False} | config)


def test_who_cannot_be_forked() -> None:
    h = small()
    rid = h.add(PROMPT, max_tokens=2)
    child = Request("child", [1], SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequest, match="'nobody' is not live"):
        h.scheduler.fork("nobody", child)
    with pytest.raises(InvalidRequest, match="is in use"):
        h.scheduler.fork(rid, Request(rid, [1], SamplingParams()))
    h.run()
    with pytest.raises(InvalidRequest, match="is not live"):
        h.scheduler.fork(rid, child)


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_at_any_moment_says_the_same(steps: int, caching: bool) -> None:
    """While the prompt waits, is computed in pieces, or is answered."""
    h = small(max_num_batched_tokens=9, enable_prefix_caching=caching)
    rid = h.add(PROMPT, max_tokens=9)
    for _ in range(steps):
        h.step()
    forks = [h.fork(rid), h.fork(rid)]
    forks.append(h.fork(forks[0]))
    texts = h.run()
    assert all(texts[x] == h.delivered[x] == reference_tokens(PROMPT, 9) for x in [rid, *forks])
    assert h.num_free_blocks == 99


@pytest.mark.parametrize("said", [[], [0], [0, 1], [0, 1, 2, 3]])
def test_forks_with_drafts_do_not_write_into_each_other(said: list[int]) -> None:
    """The parent's table is longer than what it has computed: its rejected drafts were there."""
    h = small(num_speculative_tokens=4, block_size=2)
    text = reference_tokens(PROMPT, 12)
    rid = h.add(PROMPT, max_tokens=12)
    h.update(h.schedule(), drafts={rid: [text[1 + i] for i in said] + [1] * (4 - len(said))})
    h.step()
    fork = h.fork(rid)
    known = len(h.request(rid).output_token_ids)
    h.update(h.schedule(), tokens={rid: [text[known]], fork: [50]})
    texts = h.run()
    assert texts[rid] == text
    branch = [*text[:known], 50]
    assert texts[fork] == branch + reference_tokens(PROMPT + branch, 12 - len(branch))


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("groups", [("full",), ("window:5",), ("full", "window:5")])
def test_a_fork_with_steps_under_way(ahead: int, groups: tuple[str, ...]) -> None:
    texts = []
    for forks in (False, True):
        h = small(async_scheduling=True, kv_groups=groups)
        rid = h.add(PROMPT, max_tokens=12)
        flight = []
        for step in range(60):
            flight.append(h.schedule())
            if forks and step in (1, 4, 7):
                h.fork(rid)
            while len(flight) > ahead - 1:
                h.update(flight.pop(0))
            h.check_invariants()
        assert not h.scheduler.has_work()
        texts += [h.request(x).output_token_ids for x in h.requests]
    assert len(texts) == 5 and all(text == texts[0] for text in texts)


def test_a_fork_in_a_full_pool_makes_room_for_its_copy() -> None:
    h = small(num_blocks=7)
    rid = h.add(PROMPT, max_tokens=2)
    h.step()
    fork = h.fork(rid)
    assert h.num_free_blocks == 0
    out = h.schedule()
    assert out.preempted_req_ids == [fork] and list(out.num_scheduled_tokens) == [rid]
    h.update(out)
    texts = h.run()
    assert texts[rid] == texts[fork] == reference_tokens(PROMPT, 2)


def test_a_fork_is_not_charged_for_what_it_shares() -> None:
    """Its tenant has paid for the prompt once."""
    h = small(policy="fair")
    rid = h.add(PROMPT, max_tokens=9, tenant="a")
    h.step()
    fair = h.scheduler.state.policy.policy
    before = fair.counters["a"]  # type: ignore[attr-defined]
    h.fork(rid)
    h.step()
    assert fair.counters["a"] - before == 2 * 2.0  # type: ignore[attr-defined]  # an output token each


def test_the_tables_of_forks_are_told_once_and_copies_come_with_them() -> None:
    h = small()
    rid = h.add(PROMPT, max_tokens=9)
    h.step()
    fork = h.fork(rid)
    out = h.schedule()
    (new,) = out.new_requests
    assert new.request_id == fork and len(new.token_ids) == 23 and new.num_computed_tokens == 22
    ((source, copy),) = out.blocks_to_copy
    assert copy not in (source, 0) and source in h.request(rid).block_ids + h.request(fork).block_ids
    h.update(out)
    assert h.schedule().new_requests == []


# ---- siblings


def siblings(h: SchedulerHarness, count: int, prompt: list[int], **options: Any) -> list[str]:
    first = h.add(prompt, **options)
    return [first, *(h.add(prompt, fork_of=first, **options) for _ in range(count - 1))]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 22])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_of_siblings_is_computed_once(length: int, caching: bool) -> None:
    h = small(enable_prefix_caching=caching)
    ids = siblings(h, 4, PROMPT[:length], max_tokens=3)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT[:length], 3) for rid in ids)
    assert h.scheduler.stats.scheduled_tokens == length + 3 * 1 + 4 * 2  # its last token for each of the others


def test_siblings_wait_until_all_but_the_last_token_is_there() -> None:
    h = small(max_num_batched_tokens=9)
    first, second = siblings(h, 2, PROMPT, max_tokens=3)
    steps = []
    while h.request(second).status is RequestStatus.WAITING:
        out = h.schedule()
        steps.append(out.num_scheduled_tokens)
        if second not in out.num_scheduled_tokens:
            full = sum(out.num_scheduled_tokens.values()) == 9
            assert h.request(second).blocked_by is (BlockedBy.TOKEN_BUDGET if full else BlockedBy.POLICY)
        h.update(out)
    assert steps == [{first: 9}, {first: 9}, {first: 4}, {first: 1, second: 1}]


@pytest.mark.parametrize("when", range(4))
def test_a_sibling_whose_elder_is_gone_computes_for_itself(when: int) -> None:
    h = small(max_num_batched_tokens=9)
    first, second = siblings(h, 2, PROMPT, max_tokens=3)
    for _ in range(when):
        h.step()
    h.abort(first)
    assert h.run()[second] == reference_tokens(PROMPT, 3)


def test_a_sibling_of_a_preempted_request_waits_for_it_again() -> None:
    h = small(max_num_batched_tokens=9, preempt_probability=0.4, seed=3)
    ids = siblings(h, 4, PROMPT, max_tokens=6)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 6) for rid in ids) and h.scheduler.stats.preemptions


def test_an_urgent_sibling_does_not_throw_out_whose_blocks_it_reads() -> None:
    h = small(policy="priority", num_blocks=8, max_num_seqs=2)
    first = h.add(PROMPT, max_tokens=4, priority=5)
    h.step()
    second = h.add(PROMPT, max_tokens=4, priority=0, fork_of=first)
    out = h.schedule()
    assert out.preempted_req_ids == [] or second in out.num_scheduled_tokens
    h.update(out)
    texts = h.run()
    assert texts[first] == texts[second] == reference_tokens(PROMPT, 4)


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    h = small()
    first = h.add(PROMPT, max_tokens=2)
    h.step()
    sampling = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    h.scheduler.add_request(Request("second", PROMPT, sampling, fork_of=first))
    assert h.schedule().num_scheduled_tokens["second"] == len(PROMPT)


# ---- siblings that never run at the same time


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 22])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once_for_siblings_that_run_one_after_the_other(length: int, caching: bool) -> None:
    h = small(enable_prefix_caching=caching, max_num_seqs=1)
    ids = siblings(h, 4, PROMPT[:length], max_tokens=3)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT[:length], 3) for rid in ids)
    if not caching:
        assert h.scheduler.stats.scheduled_tokens == length + 3 * 1 + 4 * 2
    assert h.num_free_blocks == 99


def test_a_kept_prompt_is_taken_by_whoever_is_short_of_blocks() -> None:
    """One that comes before the heir needs all but one block, and gets them; the heir computes the prompt again."""
    h = small(num_blocks=10, max_num_seqs=1, policy="priority")
    first, second = siblings(h, 2, PROMPT, max_tokens=3, priority=1)
    while h.request(first).status is not RequestStatus.FINISHED_LENGTH:
        h.step()
    assert h.num_free_blocks == 3  # six blocks of the prompt are kept
    urgent = h.add(30, max_tokens=3, priority=0)
    out = h.schedule()
    assert out.num_scheduled_tokens == {urgent: 30} and h.num_free_blocks == 1
    h.update(out)
    assert h.run()[second] == reference_tokens(PROMPT, 3)
    assert h.scheduler.stats.scheduled_tokens == 24 + 32 + 24


def test_a_running_one_that_grows_takes_a_kept_prompt_before_anybody_is_preempted() -> None:
    """The heir cannot start yet: its grammar is not ready."""
    h = small(num_blocks=10, max_num_seqs=2)
    grows = h.add(4, max_tokens=25)
    first = h.add(PROMPT, max_tokens=2)
    h.add(PROMPT, max_tokens=2, fork_of=first, grammar="pending", request_id="heir")
    for _ in range(2):
        h.step()
    assert h.request(first).status.finished and len(h.scheduler.state.kept_prompts) == 1
    while not h.request(grows).status.finished:
        h.step()
        h.check_invariants()
    assert not len(h.scheduler.state.kept_prompts) and h.scheduler.stats.preemptions == 0
    h.grammar_ready("heir")
    assert h.run()["heir"] == reference_tokens(PROMPT, 2)


@pytest.mark.parametrize("num_blocks", [7, 8])
def test_an_heir_in_a_pool_that_cannot_hold_the_copied_block_twice_computes_again(num_blocks: int) -> None:
    """22 tokens and one more are six blocks; with the prompt kept the open one is held twice."""
    h = small(num_blocks=num_blocks, max_num_seqs=1)
    ids = siblings(h, 3, PROMPT, max_tokens=2)
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PROMPT, 2) for rid in ids)
    assert h.scheduler.stats.scheduled_tokens == (3 * 23 if num_blocks == 7 else 23 + 2 * 2)


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_a_kept_prompt_goes_on_to_the_next_when_its_heir_is_aborted(aborted: int) -> None:
    h = small(max_num_seqs=1)
    ids = siblings(h, 3, PROMPT, max_tokens=3)
    h.step()
    h.step()
    h.abort(ids[0])
    h.abort(ids[aborted])
    h.check_invariants()
    texts = h.run()
    left = [rid for rid in ids[1:] if rid != ids[aborted]]
    assert all(texts[rid] == reference_tokens(PROMPT, 3) for rid in left)
    assert h.scheduler.stats.scheduled_tokens == 23 + 3 * len(left) and h.num_free_blocks == 99


def test_what_an_error_has_left_is_not_kept() -> None:
    h = small(max_num_seqs=1)
    first, _ = siblings(h, 2, PROMPT, max_tokens=3)
    h.step()
    h.scheduler.state.end(h.requests[first], RequestStatus.FINISHED_ERROR, error="NaN")
    assert not len(h.scheduler.state.kept_prompts) and h.num_free_blocks == 99
    h.run()
