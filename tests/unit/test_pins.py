"""Pinned prefixes: kept whatever else is cached, for a time and up to a bound, and never at anybody's life."""

from __future__ import annotations

from typing import Any

import pytest

from kvern.request import RequestStatus
from kvern.sampling_params import InvalidRequest
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens

PREFIX = own_tokens("prefix", 18)  # four full blocks of four, and two tokens


def small(**config: Any) -> SchedulerHarness:
    return SchedulerHarness(**{"num_blocks": 17, "block_size": 4, "max_pinned_blocks": 8} | config)


def view(h: SchedulerHarness) -> list[tuple[int, int]]:
    return [(pin.num_blocks, pin.num_cached) for pin in h.scheduler.pins(h.clock.now())]


def crowd_out(h: SchedulerHarness) -> None:
    """Others use every block that can be had."""
    for _ in range(3):
        h.add(4 * h.num_free_blocks - 1, max_tokens=1)
        h.run()


def hits(h: SchedulerHarness, prompt: list[int], **options: Any) -> int:
    """How many tokens of a prompt are found in the cache; its text is right."""
    rid = h.add(prompt, max_tokens=3, **options)
    assert h.run()[rid] == reference_tokens(prompt, 3)
    return h.request(rid).num_cached_tokens


def test_a_pinned_prefix_outlives_what_would_evict_it() -> None:
    for pinned, found in ((False, 0), (True, 16)):
        h = small()
        hits(h, PREFIX)
        if pinned:
            h.pin(PREFIX, ttl=100.0)
            assert view(h) == [(4, 4)] and h.num_free_blocks == 12
        crowd_out(h)
        assert hits(h, [*PREFIX, 7, 8, 9]) == found
        h.check_invariants()


def test_a_pin_takes_hold_as_its_blocks_become_cached() -> None:
    h = small(max_num_batched_tokens=8)
    h.pin(PREFIX, ttl=100.0)
    assert view(h) == [(4, 0)] and h.num_free_blocks == 16
    rid = h.add(PREFIX, max_tokens=3)
    seen = []
    while h.scheduler.has_work():
        h.step()
        h.check_invariants()
        seen.append(view(h)[0][1])
    h.step()
    assert seen[:3] == [0, 2, 4] and h.request(rid).status.finished
    crowd_out(h)
    assert hits(h, [*PREFIX, 7]) == 16


def test_time_is_what_the_caller_says() -> None:
    h = small()
    hits(h, PREFIX)
    h.clock.advance(10.0)
    h.pin(PREFIX, ttl=5.0)
    h.clock.advance(4.5)
    h.step()
    assert h.scheduler.num_pinned_blocks == 4
    h.clock.advance(0.5)
    h.step()
    assert h.scheduler.num_pinned_blocks == 0 and h.num_free_blocks == 16
    crowd_out(h)
    assert hits(h, [*PREFIX, 7]) == 0


def test_unpinning() -> None:
    h = small()
    hits(h, PREFIX)
    pin, other = h.pin(PREFIX, ttl=9.0), h.pin(PREFIX[:8], ttl=9.0)
    assert h.scheduler.num_pinned_blocks == 4, "two of them by both"
    assert h.unpin(pin) and not h.unpin(pin) and not h.unpin("pin-77")
    assert h.scheduler.num_pinned_blocks == 2 and h.num_free_blocks == 14
    h.check_invariants()
    crowd_out(h)
    assert hits(h, [*PREFIX, 7]) == 8
    assert h.unpin(other) and h.num_free_blocks == 16


def test_no_more_than_the_limit_and_equal_blocks_count_once() -> None:
    h = small(max_pinned_blocks=5)
    h.pin(PREFIX, ttl=9.0)
    h.pin(PREFIX, ttl=20.0)
    with pytest.raises(InvalidRequest, match="with it 6 would be pinned, max_pinned_blocks is 5") as refused:
        h.pin(own_tokens("other", 8), ttl=9.0)
    assert refused.value.param == "prompt" and len(view(h)) == 2
    h.pin(own_tokens("other", 4), ttl=9.0)
    h.clock.advance(10.0)
    h.pin([*PREFIX[:16], *own_tokens("more", 4)], ttl=9.0)
    assert len(view(h)) == 2, "those whose time is over count no more"


def test_a_quarter_of_the_cache_if_nothing_is_said_and_none_at_zero() -> None:
    h = small(max_pinned_blocks=None)
    h.pin(PREFIX[:16], ttl=9.0)
    with pytest.raises(InvalidRequest, match="max_pinned_blocks is 4"):
        h.pin([7] * 4, ttl=9.0)
    with pytest.raises(InvalidRequest, match="max_pinned_blocks is 0"):
        small(max_pinned_blocks=0).pin(PREFIX, ttl=9.0)


@pytest.mark.parametrize(
    ("prefix", "ttl", "param", "says"),
    [
        (PREFIX[:3], 9.0, "prompt", "3 tokens, and what is pinned are full blocks of 4"),
        ([], 9.0, "prompt", "0 tokens"),
        ([5] * 4096, 9.0, "prompt", "max_model_len is 4096"),
        (PREFIX, 0.0, "ttl", "above 0, got 0.0"),
        (PREFIX, -1, "ttl", "above 0"),
        (PREFIX, float("nan"), "ttl", "got nan"),
        (PREFIX, float("inf"), "ttl", "got inf"),
        (PREFIX, "soon", "ttl", "got 'soon'"),
        (PREFIX, True, "ttl", "got True"),
    ],
)
def test_what_cannot_be_pinned(prefix: list[int], ttl: Any, param: str, says: str) -> None:
    h = small()
    with pytest.raises(InvalidRequest, match=says) as refused:
        h.pin(prefix, ttl=ttl)
    assert refused.value.param == param and view(h) == []


def test_without_a_prefix_cache_there_is_nothing_to_pin() -> None:
    with pytest.raises(InvalidRequest, match="enable_prefix_caching is off"):
        small(enable_prefix_caching=False).pin(PREFIX, ttl=9.0)


def test_salt_and_adapter_are_part_of_the_prefix() -> None:
    h = small()
    h.add(PREFIX, max_tokens=1, cache_salt="a")
    h.add(PREFIX, max_tokens=1, lora="l")
    h.run()
    for options, there in (({}, 0), ({"cache_salt": "a"}, 4), ({"lora": "l"}, 4), ({"cache_salt": "b"}, 0)):
        pin = h.pin(PREFIX, ttl=9.0, **options)
        assert view(h) == [(4, there)]
        h.unpin(pin)


def test_pinned_blocks_are_not_free_for_admission_and_the_reason_says_so() -> None:
    h = small()
    hits(h, PREFIX)
    h.pin(PREFIX, ttl=9.0)
    h.add(20, max_tokens=9, request_id="runs")
    h.step()
    h.add(31, request_id="waits")  # 8 blocks; 16 - 4 - 5 are free, and then one is taken
    h.step()
    why = h.request("waits").explanation
    assert why is not None and (why.blocks_short, why.blocks_pinned) == (2, 4)
    assert "short of 2 blocks (4 are pinned)" in str(why)
    h.unpin("pin-0")
    h.step()
    assert h.request("waits").status is RequestStatus.RUNNING


def test_one_that_runs_alone_takes_what_is_pinned_before_it_fails() -> None:
    h = small(num_blocks=9)
    hits(h, PREFIX)
    h.pin(PREFIX[:8], ttl=50.0)
    h.pin(PREFIX[8:], ttl=5.0)  # not cached, so it is not in the way
    h.pin(PREFIX, ttl=9.0)
    rid = h.add(4, max_tokens=29)
    text = h.run()[rid]
    assert h.request(rid).error is None and text == reference_tokens(h.requests[rid].token_ids[:4].tolist(), 29)
    assert h.scheduler.stats.pins_given_up == 2 and view(h) == [(2, 0)]


def test_one_that_could_not_start_beside_a_pin_makes_it_give_way() -> None:
    h = small(num_blocks=9)
    hits(h, PREFIX)
    h.pin(PREFIX[:8], ttl=50.0)
    h.pin(PREFIX[:12], ttl=9.0)
    rid = h.add(25, max_tokens=2)  # 7 of 8 blocks
    out = h.schedule()
    assert out.num_scheduled_tokens == {rid: 25}
    h.update(out)
    assert view(h) == [] and h.scheduler.stats.pins_given_up == 2
    small_one = h.add(3, max_tokens=2)
    assert len(h.run()[small_one]) == 2


def test_a_pin_stays_while_others_run_who_will_make_room() -> None:
    h = small(num_blocks=9)
    hits(h, PREFIX)
    h.pin(PREFIX[:8], ttl=50.0)
    first, second = h.add(20, max_tokens=2), h.add(20, max_tokens=2)
    texts = h.run()
    assert len(texts[first]) == len(texts[second]) == 2 and view(h) == [(2, 2)]


def test_a_pin_does_not_take_what_an_admitted_prompt_will_need() -> None:
    """Cached blocks are free until somebody takes them; all but one are spoken for."""
    h = small(num_blocks=11, max_num_batched_tokens=4)
    hits(h, PREFIX)
    rid = h.add(36, max_tokens=1)  # 9 of 10 blocks, one at a time
    h.step()
    h.pin(PREFIX, ttl=9.0)
    assert view(h) == [(4, 1)]
    h.run()
    assert h.scheduler.stats.preemptions == 0 and h.request(rid).error is None


def test_what_turns_out_wrong_is_not_pinned_any_longer() -> None:
    h = small()
    hits(h, PREFIX)
    h.pin(PREFIX, ttl=9.0)
    rid = h.add([*PREFIX, 9], max_tokens=2)
    h.schedule()
    cache = h.scheduler.state.cache
    cache.distrust(h.scheduler.state.batch.tables_of(h.requests[rid].row)[:, 2:])
    assert view(h) == [(4, 2)]
    h.check_invariants()
    h.abort(rid)
    assert hits(h, [*PREFIX, 9]) == 8
    h.step()
    assert view(h) == [(4, 4)]


def test_of_a_window_only_what_the_next_token_reads_is_pinned() -> None:
    h = small(kv_groups=("full", "window:6"), num_blocks=40)
    h.add(PREFIX, max_tokens=1)
    h.run()
    h.pin(PREFIX, ttl=9.0)
    assert view(h) == [(4 + 2, 6)]
    h.check_invariants()
    crowd_out(h)
    rid = h.add([*PREFIX, 9], max_tokens=1)
    h.run()
    assert h.request(rid).num_cached_tokens == 16


def test_pins_and_swapped_requests_share_blocks() -> None:
    h = small(preemption="swap", host_blocks=8)
    rid = h.add(PREFIX, max_tokens=5)
    h.step()
    h.pin(PREFIX, ttl=9.0)
    h.scheduler.preempt(rid)
    h.check_invariants()
    assert h.num_free_blocks == 12
    assert h.run()[rid] == reference_tokens(PREFIX, 5)


def test_a_pin_of_blocks_that_the_running_one_uses_itself_is_not_in_its_way() -> None:
    h = small(num_blocks=9)
    hits(h, PREFIX)
    hits(h, own_tokens("other", 9))
    h.pin(PREFIX[:8], ttl=5.0)
    h.pin(own_tokens("other", 8), ttl=50.0)
    rid = h.add(PREFIX, max_tokens=14)  # 31 tokens computed: all 8 blocks
    assert h.run()[rid] == reference_tokens(PREFIX, 14)
    assert [pin.expires for pin in h.scheduler.pins(0.0)] == [5.0] and h.scheduler.stats.pins_given_up == 1


def test_a_batch_that_has_just_been_swapped_out_whole_is_no_reason_to_give_up_a_pin() -> None:
    h = small(num_blocks=7, preemption="swap", host_blocks=8)
    hits(h, [7, 7, 7, 7, 7])
    h.pin([7, 7, 7, 7], ttl=50.0)
    first = h.add(PREFIX[:14], max_tokens=5)
    h.step()
    ids = [first, h.fork(first), h.fork(first)]
    h.step()
    assert [h.request(rid).status for rid in ids] == [RequestStatus.SWAPPED] * 3
    assert view(h) == [(1, 1)]
    texts = h.run()
    assert all(texts[rid] == reference_tokens(PREFIX[:14], 5) for rid in ids) and view(h) == [(1, 1)]
