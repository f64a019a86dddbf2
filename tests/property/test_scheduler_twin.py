"""Random workloads: scheduler and twin take the same decisions in every step, and every text is the oracle's."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workloads import Play, play_seed, random_workload

FAST, ALL = 100, 2500
CROWDED = {"num_blocks": 9, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}


def test_random_workloads() -> None:
    for seed in range(FAST):
        play_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, ALL, 450))
def test_more_random_workloads(first: int) -> None:
    for seed in range(first, min(first + 450, ALL)):
        play_seed(seed)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_crowded_pools(policy: str, ahead: bool) -> None:
    """Eight usable blocks, prompts that share them: preemption and eviction all the time."""
    preemptions = hits = 0
    for seed in range(15):
        h = play_seed(seed, policy=policy, async_scheduling=ahead, num_speculative_tokens=0, **CROWDED)
        preemptions += h.scheduler.stats.preemptions
        hits += h.scheduler.stats.prefix_hit_tokens
    assert preemptions > 20 and hits > 100, (preemptions, hits)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_workloads_that_shrink(rng: random.Random) -> None:
    Play(random_workload(rng), rng).run()
