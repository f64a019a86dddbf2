"""Drafts looked up in a request's own tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvern.speculative.ngram import MAX_N, MIN_N, WINDOW, NgramProposer


def propose(tokens: list[int], k: int = 4) -> list[int]:
    return NgramProposer(k).propose(np.array(tokens, dtype=np.int32))


def by_hand(tokens: list[int], k: int) -> list[int]:
    """The same, written as it is said."""
    for n in range(MAX_N, MIN_N - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([], []),
        ([7], []),
        ([7, 7], []),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 9, 2], []),  # one token in common is not enough
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),  # the copy runs into what it writes
        ([1, 2, 8, 8, 1, 2, 9, 9, 1, 2], [9, 9, 1, 2]),  # the latest place
        ([5, 1, 2, 8, 8, 1, 2, 9, 9, 5, 1, 2], [8, 8, 1, 2]),  # the longest match goes before the latest
    ],
)
def test_what_followed_before_is_proposed(tokens: list[int], drafts: list[int]) -> None:
    assert propose(tokens) == drafts


def test_against_a_search_by_hand() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(2000):
        tokens = rng.integers(0, int(rng.integers(2, 12)), int(rng.integers(0, 40))).tolist()
        k = int(rng.integers(1, 9))
        drafts = propose(tokens, k)
        assert drafts == by_hand(tokens, k), tokens
        found += bool(drafts)
    assert found > 500


def test_only_a_window_is_searched() -> None:
    inside = [1, 2, 3, *range(10, 10 + WINDOW - 5), 1, 2]
    assert propose(inside, 1) == [3]
    assert propose([1, 2, 3, *range(10, 10 + WINDOW), 1, 2], 1) == []


def test_tokens_are_not_changed() -> None:
    tokens = np.array([1, 2, 3, 1, 2], dtype=np.int32)
    tokens.flags.writeable = False
    assert NgramProposer(2).propose(tokens) == [3, 1]
