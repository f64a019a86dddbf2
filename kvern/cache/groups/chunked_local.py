"""A token reads itself and the tokens before it in its own chunk, as in Llama 4; earlier chunks are given back.

chunk:   |      0      |      1      |
block:   0      1      2      3      4
       |....|....|....|####|#n            n: the next token,  #: what it reads
table:   0    0    0    b3   b4

The first token of a chunk reads nothing before it: a prefix that ends with a chunk needs no block of this group, and if
a model had no other group, nothing before the last chunk of a prompt would have to be computed at all.
"""

from __future__ import annotations

from math import gcd

from kvern.cache.groups.base import IntOrArray
from kvern.cache.groups.forgetting import Forgetting


class ChunkedLocal(Forgetting):
    def __init__(self, block_size: int, size: int) -> None:
        """size: tokens of a chunk."""
        super().__init__(block_size)
        self.size = size

    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        first: IntOrArray = num_computed // self.size * self.size // self.block_size
        return first

    def most_at_once(self, chunk: int) -> int:
        # From the beginning of a chunk, as late in a block as it can be, to a step that begins with its last token.
        offset = self.block_size - gcd(self.block_size, self.size)
        return -(-(offset + self.size - 1 + chunk) // self.block_size)
