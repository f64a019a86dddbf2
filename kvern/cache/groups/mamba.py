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
from kvern.cache.groups.forgetting import Forgetting


class Mamba(Forgetting):
    recurrent = True

    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        before = num_computed - 1
        kept: IntOrArray = before * (before > 0) // self.block_size
        return kept

    def most_at_once(self, chunk: int) -> int:
        return -(-chunk // self.block_size) + 1  # the state before the step, at a border, and what the step fills
