"""What happens to cached prefixes, for whoever routes requests to the engine that has theirs.

An event names blocks by their chained hashes, so a router that hashes a prompt the same way knows how much of it is
cached where. Events are recorded in the order in which they happen and handed out once per step.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, tag="stored", frozen=True):
    """A block can be hit from now on. Hashes are hexadecimal; `parent` is that of the block before, None for a first
    block. group: cache group of the model, see kvern.cache.groups."""

    block_hash: str
    parent: str | None
    token_ids: list[int]
    lora: str | None
    group: int


class BlockRemoved(msgspec.Struct, tag="removed", frozen=True):
    """A block can no longer be hit on the device. It may have gone to a lower tier, from where it would be loaded."""

    block_hash: str
    group: int


class AllBlocksCleared(msgspec.Struct, tag="cleared", frozen=True):
    """Nothing can be hit any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events since the last take()."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def append(self, event: CacheEvent) -> None:
        self._events.append(event)

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events
