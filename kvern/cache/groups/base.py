"""What the cache must know of a kind of attention."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np

IntOrArray = TypeVar("IntOrArray", int, "np.ndarray[Any, Any]")


class CacheGroup(Protocol):
    """Layers that keep and forget alike, with one block table per request. All groups share one pool and one block
    size, and the tables of a request have equal length: where a group needs no block, its table holds block 0.

    Tokens and blocks are counted from 0. Methods that take a number also take an array of numbers."""

    block_size: int
    drops: bool  # whether first_needed() is ever above 0
    recurrent: bool  # whether a block holds a state that each token replaces, so that no token can be computed again

    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        """The first block that computing token `num_computed` reads; those before it can be given back."""
        ...

    def most_held(self, num_tokens: IntOrArray, chunk: int) -> IntOrArray:
        """Most blocks that a request holds at once while `num_tokens` tokens are computed, at most `chunk` a step."""
        ...

    def longest_hit(self, cached: list[bool], most: int) -> int:
        """The most blocks, up to `most`, that a cached prefix can have, given which blocks are cached."""
        ...
