"""The KV cache as the scheduler sees it: look up, take, allocate, publish, give back.

Who owns what: the pool owns the free list and the reference counts, the index owns the hashes, the scheduler owns the
block tables. A block in a table holds one reference. Order within a step, relied upon below:

    grow running requests, publish what they fill  ->  admit: lookup, take, publish  ->  end_step()

A block becomes hittable when the step that fills it is *scheduled*: later readers of the same step may share it,
since an executor writes a layer's keys and values before any request reads them. It cannot be *copied* in that step,
because copies come first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvern.cache.block_pool import BlockPool
from kvern.cache.prefix_index import PrefixIndex, extend_hashes, root_hash
from kvern.request import Request


class CacheHit(NamedTuple):
    """What a lookup found. `blocks` can be shared as they are; if `copy_from` is not 0, the whole prompt is cached
    and its last block must be copied before its last token is computed anew. `num_tokens` need not be computed."""

    blocks: list[int]
    num_tokens: int
    copy_from: int = 0

    def num_new_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks to allocate so that `num_tokens` tokens have their place, the copy included."""
        return -(-num_tokens // block_size) - len(self.blocks)

    def without_copy(self, block_size: int) -> CacheHit:
        """The same hit one block shorter: for a pool too full to hold source and copy at once."""
        return CacheHit(self.blocks, len(self.blocks) * block_size)


MISS = CacheHit([], 0)


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex()
        if enable_prefix_caching:
            self.pool = BlockPool(num_blocks, self.index.is_hashed, self.index.remove)
        else:
            self.pool = BlockPool(num_blocks)
        self._filled_by: dict[int, int] = {}  # blocks published in this step -> the row that fills them
        self._held_for_copy: list[int] = []
        self._memo: dict[str, tuple[int, CacheHit]] = {}  # request id -> (index version, hit), while it waits

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- within a step

    def end_step(self) -> None:
        """What was filled counts as there. Sources of copies may be reused: copies are the first thing an executor
        does."""
        self._filled_by.clear()
        if self._held_for_copy:
            self.pool.free(self._held_for_copy)
            self._held_for_copy.clear()

    def lookup(self, request: Request) -> CacheHit:
        """The longest cached prefix of a waiting request's tokens, leaving at least one token to compute.

        Changes nothing. A repeated lookup costs nothing until the index changes."""
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return MISS  # prompt logprobs need every position computed
        memo = self._memo.get(request.id)
        if memo is not None and memo[0] == self.index.version:
            return memo[1]
        num_tokens, size = request.num_tokens, self.block_size
        self._extend_hashes(request, request.token_ids, num_tokens)
        blocks = self.index.longest_prefix(request.block_hashes)
        if len(blocks) * size < num_tokens:
            hit = CacheHit(blocks, len(blocks) * size)
        elif blocks[-1] in self._filled_by:  # not there yet when the copies are made
            hit = CacheHit(blocks[:-1], num_tokens - size)
        else:
            hit = CacheHit(blocks[:-1], num_tokens - 1, copy_from=blocks[-1])
        # What is filled in this step may be copied in the next, although the index does not change.
        if not self._filled_by:
            self._memo[request.id] = (self.index.version, hit)
        return hit

    def cost(self, hit: CacheHit, num_tokens: int) -> int:
        """Free blocks it takes to hold `num_tokens` tokens after `hit`: new ones, free ones among those hit, and a
        free source of a copy, which is held through this step."""
        free_hits = self.pool.num_free_of(hit.blocks)
        if hit.copy_from:
            free_hits += self.pool.num_free_of((hit.copy_from,))
        return hit.num_new_blocks(num_tokens, self.block_size) + free_hits

    def take(self, request: Request, hit: CacheHit, num_tokens: int) -> list[int]:
        """The table of a request that is admitted with `hit` and computes up to `num_tokens`. Callers have checked
        that the blocks are there. If the hit asks for a copy, the destination is the entry after hit.blocks, and
        the source is held until end_step()."""
        self._memo.pop(request.id, None)
        self.pool.touch(hit.blocks)
        if hit.copy_from:
            self.pool.touch((hit.copy_from,))
            self._held_for_copy.append(hit.copy_from)
        return hit.blocks + self.pool.allocate(hit.num_new_blocks(num_tokens, self.block_size))

    def allocate(self, count: int) -> list[int]:
        return self.pool.allocate(count)

    def publish(
        self, request: Request, token_ids: NDArray[np.int32], table: NDArray[np.int32], first: int, end: int, row: int
    ) -> None:
        """Blocks first .. end - 1 of `table` are full once this step has run: make them hittable.

        token_ids: the request's tokens, of which all in these blocks are final."""
        self._extend_hashes(request, token_ids, end * self.block_size)
        for i in range(first, end):
            block = int(table[i])
            if self.index.insert(request.block_hashes[i], block):
                self._filled_by[block] = row

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

    def distrust(self, table: Iterable[int]) -> None:
        """Something went wrong in the row with this table: what it wrote or read shall not be hit by others."""
        for block in table:
            if self.index.is_hashed(block):
                self.index.remove(block)

    def free(self, table: Iterable[int]) -> None:
        """Give back one request's references. `table` in its own order; its tail is reused first."""
        self.pool.free(reversed(list(table)))

    def forget(self, request_id: str) -> None:
        """A waiting request is gone; drop what was remembered for it."""
        self._memo.pop(request_id, None)

    def reset(self) -> bool:
        """Drop every cached prefix. False, and nothing done, while blocks are held."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self.index.clear()
        self._memo.clear()
        return True

    def _extend_hashes(self, request: Request, token_ids: NDArray[np.int32], num_tokens: int) -> None:
        root = b"" if request.block_hashes else root_hash(request.cache_salt)
        extend_hashes(request.block_hashes, root, token_ids, num_tokens, self.block_size)
