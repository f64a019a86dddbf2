"""A layer with a state: each token replaces it, and reads nothing but the state after the token before.

block:   0      1      2      3
       |....|....|....|.n                n: the next token
table:   0    0    0    b3               b3: the state after the token before n

A block holds the state after the last token that was computed in it. While a request stays in a block, that is one
block whose content is replaced in each step; the token that begins the next one reads the state there and leaves its
own in a new block. So the state at each block border that a step passes is left behind, as a checkpoint: with a prefix
cache it can be hit, without one it is given back. What lies between borders cannot be hit, and a state cannot go back.

An executor computes such layers row by row in the order of the step, since a row may begin with a checkpoint that a row
before it leaves in this step.
"""

from __future__ import annotations

from kvern.cache.groups.base import IntOrArray


class Mamba:
    drops = True
    recurrent = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        before = num_computed - 1
        kept: IntOrArray = before * (before > 0) // self.block_size
        return kept

    def most_held(self, num_tokens: IntOrArray, chunk: int) -> IntOrArray:
        whole = -(-num_tokens // self.block_size)
        most = -(-chunk // self.block_size) + 1  # the state before the step, at a border, and what the step fills
        held: IntOrArray = whole - (whole - most) * (whole > most)
        return held

    def longest_hit(self, cached: list[bool], most: int) -> int:
        """The last checkpoint."""
        for length in range(most, 0, -1):
            if cached[length - 1]:
                return length
        return 0
