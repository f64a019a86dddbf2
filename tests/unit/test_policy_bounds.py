"""What the policies promise, over random workloads: bounds on the gap between tenants, on waiting and overtaking, on
who is preempted how often. A bound is checked in every step, against numbers that the test counts itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest

from kvern.request import RequestStatus
from kvern.scheduler.policies.fair import Fair
from kvern.step import SchedulerOutput
from kvern.testing import SchedulerHarness
from kvern.testing.harness import own_tokens

STEM = own_tokens("stem", 100)


@dataclass
class Arrival:
    at: float
    prompt: list[int]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Story:
    """A run and when each of its requests was first scheduled: the number of the step."""

    h: SchedulerHarness
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    steps: int = 0


def tell(
    h: SchedulerHarness,
    arrivals: list[Arrival],
    look: Callable[[Story, SchedulerOutput], None] = lambda story, out: None,
    step_time: float = 0.05,
    most_steps: int = 5000,
) -> Story:
    """Let everybody arrive in time and run to the end. `look` is called between planning and update."""
    story, due = Story(h), sorted(arrivals, key=lambda a: a.at)
    while due or h.scheduler.has_work():
        while due and due[0].at <= h.clock.now():
            a = due.pop(0)
            story.arrivals[h.add(a.prompt, a.max_tokens, at=a.at, **a.options)] = a
        out = h.schedule()
        for rid in out.request_ids:
            story.started.setdefault(rid, story.steps)
        look(story, out)
        h.update(out)
        h.check_invariants()
        h.clock.advance(step_time)
        story.steps += 1
        assert story.steps < most_steps, "not drained"
    return story


def random_arrivals(rng: random.Random, count: int, most_prompt: int = 60, shared: bool = False) -> list[Arrival]:
    found, now = [], 0.0
    for i in range(count):
        now += rng.choice([0.0, 0.0, 0.01, 0.2, 1.0])
        length = rng.randint(1, most_prompt)
        stem = rng.randint(0, length) if shared else 0
        found.append(Arrival(now, STEM[:stem] + own_tokens(f"own{i}", length - stem), rng.randint(1, 12)))
    return found


# ---- fair: the gap between tenants


def play_tenants(seed: int) -> float:
    """Two or three tenants with more work than can run. Returns the widest gap of counters, as a share of its bound.

    While two tenants both have somebody waiting, their counters differ by at most the bound U of the policy's
    docstring, and the service that they have got since then, over their weights, by at most 2 U."""
    rng = random.Random(seed)
    tenants = ["a", "b", "c"][: rng.choice([2, 3])]
    weights = {tenant: rng.choice([0.5, 1.0, 2.0, 3.0]) for tenant in tenants}
    size, blocks, most_prompt = 4, rng.choice([12, 30]), 40
    h = SchedulerHarness(
        num_blocks=blocks + 1,
        block_size=size,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([8, 32, 256]),
        max_model_len=48,
        policy="fair",
        policy_options={"weights": weights},
        enable_prefix_caching=rng.random() < 0.5,
    )
    policy = h.scheduler.state.policy.policy
    assert isinstance(policy, Fair)
    arrivals = random_arrivals(rng, 60, most_prompt)
    for a in arrivals:
        a.at /= 4
        a.options["tenant"] = rng.choice(tenants)
    bound = max(policy.prompt_cost * most_prompt, policy.output_cost * blocks * size) / min(weights.values())
    since: dict[tuple[str, str], dict[str, float]] = {}  # counters when both became backlogged
    widest = 0.0

    def look(story: Story, out: SchedulerOutput) -> None:
        nonlocal widest
        waiting = {request.tenant for request in h.scheduler.waiting()}
        for pair in combinations(tenants, 2):
            if not set(pair) <= waiting:
                since.pop(pair, None)
                continue
            now = {tenant: policy.counters[tenant] for tenant in pair}
            then = since.setdefault(pair, now)
            gap = abs(now[pair[0]] - now[pair[1]])
            service = abs((now[pair[0]] - then[pair[0]]) - (now[pair[1]] - then[pair[1]]))
            assert gap <= bound, f"seed {seed}: {now} differ by {gap}, the bound is {bound}"
            assert service <= 2 * bound, f"seed {seed}: service differs by {service}, the bound is {2 * bound}"
            widest = max(widest, gap / bound)

    tell(h, arrivals, look)
    return widest


def test_the_gap_between_backlogged_tenants_is_bounded() -> None:
    widest = max(play_tenants(seed) for seed in range(5))
    assert widest > 0.2, "nothing came near the bound: the test proves nothing"


@pytest.mark.slow
def test_the_gap_between_backlogged_tenants_is_bounded_in_many_runs() -> None:
    for seed in range(5, 100):
        play_tenants(seed)


def test_a_tenant_that_floods_does_not_starve_another() -> None:
    """Under fcfs the other one would wait for all sixty."""
    waited = {}
    for policy in ("fcfs", "fair"):
        h = SchedulerHarness(num_blocks=40, block_size=4, max_num_seqs=2, policy=policy)
        flood = [Arrival(0.0, own_tokens(f"f{i}", 20), 8, {"tenant": "flood"}) for i in range(60)]
        story = tell(h, [*flood, Arrival(0.5, own_tokens("one", 20), 8, {"tenant": "other"})])
        waited[policy] = story.started["r60"] - 10
    assert waited["fair"] <= 9 < 200 < waited["fcfs"], waited


# ---- ageing: nobody waits for ever


@pytest.mark.parametrize("seed", range(6))
def test_shortest_is_overtaken_only_by_who_comes_soon_after(seed: int) -> None:
    rng, ageing = random.Random(seed), 50.0
    h = SchedulerHarness(
        num_blocks=30, block_size=4, max_num_seqs=2, policy="shortest", policy_options={"ageing": ageing}
    )
    story = tell(h, random_arrivals(rng, 30))
    overtakings = 0
    for one, other in combinations(story.arrivals, 2):
        first, second = story.arrivals[one], story.arrivals[other]
        if story.started[other] < story.started[one]:
            overtakings += 1
            work = len(first.prompt) + first.max_tokens
            assert second.at - first.at <= work / ageing, f"{other} came {second.at - first.at} s after {one}"
    assert overtakings, "nobody overtook anybody: the test proves nothing"


@pytest.mark.parametrize("seed", range(6))
def test_prefix_is_overtaken_only_by_who_comes_soon_after(seed: int) -> None:
    rng, ageing, most = random.Random(seed), 80.0, 90
    h = SchedulerHarness(
        num_blocks=40,
        block_size=4,
        max_num_seqs=2,
        max_model_len=most,
        policy="prefix",
        policy_options={"ageing": ageing},
    )
    story = tell(h, random_arrivals(rng, 30, shared=True))
    overtakings = 0
    for one, other in combinations(story.arrivals, 2):
        if story.started[other] < story.started[one]:
            overtakings += 1
            assert story.arrivals[other].at - story.arrivals[one].at <= most / ageing
    assert overtakings


@pytest.mark.parametrize("policy", ["shortest", "prefix", "fair", "deadline"])
def test_a_stream_of_favoured_requests_does_not_keep_one_waiting_for_ever(policy: str) -> None:
    """A long prompt of its own, and for ever short ones that the policy likes better."""
    h = SchedulerHarness(num_blocks=60, block_size=4, max_num_seqs=1, max_num_batched_tokens=64, policy=policy)
    h.add(STEM[:40], max_tokens=1)
    h.step()
    long = h.add(150, max_tokens=2, tenant="a", ttft_target=3.0, at=h.clock.now())
    for i in range(200):
        if h.request(long).status is RequestStatus.FINISHED_LENGTH:
            return
        at = h.clock.now()
        h.add(STEM[:40] + own_tokens(f"s{i}", 2), max_tokens=1, tenant="b", ttft_target=0.5, at=at)
        h.step()
        h.clock.advance(0.05)
    raise AssertionError(f"still {h.request(long).status} after 200 steps")


# ---- overtaking


@pytest.mark.parametrize("max_bypass", [0, 1, 3])
def test_at_most_max_bypass_requests_overtake_one(max_bypass: int) -> None:
    most = 0
    for seed in range(6):
        rng = random.Random(seed)
        h = SchedulerHarness(
            num_blocks=14, block_size=4, max_num_seqs=6, max_bypass=max_bypass, enable_prefix_caching=False
        )
        story = tell(h, random_arrivals(rng, 25, most_prompt=40))
        for one in story.arrivals:
            later = [other for other in story.arrivals if int(other[1:]) > int(one[1:])]
            passed = [other for other in later if story.started[other] < story.started[one]]
            assert len(passed) <= max_bypass, f"seed {seed}: {passed} overtook {one}"
            most = max(most, len(passed))
    assert most == max_bypass, "the bound was never reached: the test proves nothing"


# ---- mixed batching: decodes go on


@pytest.mark.parametrize("seed", range(8))
def test_a_decode_is_left_out_only_if_those_before_it_took_the_whole_step(seed: int) -> None:
    rng = random.Random(seed)
    h = SchedulerHarness(
        num_blocks=200,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([4, 12, 40]),
        long_prefill_token_threshold=rng.choice([0, 6]),
    )
    decoding: set[str] = set()  # after the last step

    def look(story: Story, out: SchedulerOutput) -> None:
        n = out.num_scheduled_tokens
        order = [request.id for request in h.scheduler.running()]
        for place, rid in enumerate(order):
            if rid in decoding and rid not in n:
                assert sum(n.get(other, 0) for other in order[:place]) == h.scheduler.config.max_num_batched_tokens
        views = map(h.request, order)
        decoding.clear()
        decoding.update(v.id for v in views if v.num_computed_tokens == v.num_tokens)

    tell(h, random_arrivals(rng, 20, most_prompt=90), look)


def test_a_stream_never_waits_for_a_long_prompt() -> None:
    """It gets a token in each step in which a prompt of 600 tokens is computed in chunks of 64."""
    h = SchedulerHarness(num_blocks=100, max_num_batched_tokens=64)
    stream = h.add(10, max_tokens=40)
    h.step()
    long = h.add(600, max_tokens=1)
    chunks = []
    while not h.request(long).status.finished:
        out = h.schedule()
        assert out.num_scheduled_tokens[stream] == 1
        chunks.append(out.num_scheduled_tokens[long])
        h.update(out)
    assert chunks == [63] * 9 + [600 - 9 * 63]


# ---- preemption


def count_second_preemptions(seed: int, policy: str, victim: str) -> int:
    rng = random.Random(seed)
    h = SchedulerHarness(
        num_blocks=12,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([8, 64]),
        policy=policy,
        victim=victim,
    )
    had: dict[str, int] = {}  # tokens at the last preemption
    twice = 0

    def look(story: Story, out: SchedulerOutput) -> None:
        nonlocal twice
        stays = map(h.request, [request.id for request in h.scheduler.running()])
        others = [v.id for v in stays if v.num_preemptions == 0 or v.num_tokens > had[v.id]]
        for rid in out.preempted_req_ids:
            view = h.request(rid)
            twice += view.num_preemptions > 1
            if had.get(rid) == view.num_tokens:
                assert not others, f"{rid} was preempted twice, {others} could have been"
            had[rid] = view.num_tokens

    arrivals = random_arrivals(rng, 25, most_prompt=24)
    for a in arrivals:
        a.options, a.max_tokens = {"tenant": rng.choice("ab")}, rng.randint(1, 18)
    tell(h, arrivals, look)
    return twice


@pytest.mark.parametrize("victim", ["policy", "newest", "least_computed"])
@pytest.mark.parametrize("policy", ["fcfs", "fair", "shortest", "deadline", "prefix"])
def test_nobody_is_preempted_twice_without_a_token_while_another_could_be(policy: str, victim: str) -> None:
    twice = sum(count_second_preemptions(seed, policy, victim) for seed in range(5))
    assert twice, "nobody was preempted twice: the test proves nothing"


@pytest.mark.parametrize("victim", ["policy", "newest"])
def test_who_is_computing_again_is_spared(victim: str) -> None:
    """7 blocks of 4. The newest request has been preempted and computes its 9 tokens again, four a step; before it says
    anything, the others need a third block each, and one is left: the newest of *them* goes."""
    h = SchedulerHarness(
        num_blocks=8, block_size=4, long_prefill_token_threshold=4, enable_prefix_caching=False, victim=victim
    )
    first, second, newest = h.add(6, max_tokens=30), h.add(6, max_tokens=30), h.add(8, max_tokens=30)
    h.step()
    h.step()
    h.scheduler.preempt(newest)
    assert h.schedule().num_scheduled_tokens == {first: 1, second: 1, newest: 4}
    h.update(h._planned[0])
    h.step()
    out = h.schedule()
    assert out.preempted_req_ids == [second] and out.num_scheduled_tokens == {first: 1, newest: 1}


def test_too_many_preemptions_end_with_an_error_that_says_so() -> None:
    h = SchedulerHarness(num_blocks=20, max_preemptions=3)
    rid = h.add(10, max_tokens=50)
    for _ in range(4):
        h.step()
        h.scheduler.preempt(rid)
    view = h.request(rid)
    assert view.status is RequestStatus.FINISHED_ERROR
    assert view.error == "preempted 4 times, max_preemptions is 3"
    assert h.num_free_blocks == 19 and len(view.output_token_ids) == 4


LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "memory": ({"num_blocks": 4}, {"prompt": 40}, True),
    "rows": ({"max_num_seqs": 1}, {"prompt": 4}, True),
    "adapters": ({"max_loras": 1}, {"prompt": 4, "lora": "b"}, True),
    "tokens": ({"max_num_batched_tokens": 1}, {"prompt": 4}, False),
    "encoder": (
        {"encoder_budget": 8, "encoder_cache_size": 8},
        {"prompt": 9, "images": [{"offset": 0, "length": 8, "id": "Y"}]},
        False,
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_which_limits_an_urgent_request_takes_from_others(limit: str) -> None:
    """Memory, rows and adapter slots; not the tokens of a step, which are back in the next one."""
    config, urgent, taken = LIMITS[limit]
    h = SchedulerHarness(**{"num_blocks": 100, "policy": "priority"} | config)
    images = [{"offset": 0, "length": 8, "id": "X"}] if limit == "encoder" else []
    prompt = 20 if limit == "memory" else 9 if limit == "encoder" else 1
    low = h.add(prompt, max_tokens=20, priority=5, lora="a", images=images)
    h.update(h.schedule()) if limit != "encoder" else h.schedule()
    high = h.add(max_tokens=5, priority=0, **urgent)
    out = h.schedule()
    assert out.preempted_req_ids == ([low] if taken else [])
    assert (h.request(high).status is RequestStatus.RUNNING) is taken
