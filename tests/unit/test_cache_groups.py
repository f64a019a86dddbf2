"""What kinds of attention need of the cache, against counting token by token."""

from __future__ import annotations

import numpy as np
import pytest

from kvern.cache.groups import make_group

SIZES = [1, 2, 3, 4, 16]
WINDOWS = [1, 2, 3, 4, 5, 8, 17]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_first_block_that_a_token_reads(window: int, size: int) -> None:
    """A token reads itself and the window - 1 tokens before it."""
    group = make_group(f"window:{window}", size)
    for token in range(60):
        reads = [t // size for t in range(token + 1) if t > token - window]
        assert group.first_needed(token) == reads[0]
    tokens = np.arange(60, dtype=np.int32)
    assert group.first_needed(tokens).tolist() == [group.first_needed(token) for token in range(60)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_most_blocks_held_at_once_is_never_exceeded(window: int, size: int, chunk: int) -> None:
    """Played through in chunks: before a step what cannot be read is dropped, then the chunk is added."""
    group = make_group(f"window:{window}", size)
    for total in (1, 7, 30, 48):
        bound = group.most_held(total, chunk)
        assert bound <= -(-total // size)
        for first in range(1, chunk + 1):
            computed, step = 0, first
            while computed < total:
                end = min(computed + step, total)
                assert -(-end // size) - group.first_needed(computed) <= bound, (total, computed, end)
                computed, step = end, chunk


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_longest_usable_prefix(window: int, size: int) -> None:
    group = make_group(f"window:{window}", size)
    rng = np.random.default_rng(window * 100 + size)
    for _ in range(200):
        cached = [bool(x) for x in rng.random(10) < 0.7]
        most = int(rng.integers(0, 11))

        def usable(length: int, cached: list[bool] = cached) -> bool:
            token = length * size
            return all(cached[t // size] for t in range(token) if t > token - window)

        assert group.longest_hit(cached, most) == max(n for n in range(most + 1) if n == 0 or usable(n))


@pytest.mark.parametrize("size", SIZES)
def test_full_attention_needs_everything(size: int) -> None:
    group = make_group("full", size)
    assert [group.first_needed(token) for token in (0, 5, 99)] == [0, 0, 0]
    assert [group.most_held(n, 1) for n in (1, size, size + 1)] == [1, 1, 2]
    assert group.longest_hit([True, True, False, True], 4) == 2 and group.longest_hit([True] * 4, 3) == 3


@pytest.mark.parametrize("spec", ["", "full:3", "window", "window:", "window:0", "window:-1", "window:x", "linear"])
def test_unknown_kinds_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="kv_groups"):
        make_group(spec, 16)
