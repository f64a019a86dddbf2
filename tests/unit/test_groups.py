"""Kinds of attention in the cache: what each keeps, how much at most, and which prefixes it can use."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvern.cache.groups import make_group
from kvern.config import InvalidConfig
from kvern.testing import SchedulerHarness
from kvern.testing.harness import own_tokens

UNKNOWN = ["", "half", "full:3", "mamba:2", "chunked_local", "window", "window:", "window:0", "window:-4", "window:x"]


@pytest.mark.parametrize("spec", UNKNOWN)
def test_unknown_groups_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="kv_groups: unknown group"):
        make_group(spec, 16)


def reads(spec: str, token: int) -> range:
    """The tokens that `token` reads; of a state, that of the token before."""
    kind, _, n = spec.partition(":")
    first = {
        "full": 0,
        "mamba": max(0, token - 1),
        "window": max(0, token - int(n or 1) + 1),
        "chunked_local": token - token % int(n or 1),
    }
    return range(first[kind], token + 1)


WINDOWS = [f"window:{n}" for n in (1, 2, 4, 5, 13, 16, 40)]
CHUNKS = [f"chunked_local:{n}" for n in (1, 2, 4, 6, 9, 12, 16, 40)]
SPECS = ["full", "mamba", *WINDOWS, *CHUNKS]


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("spec", SPECS)
def test_the_first_block_that_is_needed_is_that_of_the_first_token_read(spec: str, size: int) -> None:
    group = make_group(spec, size)
    tokens = np.arange(100)
    expected = [reads(spec, token)[0] // size for token in range(100)]
    assert group.first_needed(tokens).tolist() == expected == [group.first_needed(token) for token in range(100)]
    assert group.drops is (expected[-1] > 0)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("chunk", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8)), 5])
def test_most_held_is_reached_and_never_passed(spec: str, size: int, chunk: int) -> None:
    """Computed in random chunks: held are the blocks from the first one needed at the beginning of the step to the
    last one written."""
    group, rng = make_group(spec, size), random.Random(1)
    reached = 0
    for total in range(1, 70):
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
    if spec in ("mamba", *CHUNKS):  # of a long text, exactly
        starts = range(200, 200 + 40 * size)
        most = max(-(-(start + chunk) // size) - group.first_needed(start) for start in starts)
        assert group.most_held(10_000, chunk) == most


@pytest.mark.parametrize("spec", SPECS)
def test_the_longest_hit_is_the_longest_prefix_whose_next_token_finds_all_it_reads(spec: str) -> None:
    size, rng = 4, random.Random(2)
    group = make_group(spec, size)
    for _ in range(300):
        cached = [rng.random() < 0.7 for _ in range(8)]
        most = rng.randint(0, 8)
        good = [
            length
            for length in range(most + 1)
            if all(cached[t // size] for t in reads(spec, length * size) if t < length * size)
        ]
        assert group.longest_hit(cached, most) == max(good)


GROUPS = [("window:1",), ("window:7",), ("full", "window:5"), ("window:3", "window:17", "full")]
GROUPS += [("chunked_local:8",), ("full", "chunked_local:6")]
GROUPS += [("mamba",), ("full", "mamba"), ("mamba", "full", "window:9")]


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


# ---- chunked-local attention


def test_blocks_of_earlier_chunks_are_given_back_and_read_as_null() -> None:
    h = SchedulerHarness(
        num_blocks=20,
        block_size=4,
        kv_groups=("chunked_local:8",),
        max_num_batched_tokens=6,
        enable_prefix_caching=False,
    )
    rid = h.add(20, max_tokens=6)
    seen = []
    while h.scheduler.has_work():
        out = h.schedule()
        seen.append(h.request(rid).block_ids)
        h.update(out)
        h.check_invariants()
    # 6, 12, 18 tokens, then the token at 18 is in the chunk 16..23, which begins in block 4
    assert [[bool(block) for block in table] for table in seen[:4]] == [
        [True] * 2,
        [True] * 3,
        [False] * 2 + [True] * 3,
        [False] * 4 + [True],
    ]
    assert h.num_free_blocks == 19


def test_a_prefix_that_ends_with_a_chunk_needs_nothing_of_the_chunk() -> None:
    """What it lacks of the group, no token reads."""
    for chunk, found in ((8, 16), (16, 16), (32, 0)):
        h = SchedulerHarness(num_blocks=40, block_size=4, kv_groups=("full", f"chunked_local:{chunk}"))
        prompt = own_tokens("p", 16)
        first = h.add([*prompt, 5], max_tokens=1)
        h.run()
        index = h.scheduler.state.cache.index
        for block_hash in h.requests[first].block_hashes:
            block = index.get(block_hash + b"\x01")
            if block is not None:
                index.remove(block)
        rid = h.add([*prompt, 7], max_tokens=1)
        h.run()
        assert h.request(rid).num_cached_tokens == found


# ---- states


def test_a_state_takes_one_block_and_two_where_it_passes_a_border() -> None:
    h = SchedulerHarness(num_blocks=4, block_size=4, kv_groups=("mamba",), max_num_batched_tokens=4, max_model_len=500)
    rid = h.add(7, max_tokens=100)
    held = []
    while h.scheduler.has_work():
        h.schedule()
        held.append(3 - h.num_free_blocks)
        h.update(h._planned[0])
        h.check_invariants()
    # 4 tokens, 3 more from the state at the border; then 8 in the same block, 9 in the next
    assert held[:7] == [1, 2, 1, 2, 1, 1, 1] and max(held) == 2
    assert len(h.request(rid).output_token_ids) == 100


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_a_state_is_hit_where_it_was_left_and_a_whole_prompt_one_block_before_its_end(length: int, found: int) -> None:
    h = SchedulerHarness(num_blocks=30, block_size=4, kv_groups=("mamba",))
    prompt = own_tokens("p", length)
    texts = []
    for _ in range(2):
        rid = h.add(prompt, max_tokens=6)
        texts.append(h.run()[rid])
    assert h.request(rid).num_cached_tokens == found and texts[0] == texts[1]


def test_without_a_prefix_cache_no_state_is_kept() -> None:
    h = SchedulerHarness(num_blocks=30, block_size=4, kv_groups=("mamba",), enable_prefix_caching=False)
    prompt = own_tokens("p", 11)
    for _ in range(2):
        rid = h.add(prompt, max_tokens=6)
        h.run()
    assert h.request(rid).num_cached_tokens == 0 and h.num_free_blocks == 29


@pytest.mark.parametrize("groups", [("mamba",), ("full", "mamba")])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_forks_and_swaps_of_states_with_steps_under_way(groups: tuple[str, ...], ahead: int) -> None:
    """A state is shared, and kept on the host, only as it is; where a step under way takes it further it is computed
    again."""
    prompt = own_tokens("p", 9)
    texts = []
    for probability in (0.0, 0.4):
        h = SchedulerHarness(
            num_blocks=80,
            block_size=4,
            kv_groups=groups,
            async_scheduling=ahead > 1,
            preemption="swap",
            host_blocks=60,
            preempt_probability=probability,
            enable_prefix_caching=False,
        )
        rid = h.add(prompt, max_tokens=15)
        flight = []
        step = 0
        while h.scheduler.has_work():
            flight.append(h.schedule())
            if len(flight) >= ahead:
                h.update(flight.pop(0))
            if step in (1, 4, 7, 11):
                h.fork(rid)
            h.check_invariants()
            step += 1
        texts += [h.request(x).output_token_ids for x in h.requests]
    assert len(texts) == 10 and all(text == texts[0] for text in texts)
    assert h.scheduler.stats.swapped_in_blocks > 0 or ahead > 1


def test_siblings_of_a_state_say_the_same() -> None:
    h = SchedulerHarness(num_blocks=80, block_size=4, kv_groups=("mamba",))
    prompt = own_tokens("p", 9)
    first = h.add(prompt, max_tokens=5)
    second = h.add(prompt, max_tokens=5, fork_of=first)
    texts = h.run()
    assert texts[first] == texts[second] and h.request(second).num_cached_tokens == 8


def test_what_would_take_a_state_back_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="num_speculative_tokens cannot be used with a mamba group"):
        SchedulerHarness(kv_groups=("full", "mamba"), num_speculative_tokens=2)
    with pytest.raises(InvalidConfig, match="a connector cannot be used with a mamba group"):
        SchedulerHarness(kv_groups=("mamba",), connector={"matched_tokens": 4, "load_async": False})
