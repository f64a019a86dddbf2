"""Kinds of attention in the cache: what each keeps, how much at most, and which prefixes it can use."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvern.cache.groups import make_group
from kvern.testing import SchedulerHarness
from kvern.testing.harness import own_tokens


@pytest.mark.parametrize("spec", ["", "half", "full:3", "window", "window:", "window:0", "window:-4", "window:x"])
def test_unknown_groups_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="kv_groups: unknown group"):
        make_group(spec, 16)


def reads(window: int | None, token: int) -> range:
    """The tokens that `token` reads."""
    return range(0 if window is None else max(0, token - window + 1), token + 1)


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 16, 40])
def test_the_first_block_that_is_needed_is_that_of_the_first_token_read(window: int | None, size: int) -> None:
    group = make_group("full" if window is None else f"window:{window}", size)
    tokens = np.arange(100)
    expected = [reads(window, token)[0] // size for token in range(100)]
    assert group.first_needed(tokens).tolist() == expected == [group.first_needed(token) for token in range(100)]


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 13])
@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
def test_most_held_is_reached_and_never_passed(window: int | None, size: int, chunk: int) -> None:
    """Computed in random chunks: held are the blocks from the first one needed at the beginning of the step to the
    last one written."""
    group, rng = make_group("full" if window is None else f"window:{window}", size), random.Random(1)
    reached = 0
    for total in range(1, 50):
        for _ in range(20):
            computed = 0
            while computed < total:
                n = min(rng.choice([1, chunk, rng.randint(1, chunk)]), total - computed)
                held = -(-(computed + n) // size) - group.first_needed(computed)
                assert held <= group.most_held(total, chunk)
                reached = max(reached, held - group.most_held(total, chunk) + 1000)
                computed += n
    assert reached == 1000, "the bound is wider than it need be"
    assert group.most_held(np.array([1, 49]), chunk).tolist() == [group.most_held(1, chunk), group.most_held(49, chunk)]


@pytest.mark.parametrize("window", [None, 1, 4, 6, 9])
def test_the_longest_hit_is_the_longest_prefix_whose_next_token_finds_all_it_reads(window: int | None) -> None:
    size, rng = 4, random.Random(2)
    group = make_group("full" if window is None else f"window:{window}", size)
    for _ in range(300):
        cached = [rng.random() < 0.7 for _ in range(8)]
        most = rng.randint(0, 8)
        good = [
            length
            for length in range(most + 1)
            if all(cached[t // size] for t in reads(window, length * size) if t < length * size)
        ]
        assert group.longest_hit(cached, most) == max(good)


GROUPS = [("window:1",), ("window:7",), ("full", "window:5"), ("window:3", "window:17", "full")]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("caching", [True, False])
def test_company_changes_no_text(groups: tuple[str, ...], caching: bool) -> None:
    """Six requests that share prefixes, in a pool that is too small for them, against each alone."""
    stem = own_tokens("stem", 40)
    prompts = [stem[: 5 * i] + own_tokens(f"p{i}", 3) for i in range(7)]
    crowd = SchedulerHarness(
        num_blocks=1 + 14 * len(groups),
        block_size=4,
        kv_groups=groups,
        max_num_batched_tokens=20,
        enable_prefix_caching=caching,
    )
    ids = [crowd.add(prompt, max_tokens=20) for prompt in prompts]
    texts = crowd.run()
    for rid, prompt in zip(ids, prompts, strict=True):
        alone = SchedulerHarness(num_blocks=400, block_size=4, kv_groups=groups, enable_prefix_caching=False)
        only = alone.add(prompt, max_tokens=20)
        assert texts[rid] == alone.run()[only]
    assert crowd.scheduler.stats.preemptions > 0 or groups == ("window:1",) or len(groups) == 1
    assert (crowd.scheduler.stats.prefix_hit_tokens > 0) is caching


def test_a_window_holds_a_long_text_in_a_few_blocks() -> None:
    h = SchedulerHarness(num_blocks=6, block_size=4, sliding_window=8, max_num_batched_tokens=8, max_model_len=500)
    rid = h.add(20, max_tokens=300)
    most = 0
    while h.scheduler.has_work():
        h.step()
        h.check_invariants()
        most = max(most, 5 - h.num_free_blocks)
    # The second chunk is tokens 8..15, and token 8 reads from the first block on.
    assert len(h.request(rid).output_token_ids) == 300 and most == 4


def test_the_tables_of_all_groups_are_equally_long() -> None:
    h = SchedulerHarness(num_blocks=60, block_size=4, kv_groups=("full", "window:6"))
    h.add(20, max_tokens=5)
    out = h.schedule()
    (new,) = out.new_requests
    assert [len(table) for table in new.tables] == [5, 5] and not set(new.tables[0]) & set(new.tables[1])
    h.update(out)
    out = h.schedule()
    assert out.new_blocks.blocks.shape == (2, 1) and out.new_blocks.index.tolist() == [5]
    tables = h.scheduler.state.batch.tables_of(0)
    assert (tables[0] > 0).all() and tables[1].tolist()[:3] == [0, 0, 0] and (tables[1][3:] > 0).all()  # reads 15..20


def test_a_prefix_that_one_group_has_lost_is_no_prefix() -> None:
    """The blocks of the window are the ones that were given back first, and are evicted first."""
    h = SchedulerHarness(num_blocks=25, block_size=4, kv_groups=("full", "window:4"))
    prompt = own_tokens("p", 32)
    h.add(prompt, max_tokens=1)
    h.step()
    cache = h.scheduler.state.cache
    lost = next(
        b for b, _ in cache.index.items() if cache.index.hash_of(b) == h.requests["r0"].block_hashes[7] + b"\x01"
    )
    cache.index.remove(lost)
    again = h.add([*prompt, 7], max_tokens=1)
    h.schedule()
    assert h.request(again).num_cached_tokens == 28  # token 28 sees 25..28: block 6 of the window, which is there


@pytest.mark.parametrize("groups", [("window:5",), ("full", "window:3")])
def test_what_rejected_drafts_have_to_read_is_not_given_back(groups: tuple[str, ...]) -> None:
    """Two steps under way, four wrong drafts in the first: the second begins four tokens earlier than planned."""
    prompt = own_tokens("p", 12)
    texts = []
    for drafts in ([], [1, 2, 3, 4]):
        h = SchedulerHarness(
            num_blocks=60, block_size=2, kv_groups=groups, async_scheduling=True, num_speculative_tokens=4
        )
        rid = h.add(prompt, max_tokens=20)
        h.update(h.schedule(), drafts={rid: drafts})
        while h.scheduler.has_work():
            first, second = h.schedule(), h.schedule()
            h.update(first)
            h.update(second, drafts={rid: drafts})
            h.check_invariants()
        texts.append(h.request(rid).output_token_ids)
    assert texts[0] == texts[1] and h.scheduler.stats.drafted_tokens >= 8
