"""Every token reads all tokens before it."""

from __future__ import annotations

from kvern.cache.groups.base import IntOrArray


class FullAttention:
    drops = False
    recurrent = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        return num_computed * 0

    def most_held(self, num_tokens: IntOrArray, chunk: int) -> IntOrArray:
        return -(-num_tokens // self.block_size)

    def longest_hit(self, cached: list[bool], most: int) -> int:
        for i in range(most):
            if not cached[i]:
                return i
        return most
