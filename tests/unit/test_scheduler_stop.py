"""What ends a request, in which order, and what is delivered: EOS, stop ids, minimum and maximum length."""

from __future__ import annotations

from typing import Any

import pytest

from kvern.request import Request, RequestStatus
from kvern.sampling_params import SamplingParams
from kvern.step import FinishedRequest
from kvern.testing import SchedulerHarness

EOS = 2


def harness_with(rid: str = "it", **params: Any) -> SchedulerHarness:
    h = SchedulerHarness(eos_token_id=EOS, num_speculative_tokens=3, async_scheduling=False, max_model_len=64)
    request = Request(rid, [7, 8, 9], SamplingParams(temperature=0.0, **params))
    h.scheduler.add_request(request)
    h.requests[rid], h.delivered[rid] = request, []
    return h


def feed(h: SchedulerHarness, *tokens: int, rid: str = "it") -> FinishedRequest | None:
    """One token a step, until the request ends."""
    for token in tokens:
        ended = h.update(h.schedule(), tokens={rid: [token]}).finished
        if ended:
            return ended[0]
    return None


def test_eos_has_no_stop_reason_and_a_stop_id_has() -> None:
    ended = feed(harness_with(max_tokens=9, stop_token_ids=(50,)), 4, EOS)
    assert ended is not None and (ended.status, ended.stop_reason) == (RequestStatus.FINISHED_STOPPED, None)
    ended = feed(harness_with(max_tokens=9, stop_token_ids=(50,)), 4, 50)
    assert ended is not None and (ended.status, ended.stop_reason) == (RequestStatus.FINISHED_STOPPED, 50)


def test_ignored_eos_may_still_be_a_stop_id() -> None:
    h = harness_with(max_tokens=3, ignore_eos=True)
    ended = feed(h, EOS, EOS, EOS)
    assert ended is not None and ended.status is RequestStatus.FINISHED_LENGTH and h.delivered["it"] == [EOS] * 3
    ended = feed(harness_with(max_tokens=3, ignore_eos=True, stop_token_ids=(EOS,)), EOS)
    assert ended is not None and ended.stop_reason == EOS


def test_stop_before_length_when_both_hold() -> None:
    """The order is EOS, stop ids, length: a stop token in the last place is a stop."""
    for token in (EOS, 50):
        ended = feed(harness_with(max_tokens=2, stop_token_ids=(50,)), 4, token)
        assert ended is not None and ended.status is RequestStatus.FINISHED_STOPPED


@pytest.mark.parametrize("place", [0, 3, 4, 11])
def test_many_stop_ids_in_one_batch_with_few(place: int) -> None:
    """The table of stop ids widens; rows without so many are not stopped by what fills it."""
    stops = tuple(range(100, 112))
    h = harness_with(max_tokens=9, stop_token_ids=stops)
    plain = h.add(3, max_tokens=30)
    ended = feed(h, 4, stops[place])
    assert ended is not None and ended.stop_reason == stops[place]
    h.update(h.schedule(), tokens={plain: [0]})
    assert h.request(plain).status is RequestStatus.RUNNING


def test_a_row_used_again_forgets_the_stop_ids_before() -> None:
    h = harness_with(max_tokens=9, stop_token_ids=tuple(range(100, 112)))
    feed(h, 105)
    second = h.add(3, max_tokens=3)
    for token in (105, 100, 111):
        h.update(h.schedule(), tokens={second: [token]})
    assert h.delivered[second] == [105, 100, 111]


@pytest.mark.parametrize("token", [EOS, 50])
def test_nothing_but_the_length_ends_a_request_before_min_tokens(token: int) -> None:
    h = harness_with(max_tokens=9, min_tokens=3, stop_token_ids=(50,))
    ended = feed(h, token, token, token, token)
    assert ended is not None and h.delivered["it"] == [token] * 3
    h = harness_with(max_tokens=2, min_tokens=2, stop_token_ids=(50,))
    ended = feed(h, token, 4)
    assert ended is not None and ended.status is RequestStatus.FINISHED_LENGTH


def test_min_tokens_and_stops_hold_for_tokens_that_come_late() -> None:
    """Preempted with a token under way, the request is in the queue when it arrives; the rules are the same."""
    for min_tokens, expected in ((1, RequestStatus.FINISHED_STOPPED), (2, RequestStatus.PREEMPTED)):
        h = harness_with(max_tokens=5, min_tokens=min_tokens, stop_token_ids=(50,))
        out = h.schedule()
        h.scheduler.preempt("it")
        ended = h.update(out, tokens={"it": [50]}).finished
        assert h.delivered["it"] == [50] and h.request("it").status is expected
        assert [f.stop_reason for f in ended] == ([50] if min_tokens == 1 else [])
        h.check_invariants()


def test_late_token_that_reaches_the_length_ends_the_request() -> None:
    h = harness_with(max_tokens=1)
    out = h.schedule()
    h.scheduler.preempt("it")
    assert h.update(out, tokens={"it": [4]}).finished[0].status is RequestStatus.FINISHED_LENGTH
    assert h.scheduler.schedule(0.0).empty and not h.scheduler.has_work()


@pytest.mark.parametrize(("params", "kept"), [({"stop_token_ids": (50,)}, 2), ({}, 4), ({"max_tokens": 3}, 3)])
def test_accepted_drafts_are_cut_at_the_first_reason_to_stop(params: dict[str, Any], kept: int) -> None:
    """A step that brings several tokens ends where a step of one token each would have ended."""
    h = harness_with(**({"max_tokens": 20} | params))
    h.update(h.schedule(), tokens={"it": [4]}, drafts={"it": [50, 5, EOS]})
    h.update(h.schedule(), tokens={"it": [50, 5, EOS, 6]})
    assert h.delivered["it"] == [4, 50, 5, EOS, 6][:kept]
    assert h.request("it").status.finished


def test_min_tokens_inside_accepted_drafts() -> None:
    h = harness_with(max_tokens=20, min_tokens=3, stop_token_ids=(50,))
    h.update(h.schedule(), tokens={"it": [4]}, drafts={"it": [50, 50, 50]})
    h.update(h.schedule(), tokens={"it": [50, 50, 50, 6]})
    assert h.delivered["it"] == [4, 50, 50]


def test_max_tokens_none_means_what_is_left_of_max_model_len() -> None:
    h = harness_with(max_tokens=None, ignore_eos=True)
    h.run()
    assert len(h.delivered["it"]) == 64 - 3
