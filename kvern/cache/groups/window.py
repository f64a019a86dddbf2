"""A token reads itself and the window - 1 tokens before it; what lies further left is given back.

block:   0      1      2      3      4
       |....|....|..##|####|##n            n: the next token,  #: what it reads
table:   0    0    b2   b3   b4
"""

from __future__ import annotations

from kvern.cache.groups.base import IntOrArray


class SlidingWindow:
    drops = True
    recurrent = False

    def __init__(self, block_size: int, window: int) -> None:
        self.block_size = block_size
        self.window = window

    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        left = num_computed - (self.window - 1)
        kept: IntOrArray = left * (left > 0) // self.block_size
        return kept

    def most_held(self, num_tokens: IntOrArray, chunk: int) -> IntOrArray:
        whole = -(-num_tokens // self.block_size)
        # The window and the chunk side by side, wherever they lie over the block borders.
        most = -(-(self.window - 1 + chunk) // self.block_size) + 1
        held: IntOrArray = whole - (whole - most) * (whole > most)
        return held

    def longest_hit(self, cached: list[bool], most: int) -> int:
        """A prefix of L blocks can be used if the blocks that the token after it reads are all cached."""
        for length in range(most, 0, -1):
            if all(cached[self.first_needed(length * self.block_size) : length]):
                return length
        return 0
