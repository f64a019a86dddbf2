"""What the groups have in common that give blocks back while a request goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvern.cache.groups.base import IntOrArray


class Forgetting(ABC):
    drops = True
    recurrent = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @abstractmethod
    def first_needed(self, num_computed: IntOrArray) -> IntOrArray:
        """See CacheGroup."""

    @abstractmethod
    def most_at_once(self, chunk: int) -> int:
        """The most blocks from the first that a step of `chunk` tokens needs to the last that it fills."""

    def most_held(self, num_tokens: IntOrArray, chunk: int) -> IntOrArray:
        whole = -(-num_tokens // self.block_size)
        most = self.most_at_once(chunk)
        held: IntOrArray = whole - (whole - most) * (whole > most)
        return held

    def longest_hit(self, cached: list[bool], most: int) -> int:
        """A prefix of L blocks can be used if the blocks that the token after it reads are all cached."""
        for length in range(most, 0, -1):
            if all(cached[self.first_needed(length * self.block_size) : length]):
                return length
        return 0
