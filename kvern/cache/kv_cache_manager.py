"""The KV cache as the scheduler sees it: look up, take, publish, give back. Swapping is in swap.py.

Who owns what: the pools own free lists and reference counts, the index owns the hashes, the scheduler owns the block
tables, one per group, all of one request equally long. A block in a table holds one reference. Order within a step:

    grow running requests, publish what they fill  ->  admit: lookup, take, publish  ->  end_step()

An executor begins with the moves of the step: all swapping out, then all copies (every source is read before any
destination is written), then all swapping in. So a block may be freed, and given to somebody else, in the very step in
which its content is moved or copied away.

A block becomes hittable when the step that fills it is *scheduled*: later readers of the same step may share it,
since an executor writes a layer's keys and values before any request reads them. It cannot be *copied* in that step,
because copies come first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.cache.block_pool import NULL_BLOCK, BlockPool
from kvern.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from kvern.cache.eviction import EVICTION_POLICIES
from kvern.cache.groups import make_group
from kvern.cache.pins import Pins
from kvern.cache.prefix_index import DIGEST_SIZE, PrefixIndex, append_hash, extend_hashes, root_hash, token_bytes
from kvern.cache.swap import SwapSpace
from kvern.cache.tiers import DiskTier, HostTier
from kvern.request import Request

ON_DISK = -(1 << 30)  # in the tables of a hit; other negative numbers are host blocks


class CacheHit(NamedTuple):
    """What a lookup found: `num_tokens` tokens that need not be computed.

    tables: one per group, equally long. Entries above 0 are shared as they are; 0 stands where the group needs none;
    -b stands for host block b, and ON_DISK for one on disk: their content is loaded into a new block.
    copy_from: empty, or one entry per group: the next block is cached too but must be copied or loaded before its last
    token is computed anew, since the whole prompt is cached and a step computes at least one token."""

    tables: list[list[int]]
    num_tokens: int
    copy_from: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.tables[0])

    def blocks(self) -> list[int]:
        """Those that are shared, of all groups."""
        return [block for table in self.tables for block in table if block > 0]

    def num_on_device(self) -> int:
        """How many blocks there are before the first that has to be loaded."""
        return min(next((i for i, block in enumerate(table) if block < 0), len(table)) for table in self.tables)


@dataclass(slots=True)
class TierMoves:
    """What the executor has to move between the tiers in this step. Hashes name the files on disk."""

    to_host: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    from_host: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    to_disk: list[tuple[str, int, bytes]] = field(default_factory=list)  # ("device" or "host", block, hash)
    from_disk: list[tuple[bytes, int]] = field(default_factory=list)  # (hash, device block)
    deleted: list[bytes] = field(default_factory=list)  # hashes of files to delete


class KVCacheManager:
    """num_blocks, host_blocks: sizes of the device pool (block 0 included) and of the host pool (0 = no host pool).
    disk_blocks: most blocks kept on disk. groups: see kvern.cache.groups.make_group. chunk: most tokens of a request in
    one step."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: Sequence[str] = ("full",),
        chunk: int = 1024,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        record_events: bool = False,
        eviction: str = "lru",
        max_pinned_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = [make_group(spec, block_size) for spec in groups]
        self.recurrent = any(group.recurrent for group in self.groups)  # then nobody can go back by a token
        self.chunk = chunk
        self.eviction = EVICTION_POLICIES[eviction]()
        self.events = EventLog() if record_events else None
        self.index = PrefixIndex(self._record_removal if record_events else None)
        if enable_prefix_caching:
            self.pool = BlockPool(num_blocks, self.index.is_hashed, self._evicted, self.eviction.num_levels)
        else:
            self.pool = BlockPool(num_blocks, num_levels=self.eviction.num_levels)
        self.disk = DiskTier(disk_blocks) if disk_blocks and enable_prefix_caching else None
        self.host = HostTier(host_blocks, self._host_evicted) if host_blocks else None
        self.swap = SwapSpace(self.pool, self.host, self.groups, block_size)
        self.moves = TierMoves()
        # The same hash means different blocks in different groups.
        self._suffixes = [b"" if len(self.groups) == 1 else bytes([g]) for g in range(len(self.groups))]
        self.pins = Pins(
            self.pool, self.index, self.groups, self._suffixes, block_size, max_pinned_blocks * enable_prefix_caching
        )
        self._miss = CacheHit([[] for _ in self.groups], 0)
        self._filled_by: dict[int, int] = {}  # blocks published in this step -> the row that fills them
        self._memo: dict[str, tuple[tuple[int, ...], CacheHit]] = {}  # request id -> (versions, hit), while it waits

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    def most_held(self, num_tokens: int) -> int:
        """Most blocks a request holds at once while it computes `num_tokens` tokens."""
        return sum(group.most_held(num_tokens, self.chunk) for group in self.groups)

    def holds_all(self, tables: NDArray[np.int32], num_computed: int) -> bool:
        """Whether tables [groups, n] have every block that is read or written from token `num_computed` on."""
        groups = zip(self.groups, tables, strict=True)
        return all(bool(table[group.first_needed(num_computed) :].all()) for group, table in groups)

    # ---- lookup

    def lookup(self, request: Request) -> CacheHit:
        """The longest cached prefix of a waiting request's tokens, leaving at least one token to compute.

        Changes nothing. A repeated lookup costs nothing until the index changes."""
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return self._miss  # prompt logprobs need every position computed
        memo, version = self._memo.get(request.id), self._version()
        if memo is not None and memo[0] == version:
            return memo[1]
        self._extend_hashes(request, request.token_ids, request.num_tokens)
        hashes = request.block_hashes
        length = self._longest(hashes)
        whole = length * self.block_size == request.num_tokens
        hit = self._whole_hit(hashes) if whole else None
        if hit is None:
            hit = self._hit(self._longest(hashes[:-1]) if whole else length, hashes)
        # What is filled in this step may be copied in the next, although the index does not change.
        if not self._filled_by:
            self._memo[request.id] = (version, hit)
        return hit

    def _version(self) -> tuple[int, ...]:
        lower = (self.host.index.version if self.host else 0, self.disk.version if self.disk else 0)
        return (self.index.version, *lower)

    def _where(self, key: bytes) -> int:
        """The block with this hash, as an entry of a hit's tables; 0 if it is in no tier."""
        block = self.index.get(key)
        if block is not None:
            return block
        if self.host is not None:
            block = self.host.index.get(key)
            if block is not None:
                return -block
        return ON_DISK if self.disk is not None and key in self.disk else NULL_BLOCK

    def _longest(self, hashes: list[bytes]) -> int:
        """How many leading blocks can be hit in all groups."""
        if len(self.groups) == 1 and not self.groups[0].drops and self.host is None and self.disk is None:
            return len(self.index.longest_prefix(hashes))
        length = len(hashes)
        cached = [[self._where(h + suffix) != NULL_BLOCK for h in hashes] for suffix in self._suffixes]
        while True:
            shortest = length
            for group, there in zip(self.groups, cached, strict=True):
                shortest = group.longest_hit(there, shortest)
            if shortest == length:
                return length
            length = shortest

    def _hit(self, length: int, hashes: list[bytes]) -> CacheHit:
        return CacheHit(self._tables(length * self.block_size, length, hashes), length * self.block_size)

    def _tables(self, num_computed: int, length: int, hashes: list[bytes]) -> list[list[int]]:
        """What is cached of the first `length` blocks, as far as token `num_computed` reads them."""
        tables = []
        for group, suffix in zip(self.groups, self._suffixes, strict=True):
            first = group.first_needed(num_computed)
            blocks = [self._where(block_hash + suffix) for block_hash in hashes[first:length]]
            tables.append([NULL_BLOCK] * first + blocks)
        return tables

    def _whole_hit(self, hashes: list[bytes]) -> CacheHit | None:
        """All blocks shared but the last, which is copied so that its last token can be computed anew. None if a
        group lacks a block that this token reads, cannot go back by a token, or the last block is not there yet when
        the copies are made."""
        if self.recurrent:
            return None
        last_token = len(hashes) * self.block_size - 1
        tables = self._tables(last_token, len(hashes), hashes)
        for group, table in zip(self.groups, tables, strict=True):
            if NULL_BLOCK in table[group.first_needed(last_token) :] or table[-1] in self._filled_by:
                return None
        last = tuple(table.pop() for table in tables)
        return CacheHit(tables, last_token, copy_from=last)

    def cost(self, hit: CacheHit, num_tokens: int) -> int:
        """Free blocks that a request takes, sooner or later, to compute `num_tokens` tokens after `hit`: new ones, and
        free ones among those hit."""
        new = 0
        for group, table in zip(self.groups, hit.tables, strict=True):
            shared = sum(block > 0 for block in table)
            new += max(group.most_held(num_tokens, self.chunk) - shared, 0)
        return new + self.pool.num_free_of(hit.blocks())

    # ---- take and give back

    def take(
        self, request: Request, hit: CacheHit, num_computed: int, num_tokens: int
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Tables for a request that is admitted with `hit` and computes tokens num_computed .. num_tokens - 1 (those
        between the hit and num_computed come from elsewhere), and the copies (source, destination) to make for it.
        Callers have checked that the blocks are there."""
        self._memo.pop(request.id, None)
        total, hit_blocks = -(-num_tokens // self.block_size), hit.num_blocks
        tables = []
        for group, table in zip(self.groups, hit.tables, strict=True):
            first = group.first_needed(num_computed)
            shared = [NULL_BLOCK] * min(first, hit_blocks) + table[first:]
            self.pool.touch(block for block in shared if block > 0)
            tables.append(shared + [NULL_BLOCK] * max(first - hit_blocks, 0))
        for g, table in enumerate(tables):  # before anything is allocated, which may evict
            for place, entry in enumerate([*table[:hit_blocks], *hit.copy_from[g : g + 1]]):
                self._hold_source(entry, request.block_hashes, place, g)
        copies = []
        for g, table in enumerate(tables):
            missing = [place for place, entry in enumerate(table) if entry < 0]
            blocks = self.pool.allocate(len(missing) + total - len(table))
            for place, block in zip(missing, blocks, strict=False):
                self._load(table[place], request.block_hashes[place] + self._suffixes[g], block)
                table[place] = block
            table += blocks[len(missing) :]
            if hit.copy_from:
                source, copy = hit.copy_from[g], table[hit_blocks]
                if source < 0:
                    self._load(source, request.block_hashes[hit_blocks] + self._suffixes[g], copy)
                elif source != copy:  # it may be free, and even be the block allocated for the copy
                    copies.append((source, copy))
        for source, _ in copies:  # used, so not the next to be evicted
            self.pool.touch((source,))
            self.pool.free((source,))
        return tables, copies

    def allocate(self, count: int) -> list[int]:
        return self.pool.allocate(count)

    def share(self, tables: NDArray[np.int32]) -> None:
        """One more holder for every block of these tables."""
        self.pool.touch(block for block in tables.ravel().tolist() if block != NULL_BLOCK)

    def copy_on_write(self, block: int) -> int:
        """A block of one's own in place of a shared one, which is let go."""
        copy = self.pool.allocate(1)[0]
        self.pool.free([block])
        return copy

    def free(self, request: Request, tables: NDArray[np.int32]) -> None:
        """Give back a request's references: tables [groups, n] in their own order; tails are reused first."""
        for table in tables.tolist():
            self.drop(request, table)

    def drop(self, request: Request, blocks: list[int]) -> None:
        """Give back blocks of one of its tables, in their order there."""
        self.pool.free(reversed(blocks), self.eviction.level(request))

    # ---- the prefix index

    def publish(
        self, request: Request, token_ids: NDArray[np.int32], blocks: NDArray[np.int32], first: int, row: int
    ) -> None:
        """`blocks` [groups, n], from place `first` of the request's tables on, are full once this step has run: make
        them hittable. token_ids: the request's tokens, of which all in these blocks are final."""
        size, end = self.block_size, first + blocks.shape[1]
        self._extend_hashes(request, token_ids, end * size)
        tokens = token_ids[first * size : end * size].reshape(-1, size)
        self._make_hittable(repeat(request), range(first, end), tokens, blocks, repeat(row))

    def publish_next(
        self,
        requests: list[Request],
        places: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        blocks: NDArray[np.int32],
        rows: NDArray[np.intp],
    ) -> None:
        """The same for one block of each of these requests, at `places` of their tables: blocks [groups, n]. The tokens
        of each are in its row of token_ids."""
        size, spots = self.block_size, places.tolist()
        tokens = token_ids[rows[:, None], places[:, None] * size + np.arange(size)]
        for request, place, content in zip(requests, spots, token_bytes(tokens), strict=True):
            hashes = request.block_hashes
            if len(hashes) == place:
                append_hash(hashes, self._root(request), content, request.images, size)
            elif len(hashes) < place:  # what it shares with a fork was hashed for the other
                self._extend_hashes(request, token_ids[request.row], (place + 1) * size)
        self._make_hittable(requests, spots, tokens, blocks, rows.tolist())

    def _make_hittable(
        self,
        requests: Iterable[Request],
        places: Iterable[int],
        tokens: NDArray[np.int32],
        blocks: NDArray[np.int32],
        rows: Iterable[int],
    ) -> None:
        """Blocks [groups, n], each at its place of its request's tables, filled by its row in this step with tokens
        [n, block_size]."""
        insert, filled_by = self.index.insert, self._filled_by
        if len(self.groups) == 1 and self.events is None:  # apart, since it is most cases and half the price
            for request, place, block, row in zip(requests, places, blocks[0].tolist(), rows, strict=False):
                if block != NULL_BLOCK and insert(request.block_hashes[place], block):
                    filled_by[block] = row
            return
        columns = zip(requests, places, tokens, blocks.T.tolist(), rows, strict=False)
        for request, place, ids, column, row in columns:
            block_hash = request.block_hashes[place]
            for group, (suffix, block) in enumerate(zip(self._suffixes, column, strict=True)):
                if block != NULL_BLOCK and insert(block_hash + suffix, block):
                    filled_by[block] = row
                    if self.events is not None:
                        parent = request.block_hashes[place - 1].hex() if place else None
                        self.events.append(BlockStored(block_hash.hex(), parent, ids.tolist(), request.lora, group))

    def _record_removal(self, key: bytes) -> None:
        assert self.events is not None
        digest, group = key[:DIGEST_SIZE], key[DIGEST_SIZE:]
        self.events.append(BlockRemoved(digest.hex(), group[0] if group else 0))

    def has_readers(self, row: int, wanted_blocks: Container[int] = ()) -> bool:
        """Whether somebody in this step reads a block that `row` fills in this step, or would, if given
        `wanted_blocks`: then it must run."""
        filled = [b for b, r in self._filled_by.items() if r == row]
        return any(self.pool.ref_count[b] > 1 or b in wanted_blocks for b in filled)

    def retract(self, row: int) -> None:
        """`row` will not run in this step after all: what it would have filled cannot be hit."""
        for block in [b for b, r in self._filled_by.items() if r == row]:
            self.index.remove(block)
            del self._filled_by[block]

    def end_step(self) -> TierMoves | None:
        """What was filled counts as there, and host blocks that were written, read or let go can be reused. Returns the
        moves between tiers to make before this step computes; None if there are no tiers."""
        self._filled_by.clear()
        if self.host is None and self.disk is None:
            return None
        if self.host is not None:
            self.host.end_step()
        if self.disk is not None:
            self.moves.deleted += self.disk.end_step()
        moves, self.moves = self.moves, TierMoves()
        return moves

    def distrust(self, tables: NDArray[np.int32]) -> None:
        """What is in these blocks may be wrong: it shall not be hit by others."""
        for block in tables.ravel().tolist():
            if self.index.is_hashed(block):
                self.index.remove(block)
                self.pins.lost(block)

    def forget(self, request_id: str) -> None:
        """A waiting request is gone, or its tokens changed; drop what was remembered for it."""
        self._memo.pop(request_id, None)

    def reset(self) -> bool:
        """Drop every cached prefix. False, and nothing done, while blocks are held."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self.index.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        self._memo.clear()
        return True

    # ---- the tiers below

    def _evicted(self, block: int) -> None:
        """A device block is about to be overwritten: its content goes one tier down, if there is one with room."""
        block_hash = self.index.hash_of(block)
        assert block_hash is not None
        self.index.remove(block)
        if self.host is not None and self.host.index.get(block_hash) is None:
            place = self.host.put(block_hash)
            if place is not None:
                self.moves.to_host.append((block, place))
                return
        self._to_disk("device", block, block_hash)

    def _host_evicted(self, block_hash: bytes, block: int) -> None:
        self._to_disk("host", block, block_hash)

    def _to_disk(self, tier: str, block: int, block_hash: bytes, keep: bool = False) -> None:
        """keep: write it although it stays where it is."""
        on_host = self.host is not None and self.host.index.get(block_hash) is not None
        if self.disk is None or (on_host and not keep):
            return
        deleted = self.disk.put(block_hash)
        if deleted is not None:
            if block_hash in self.moves.deleted:
                self.moves.deleted.remove(block_hash)
            self.moves.to_disk.append((tier, block, block_hash))
            self.moves.deleted += deleted

    def _hold_source(self, entry: int, hashes: list[bytes], place: int, group: int) -> None:
        if entry == ON_DISK:
            assert self.disk is not None
            self.disk.read(hashes[place] + self._suffixes[group])
        elif entry < 0:
            assert self.host is not None
            self.host.read(-entry)

    def _load(self, entry: int, key: bytes, block: int) -> None:
        """Have `block` filled from where the entry of a hit says."""
        if entry == ON_DISK:
            self.moves.from_disk.append((key, block))
        else:
            self.moves.from_host.append((-entry, block))

    def persist(self) -> None:
        """Have everything that can be hit, and is not in use, written to disk, as far as it fits."""
        if self.disk is None:
            return
        if self.host is not None:
            for block in self.host.pool.free_blocks():
                block_hash = self.host.index.hash_of(block)
                if block_hash is not None and self.index.get(block_hash) is None:
                    self._to_disk("host", block, block_hash, keep=True)
        for block in self.pool.free_blocks():
            block_hash = self.index.hash_of(block)
            if block_hash is not None:
                self._to_disk("device", block, block_hash, keep=True)

    def found_files(self, names: Iterable[str]) -> list[str]:
        """What is on disk at start, the longest unused first. Returns the names of those that are too much."""
        if self.disk is None:
            return []
        return [block_hash.hex() for block_hash in self.disk.found(bytes.fromhex(name) for name in names)]

    def forget_files(self, names: Iterable[str]) -> None:
        """These files are not there, or not what was written."""
        for name in names:
            if self.disk is not None:
                self.disk.forget(bytes.fromhex(name))

    def _extend_hashes(self, request: Request, token_ids: NDArray[np.int32], num_tokens: int) -> None:
        root = self._root(request)
        extend_hashes(request.block_hashes, root, token_ids, num_tokens, self.block_size, request.images)

    def _root(self, request: Request) -> bytes:
        return b"" if request.block_hashes else root_hash(request.cache_salt, request.lora)
