"""Which cached blocks are given up first.

Free blocks with content stand in lists, one per level; blocks are taken from the lowest level that has some, and
within a level the least recently used goes first. A policy says at which level a request's blocks are left behind.
"""

from __future__ import annotations

from typing import Protocol

from kvern.request import Request


class EvictionPolicy(Protocol):
    num_levels: int

    def level(self, request: Request) -> int:
        """0 .. num_levels - 1; blocks of higher levels are kept longer."""
        ...


class LRU:
    """The least recently used first, whoever used it."""

    num_levels = 1

    def level(self, request: Request) -> int:
        return 0


class ByPriority:
    """Blocks last used by urgent requests (priority below 0) go last, those of unhurried ones (above 0) first."""

    num_levels = 3

    def level(self, request: Request) -> int:
        return 1 if request.priority == 0 else 2 if request.priority < 0 else 0


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "priority": ByPriority}
