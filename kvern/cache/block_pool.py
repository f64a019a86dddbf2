"""The pool of KV cache blocks: who is free, who is held, and in which order free blocks are given out.

A block is a number, 0 .. num_blocks - 1; what it holds is the executor's affair. Block 0 is the *null block*: never
given out, never freed, and what a table shows where a block was dropped (left of a sliding window).

    free blocks, in circular doubly linked lists threaded through two arrays, one list for blocks without a hash and
    one for each level of those with one (see kvern.cache.eviction); list i has its sentinel at index num_blocks + i:

        no hash:  sentinel <-> [freed last, reused first] ... <-> sentinel      free() puts in front
        level 0:  sentinel <-> [least recently used ... most] <-> sentinel      free() appends
        level 1:  ...                                    allocate() takes from the front of the first that has some

Every block is in exactly one state: free (reference count 0, in the list) or held (count >= 1, not in the list). A
free block with a hash keeps its content and can be touched back to life; it loses hash and content only when
allocate() hands it out, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks with an O(1) free list.

    `is_hashed(block)` says whether a block's content can still be hit; `on_evict(block)` is called when allocate()
    takes such a block. Both belong to the prefix index; a pool without one has neither.
    """

    def __init__(
        self,
        num_blocks: int,
        is_hashed: Callable[[int], bool] | None = None,
        on_evict: Callable[[int], None] | None = None,
        num_levels: int = 1,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is never used), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_count = [0] * num_blocks
        self._is_hashed = is_hashed
        self._on_evict = on_evict
        self._sentinels = list(range(num_blocks, num_blocks + 1 + num_levels))
        first = num_blocks  # the sentinel of blocks without a hash: all of them, at first
        self._next = [*range(1, num_blocks + 1), 1, *self._sentinels[1:]]
        self._prev = [*range(-1, num_blocks - 1), num_blocks - 1, *self._sentinels[1:]]
        self._prev[1] = first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with reference count 1, in the order of the free list. Raises ValueError, and changes
        nothing, if there are fewer free ones: callers check first."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        following, ref_count = self._next, self.ref_count
        taken: list[int] = []
        for sentinel in self._sentinels:
            block = following[sentinel]
            while len(taken) < count and block != sentinel:
                taken.append(block)
                ref_count[block] = 1
                block = following[block]
            following[sentinel] = block
            self._prev[block] = sentinel
            if len(taken) == count:
                break
        self.num_free -= count
        if self._is_hashed is not None and self._on_evict is not None:
            for block in taken:
                if self._is_hashed(block):
                    self._on_evict(block)
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; free ones leave the free list with their content."""
        ref_count, following, previous = self.ref_count, self._next, self._prev
        for block in blocks:
            if ref_count[block] == 0:
                before, after = previous[block], following[block]
                following[before] = after
                previous[after] = before
                self.num_free -= 1
            ref_count[block] += 1

    def free(self, blocks: Iterable[int], level: int = 0) -> None:
        """One reference less to each block, in the given order: of hashed blocks of one level the first one freed is
        the first one reused, so a request gives its blocks back tail first. Null blocks are passed over."""
        ref_count, following, previous = self.ref_count, self._next, self._prev
        unhashed, hashed = self._sentinels[0], self._sentinels[1 + level]
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            ref_count[block] -= 1
            if ref_count[block]:
                continue
            if self._is_hashed is not None and self._is_hashed(block):
                before, after = previous[hashed], hashed
            else:
                before, after = unhashed, following[unhashed]
            following[before] = previous[after] = block
            previous[block], following[block] = before, after
            self.num_free += 1

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free, so that touching them would cost as much as allocating."""
        ref_count = self.ref_count
        return sum(ref_count[block] == 0 for block in blocks)

    def free_blocks(self) -> list[int]:
        """The free list in order of reuse. O(free): for checks and tests."""
        found = []
        for sentinel in self._sentinels:
            block = self._next[sentinel]
            while block != sentinel:
                found.append(block)
                block = self._next[block]
        return found
