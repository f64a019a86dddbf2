"""Host and disk below the device: what is evicted may be hit again."""

from __future__ import annotations

import random

import pytest

from kvern.cache.tiers import DiskTier, HostTier
from kvern.testing import SchedulerHarness, reference_tokens
from kvern.testing.harness import own_tokens


def served(h: SchedulerHarness, prompt: list[int], max_tokens: int = 4) -> tuple[int, list[int]]:
    """Serve one prompt alone; how many of its tokens were cached, and its text."""
    rid = h.add(prompt, max_tokens=max_tokens)
    h.run()
    view = h.request(rid)
    assert view.output_token_ids == reference_tokens(prompt, max_tokens)
    return view.num_cached_tokens, view.output_token_ids


A, B, C = (own_tokens(name, 100) for name in "ABC")


@pytest.mark.parametrize(
    ("tiers", "cached"),
    [
        ({}, 0),
        ({"host_blocks": 12}, 96),
        ({"disk_blocks": 12}, 96),
        ({"host_blocks": 3, "disk_blocks": 12}, 96),
        ({"host_blocks": 2}, 32),  # a tail is evicted before its head, so the head is what is left
    ],
)
def test_what_was_evicted_is_hit_again(tiers: dict[str, int], cached: int) -> None:
    """Nine usable blocks hold one of the prompts (seven blocks) and a part of another."""
    h = SchedulerHarness(num_blocks=10, **tiers)
    served(h, A)
    served(h, B)
    served(h, C)
    found, _ = served(h, A)
    assert found == cached


def test_whole_prompt_on_the_host_computes_one_token() -> None:
    h = SchedulerHarness(num_blocks=8, host_blocks=20)
    served(h, A[:96])
    served(h, B)
    rid = h.add(A[:96], max_tokens=1)
    out = h.schedule()
    assert out.num_scheduled_tokens == {rid: 1} and h.request(rid).num_cached_tokens == 95
    assert len(out.blocks_to_swap_in) == 6 and out.blocks_to_copy == []
    h.update(out)
    assert h.request(rid).output_token_ids == reference_tokens(A[:96], 1)


def test_loaded_blocks_are_hittable_on_the_device_again() -> None:
    h = SchedulerHarness(num_blocks=20, host_blocks=20)
    served(h, A)
    served(h, B)
    served(h, C)  # evicts from A
    served(h, A)
    rid = h.add([*A, 7], max_tokens=1)
    out = h.schedule()
    assert h.request(rid).num_cached_tokens == 96 and out.blocks_to_swap_in == [] and out.blocks_from_disk == []


def test_swapped_requests_have_the_host_before_evicted_blocks() -> None:
    h = SchedulerHarness(num_blocks=11, host_blocks=6, preemption="swap", max_num_seqs=2)
    served(h, A[:64])
    served(h, B)  # A is on the host now
    first, second = h.add(own_tokens("x", 75), max_tokens=20), h.add(own_tokens("y", 70), max_tokens=20)
    texts = h.run()
    assert texts[first] == reference_tokens(own_tokens("x", 75), 20)
    assert texts[second] == reference_tokens(own_tokens("y", 70), 20)
    assert h.scheduler.stats.swapped_out_blocks > 0


def test_disk_forgets_its_least_recently_used() -> None:
    disk = DiskTier(2)
    assert disk.put(b"a") == [] and disk.put(b"b") == [] and disk.put(b"a") is None
    assert disk.put(b"c") == [b"b"] and b"a" in disk and b"b" not in disk


def test_disk_keeps_what_is_read_until_the_step_ends() -> None:
    disk = DiskTier(1)
    disk.put(b"a")
    disk.read(b"a")
    assert disk.put(b"b") == [] and b"a" in disk
    assert disk.end_step() == [b"a"] and b"b" in disk


def test_disk_found_at_start_is_cut_to_its_capacity() -> None:
    disk = DiskTier(2)
    assert disk.found([b"old", b"newer", b"newest"]) == [b"old"] and len(disk) == 2


def test_host_tells_what_it_evicts() -> None:
    evicted: list[tuple[bytes, int]] = []
    host = HostTier(1, lambda block_hash, block: evicted.append((block_hash, block)))
    assert host.put(b"a") == 1 and host.put(b"b") is None  # held to the end of the step
    host.end_step()
    assert host.put(b"b") == 1 and evicted == [(b"a", 1)]


@pytest.mark.parametrize("seed", range(12))
def test_random_work_through_all_tiers(seed: int) -> None:
    """Prompts with shared beginnings in a pool that holds few of them: texts are those of requests alone."""
    r = random.Random(seed)
    stems = [own_tokens(f"stem {i}", 120) for i in range(4)]
    h = SchedulerHarness(
        num_blocks=r.randint(10, 30),
        block_size=r.choice([4, 16]),
        max_num_seqs=r.randint(1, 4),
        host_blocks=r.choice([0, 3, 30]),
        disk_blocks=r.choice([0, 3, 60]),
        preemption=r.choice(["recompute", "swap"]),
        preempt_probability=0.2,
        seed=seed,
    )
    room = h.num_free_blocks * h.scheduler.config.block_size
    wanted = {}
    for i in range(30):
        prompt = stems[r.randrange(4)][: r.randint(1, min(100, room - 12))] + own_tokens(str(i), r.randint(0, 4))
        wanted[h.add(prompt, max_tokens=6)] = reference_tokens(prompt, 6)
        h.step()
        h.check_invariants()
    texts = h.run()
    assert texts == wanted
    assert len(h.executor.disk) <= h.scheduler.config.disk_blocks
