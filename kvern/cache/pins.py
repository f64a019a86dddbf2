"""Prefixes that are kept whatever else is cached: exempt from eviction for a time.

A pin names the full blocks of a prefix by their hashes, whether they are cached or not. Between two steps it takes one
reference to each that is, in order, and so pinned blocks are held blocks: nobody evicts them, and for admission they
are not free. It ends when its time is over, when it is taken back, or when a request could otherwise not run at all:
then the pin that would end first gives way. How many blocks may be pinned is bounded when a pin is made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvern.cache.block_pool import BlockPool
from kvern.cache.groups import CacheGroup
from kvern.cache.prefix_index import PrefixIndex, extend_hashes, root_hash
from kvern.sampling_params import InvalidRequest


@dataclass(frozen=True, slots=True)
class PinView:
    """A pin at one moment, as plain data."""

    id: str
    num_tokens: int  # in full blocks; the rest of the prefix is not pinned
    num_blocks: int  # of all cache groups
    num_cached: int  # of these, how many are there and held
    expires: float


@dataclass(slots=True)
class _Pin:
    id: str
    num_tokens: int
    expires: float
    keys: list[bytes]  # in the index, in the order in which they are computed
    held: list[int] = field(default_factory=list)  # blocks of the first of them


class Pins:
    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        groups: Sequence[CacheGroup],
        suffixes: Sequence[bytes],
        block_size: int,
        most: int,
    ) -> None:
        """suffixes: what tells the hashes of the groups apart. most: pinned blocks, cached or not."""
        self.most = most
        self._pool = pool
        self._index = index
        self._groups = groups
        self._suffixes = suffixes
        self._block_size = block_size
        self._pins: dict[str, _Pin] = {}
        self._wanted: Counter[bytes] = Counter()  # how many pins name a block
        self._held: Counter[int] = Counter()  # how many pins hold a block
        self._incomplete = False
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_held(self) -> int:
        """Different blocks."""
        return len(self._held)

    def held(self) -> dict[int, int]:
        """Block -> how many pins hold it."""
        return dict(self._held)

    def views(self) -> list[PinView]:
        """The oldest first."""
        return [
            PinView(pin.id, pin.num_tokens, len(pin.keys), len(pin.held), pin.expires) for pin in self._pins.values()
        ]

    def add(
        self, token_ids: Sequence[int], ttl: float, now: float, cache_salt: str | None = None, lora: str | None = None
    ) -> str:
        """Pin the full blocks of this prefix until now + ttl. Returns the pin's id. Raises InvalidRequest."""
        if not self.most:
            raise InvalidRequest("nothing can be pinned: max_pinned_blocks is 0", "prompt")
        if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0.0 < ttl < math.inf:
            raise InvalidRequest(f"ttl must be a number of seconds above 0, got {ttl!r:.100}", "ttl")
        num_blocks = len(token_ids) // self._block_size
        if not num_blocks:
            text = f"the prefix has {len(token_ids)} tokens, and what is pinned are full blocks of {self._block_size}"
            raise InvalidRequest(text, "prompt")
        keys = self._keys(token_ids, num_blocks, cache_salt, lora)
        total = len(self._wanted) + sum(key not in self._wanted for key in keys)
        if total > self.most:
            raise InvalidRequest(
                f"the prefix has {len(keys)} blocks; with it {total} would be pinned, max_pinned_blocks is {self.most}",
                "prompt",
            )
        pin = _Pin(f"pin-{self._num_made}", num_blocks * self._block_size, now + ttl, keys)
        self._num_made += 1
        self._pins[pin.id] = pin
        self._wanted.update(keys)
        self._incomplete = True
        return pin.id

    def _keys(self, token_ids: Sequence[int], num_blocks: int, cache_salt: str | None, lora: str | None) -> list[bytes]:
        hashes: list[bytes] = []
        num_tokens = num_blocks * self._block_size
        extend_hashes(
            hashes, root_hash(cache_salt, lora), np.array(token_ids, dtype=np.int32), num_tokens, self._block_size
        )
        # A group that forgets keeps of a prefix only what its last token reads, if it is hit whole.
        first = [int(group.first_needed(num_tokens - 1)) for group in self._groups]
        return [
            block_hash + suffix
            for place, block_hash in enumerate(hashes)
            for suffix, needed in zip(self._suffixes, first, strict=True)
            if place >= needed
        ]

    def remove(self, pin_id: str) -> bool:
        """False if there is no such pin."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self._let_go(pin, 0)
        self._wanted -= Counter(pin.keys)
        return True

    def expire(self, now: float) -> None:
        for pin in [pin for pin in self._pins.values() if now >= pin.expires]:
            self.remove(pin.id)

    def take_hold(self, spare: int) -> None:
        """Hold what has been cached since. spare: free blocks that nobody is to get; more are not taken."""
        if not self._incomplete:
            return
        self._incomplete = False
        for pin in self._pins.values():
            while len(pin.held) < len(pin.keys):
                block = self._index.get(pin.keys[len(pin.held)])
                free = block is not None and not self._pool.ref_count[block]
                if block is None or (free and spare <= 0):
                    self._incomplete = True
                    break
                spare -= free
                self._pool.touch((block,))
                self._held[block] += 1
                pin.held.append(block)

    def lost(self, block: int) -> None:
        """A block's content is not what its hash says: what is pinned ends before it, until it is cached again."""
        if block in self._held:
            for pin in self._pins.values():
                if block in pin.held:
                    self._let_go(pin, pin.held.index(block))
                    self._incomplete = True

    def give_way(self) -> bool:
        """End the pin that would end first, of those that hold blocks nobody else does. False if there is none."""
        in_the_way = [
            pin
            for pin in self._pins.values()
            if any(self._pool.ref_count[block] == self._held[block] for block in pin.held)
        ]
        return bool(in_the_way) and self.remove(min(in_the_way, key=lambda pin: pin.expires).id)

    def _let_go(self, pin: _Pin, first: int) -> None:
        """From place `first` on; the tail is reused first."""
        self._held -= Counter(pin.held[first:])
        self._pool.free(reversed(pin.held[first:]))
        del pin.held[first:]
