"""Where evicted blocks may go instead of being lost: host memory, then disk.

    device --evicted--> host --evicted--> disk            a hit in a lower tier is loaded into a new device block
       \\__________________________________/^              (without a host tier, blocks go to disk at once)

A tier only says what is where; the executor moves the content. Within a step it moves in this order: to disk, from the
device to the host, copies, from disk and from the host to the device. So a host block may be taken over in the step in
which its content goes to disk; one that is written or read in a step is held until the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvern.cache.block_pool import BlockPool
from kvern.cache.prefix_index import PrefixIndex


class HostTier:
    """Host blocks 1 .. num_blocks: those of swapped requests, held, and evicted ones that can be hit, free."""

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes, int], None] | None) -> None:
        """on_evict(hash, host block): a block's content is about to be overwritten."""
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks + 1, self.index.is_hashed, self._evict)
        self._on_evict = on_evict
        self.leaving: list[int] = []  # blocks to be let go at the end of the step

    def _evict(self, block: int) -> None:
        block_hash = self.index.hash_of(block)
        self.index.remove(block)
        if self._on_evict is not None and block_hash is not None:
            self._on_evict(block_hash, block)

    def put(self, block_hash: bytes) -> int | None:
        """A place for the block with this hash, which is not here yet; None if all blocks are held, or it is here."""
        if self.index.get(block_hash) is not None or not self.pool.num_free:
            return None
        block = self.pool.allocate(1)[0]
        self.index.insert(block_hash, block)
        self.leaving.append(block)
        return block

    def read(self, block: int) -> None:
        """A block with content is read in this step."""
        self.pool.touch((block,))
        self.leaving.append(block)

    def end_step(self) -> None:
        self.pool.free(self.leaving)
        self.leaving.clear()


class DiskTier:
    """Hashes of blocks on disk, least recently used first. One file each; the executor knows them by their hash."""

    def __init__(self, capacity: int) -> None:
        """capacity: in blocks."""
        self.capacity = capacity
        self.version = 0  # changes whenever a lookup might give another answer
        self._hashes: dict[bytes, None] = {}
        self._read: set[bytes] = set()  # in this step: only ever asked for membership

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._hashes

    def found(self, hashes: Iterable[bytes]) -> list[bytes]:
        """What is on disk at start, least recently used first. Returns what is too much and has to be deleted."""
        self._hashes = dict.fromkeys(hashes)
        self.version += 1
        return self._shrink()

    def put(self, block_hash: bytes) -> list[bytes] | None:
        """Take in a block; returns the hashes of those that have to be deleted for it. None if it is here already."""
        if block_hash in self._hashes:
            self.read(block_hash)
            return None
        self._hashes[block_hash] = None
        self.version += 1
        return self._shrink()

    def read(self, block_hash: bytes) -> None:
        """A block is read in this step: it becomes the most recently used, and stays until the step's end."""
        del self._hashes[block_hash]
        self._hashes[block_hash] = None
        self._read.add(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """A file could not be read: it is not there. Unknown hashes are fine."""
        if block_hash in self._hashes:
            del self._hashes[block_hash]
            self.version += 1

    def end_step(self) -> list[bytes]:
        """Returns what has to be deleted because it was read while it should have gone."""
        self._read.clear()
        return self._shrink()

    def _shrink(self) -> list[bytes]:
        gone = []
        for block_hash in list(self._hashes)[: max(0, len(self._hashes) - self.capacity)]:
            if block_hash not in self._read:
                del self._hashes[block_hash]
                gone.append(block_hash)
        return gone
