"""Tokens over ranks: each has one owner and one slot, ranks are even, and blocks of all ranks end together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvern.cache.context_parallel import num_tokens_of, owner_and_slot

RANKS, SIZES, LENGTHS = st.integers(1, 9), st.integers(1, 20), st.integers(0, 300)


@given(LENGTHS, RANKS)
def test_every_position_has_one_owner_and_a_slot_of_its_own(length: int, ranks: int) -> None:
    """A rank's tokens fill its slots from 0 on, in their order."""
    places = [owner_and_slot(position, ranks) for position in range(length)]
    assert len(set(places)) == length
    for rank in range(ranks):
        slots = [slot for owner, slot in places if owner == rank]
        assert slots == list(range(num_tokens_of(rank, length, ranks)))
    owners, slots = owner_and_slot(np.arange(length), ranks)
    assert list(zip(owners.tolist(), slots.tolist(), strict=True)) == places


@given(LENGTHS, RANKS)
def test_ranks_differ_by_at_most_one_token(length: int, ranks: int) -> None:
    counts = [num_tokens_of(rank, length, ranks) for rank in range(ranks)]
    assert sum(counts) == length and max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(st.integers(0, 3000), RANKS, SIZES)
def test_a_token_lies_in_the_block_that_the_scheduler_means(position: int, ranks: int, size: int) -> None:
    _, slot = owner_and_slot(position, ranks)
    assert slot // size == position // (size * ranks)
