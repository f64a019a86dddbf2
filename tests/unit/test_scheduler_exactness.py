"""A text depends on its prompt alone: not on company, chunks, cache, memory pressure, preemption, drafts or order.

The toy model's tokens are a hash of all it reads back through the block table, so any wrong block, position or stale
token shows. The oracle computes without a cache.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvern.testing import SchedulerHarness, reference_tokens

WHOLE = 4096
STEM = [random.Random(1).randint(3, 242) for _ in range(96)]


def prompts(count: int) -> list[list[int]]:
    """Own and shared ones, prefixes of each other, whole numbers of blocks, equal ones."""
    rng = random.Random(2)
    kinds = [
        lambda: STEM[: rng.choice([16, 32, 48, 64])],
        lambda: STEM[: rng.randint(1, 96)],
        lambda: STEM[: rng.randint(1, 60)] + [rng.randint(3, 242) for _ in range(rng.randint(1, 20))],
        lambda: [rng.randint(3, 242) for _ in range(rng.randint(1, 80))],
    ]
    return [kinds[i % 4]() for i in range(count)]


def check(h: SchedulerHarness, batch: list[list[int]], max_tokens: int = 12) -> None:
    """Run `batch` together and compare each text with the oracle's."""
    ids = [h.add(prompt, max_tokens=max_tokens, priority=i % 3) for i, prompt in enumerate(batch)]
    h.run()
    for rid, prompt in zip(ids, batch, strict=True):
        assert h.delivered[rid] == reference_tokens(prompt, max_tokens), f"{rid}: {len(prompt)} tokens"
        assert h.request(rid).error is None
    assert h.num_free_blocks == h.scheduler.config.num_blocks - 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunk", [1, 7, 64, WHOLE])
@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_company_chunks_and_cache(count: int, chunk: int, caching: bool, policy: str) -> None:
    """B028, B038: hits and misses side by side, caching and chunk size never alter a text."""
    h = SchedulerHarness(
        max_num_seqs=count,
        max_num_batched_tokens=max(chunk, 8 if chunk == 1 else 1),
        long_prefill_token_threshold=1 if chunk == 1 else 0,
        policy=policy,
        enable_prefix_caching=caching,
    )
    batch = prompts(count) if chunk > 1 or count < 32 else prompts(8)
    check(h, batch)
    check(h, batch)  # once more: now the cache is warm
    assert (h.scheduler.stats.prefix_hit_tokens > 0) is (caching and any(len(p) >= 16 for p in batch))


def tiny(**options: Any) -> SchedulerHarness:
    """A pool that holds the longest of prompts(), and not much more."""
    return SchedulerHarness(num_blocks=9, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, **options)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_tiny_pool_with_preemption(policy: str, caching: bool, ahead: bool) -> None:
    """B044, B119: memory for two, sixteen want to run; preemption is invisible in every text."""
    h = tiny(policy=policy, enable_prefix_caching=caching, async_scheduling=ahead)
    check(h, prompts(16), max_tokens=20)
    assert h.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_forced_preemption(policy: str, caching: bool) -> None:
    """B044, B049: one step in three preempts somebody at random."""
    h = SchedulerHarness(max_num_seqs=4, policy=policy, enable_prefix_caching=caching, preempt_probability=0.3, seed=5)
    check(h, prompts(16), max_tokens=20)
    assert h.scheduler.stats.preemptions >= 10


def test_forced_preemption_in_a_tiny_pool() -> None:
    check(tiny(preempt_probability=0.3, seed=6), prompts(12), max_tokens=20)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("count", [2, 5])
def test_identical_prompts_in_one_step(length: int, count: int) -> None:
    check(SchedulerHarness(), [STEM[:length]] * count)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_whole_prompt_hit(blocks: int, size: int) -> None:
    """B024: a prompt of exactly k blocks, all of them cached: one token is computed, never none."""
    prompt = STEM[: blocks * size]
    h = SchedulerHarness(block_size=size)
    check(h, [prompt])
    rid = h.add(prompt, max_tokens=12)
    out = h.schedule()
    assert out.num_scheduled_tokens == {rid: 1} and len(out.blocks_to_copy) == 1
    assert h.request(rid).num_cached_tokens == len(prompt) - 1
    h.update(out)
    check(h, [prompt, prompt])
    assert h.delivered[rid] == reference_tokens(prompt, 12)


def test_copies_of_one_block_by_many_in_one_step() -> None:
    """Each has its own copy of the last block to write to, while the original's owner goes on in its own."""
    h = SchedulerHarness()
    owner = h.add(STEM[:32], max_tokens=20)
    h.step()
    readers = [h.add(STEM[:32], max_tokens=20) for _ in range(4)]
    out = h.schedule()
    assert len(out.blocks_to_copy) == 4 and len({destination for _, destination in out.blocks_to_copy}) == 4
    h.update(out)
    h.run()
    for rid in [owner, *readers]:
        assert h.delivered[rid] == reference_tokens(STEM[:32], 20)


def test_conversation_reads_what_decoding_wrote() -> None:
    """The second turn hits blocks that were filled by decoding, partly from a preempted request."""
    h = SchedulerHarness(block_size=4, preempt_probability=0.3, seed=7)
    turn = STEM[:10]
    for _ in range(5):
        rid = h.add(turn, max_tokens=9)
        h.run()
        said = reference_tokens(turn, 9)
        assert h.delivered[rid] == said
        assert len(turn) == 10 or h.request(rid).num_cached_tokens >= len(turn) - 4 - 3
        turn = [*turn, *said, 200, 201]


def wrong_at(text: list[int], place: int) -> list[int]:
    return [token + (i == place) for i, token in enumerate(text)]


@pytest.mark.parametrize("wrong", [0, 1, 2, 3], ids=["none-right", "one-right", "two-right", "all-right"])
@pytest.mark.parametrize("pool", [1024, 9])
def test_drafts(wrong: int, pool: int) -> None:
    """B058: with three drafts a step, of which 0, 1, 2 or 3 are right, every text stays what it is."""
    h = SchedulerHarness(num_blocks=pool, max_num_seqs=6, num_speculative_tokens=3, max_model_len=128)
    batch = prompts(8)
    ids = [h.add(prompt, max_tokens=18) for prompt in batch]
    texts = {rid: reference_tokens(prompt, 30) for rid, prompt in zip(ids, batch, strict=True)}
    steps = 0
    while h.scheduler.has_work():
        out = h.schedule()
        proposals = {}
        for i, rid in enumerate(out.request_ids):
            if out.samples[i]:
                known = len(h.delivered[rid])
                accepted = min(wrong, len(out.draft_tokens.get(int(out.rows[i]), [])))
                proposals[rid] = wrong_at(texts[rid][known + accepted + 1 :][:3], wrong)
        h.update(out, drafts=proposals)
        h.check_invariants()
        steps += 1
    assert h.delivered == {rid: text[:18] for rid, text in texts.items()}
    if pool == 1024:
        assert steps <= 4 + -(-18 // (1 + wrong)) * 2  # six rows, eight requests: two rounds


def test_drafts_are_never_hittable() -> None:
    """A block that only unverified drafts fill must not be found by a prompt that spells them out."""
    h = SchedulerHarness(block_size=4, num_speculative_tokens=3)
    rid = h.add(STEM[:4], max_tokens=12)
    out = h.schedule()
    h.update(out, drafts={rid: [201, 202, 203]})
    out = h.schedule()
    assert out.num_scheduled_tokens == {rid: 4}  # one known token and three drafts fill the second block
    first = reference_tokens(STEM[:4], 1)
    spelled = h.add([*STEM[:4], *first, 201, 202, 203, 9], max_tokens=3)
    h.update(out)
    h.step()
    assert h.request(spelled).num_cached_tokens == 4
    h.run()
    assert h.delivered[spelled] == reference_tokens([*STEM[:4], *first, 201, 202, 203, 9], 3)
    assert h.delivered[rid] == reference_tokens(STEM[:4], 12)
