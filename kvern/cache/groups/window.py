"""A token reads itself and the window - 1 tokens before it; what lies further left is given back.

block:   0      1      2      3      4
       |....|....|..##|####|##n            n: the next token,  #: what it reads
table:   0    0    b2   b3   b4
"""

from __future__ import annotations

from kvern.cache.groups.base import IntOrArray
from kvern.cache.groups.forgetting import Forgetting


class SlidingWindow(Forgetting):
    def __init__(self, block_size: int, window: int) -> None:
        super().__init__(block_size)
        self.window = window

    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        left = num_computed - (self.window - 1)
        kept: IntOrArray = left * (left > 0) // self.block_size
        return kept

    def most_at_once(self, chunk: int) -> int:
        # The window and the chunk side by side, wherever they lie over the block borders.
        return -(-(self.window - 1 + chunk) // self.block_size) + 1
