"""Decode context parallelism: the keys and values of one request are spread over several ranks, token by token.

ranks = 2, block_size = 4:

    position    0  1  2  3  4  5  6  7 |  8  9 10 ...
    rank        0  1  0  1  0  1  0  1 |  0  1  0
    slot        0  0  1  1  2  2  3  3 |  4  4  5         among the tokens of the rank
    table       place 0                |  place 1         the same block number on every rank

A block of the scheduler is one block on each rank, so it holds block_size x ranks tokens. Interleaved, ranks differ by
at most one token at any length, so that a decode step takes each of them the same time, and a token that is appended
never moves another.
"""

from __future__ import annotations

from kvern.cache.groups.base import IntOrArray


def owner_and_slot(position: IntOrArray, num_ranks: int) -> tuple[IntOrArray, IntOrArray]:
    """The rank that holds the token at `position`, and which of the rank's tokens it is. It lies in the block at
    place slot // block_size of the request's table, at slot % block_size there."""
    return position % num_ranks, position // num_ranks


def num_tokens_of(rank: int, num_tokens: IntOrArray, num_ranks: int) -> IntOrArray:
    """How many of the first `num_tokens` tokens `rank` holds."""
    count: IntOrArray = (num_tokens + num_ranks - 1 - rank) // num_ranks
    return count
