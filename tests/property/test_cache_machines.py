"""The block pool and the prefix index against models made of plain lists and dicts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvern.cache.block_pool import NULL_BLOCK, BlockPool
from kvern.cache.prefix_index import PrefixIndex, extend_hashes, root_hash

BLOCK_SIZE = 2


class BlockPoolMachine(RuleBasedStateMachine):
    """Model: who is held how often, and two lists of free blocks, those without content and those with."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.hashed: set[int] = set()
        self.evicted: list[int] = []
        self.pool = BlockPool(num_blocks, self.hashed.__contains__, self._on_evict)
        self.plain, self.used = list(range(1, num_blocks)), list[int]()
        self.holders = dict.fromkeys(range(1, num_blocks), 0)

    def _on_evict(self, block: int) -> None:
        self.evicted.append(block)
        self.hashed.discard(block)

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        if count > len(self.plain) + len(self.used):
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        self.evicted.clear()
        expected_evictions = self.used[: max(0, count - len(self.plain))]
        got = self.pool.allocate(count)
        assert self.evicted == expected_evictions
        assert len(got) == len(set(got)) == count
        for place, block in enumerate(got):
            free = self.plain if self.plain else self.used
            # Which of the blocks without content comes first is nobody's business; all of them come before the others.
            assert block in self.plain if self.plain else block == self.used[0], (place, got)
            free.remove(block)
            self.holders[block] = 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held() + self.used)), unique=True))
        self.pool.touch(blocks)
        for block in blocks:
            if self.holders[block] == 0:
                self.used.remove(block)
            self.holders[block] += 1

    @precondition(lambda self: self.held())
    @rule(data=st.data(), null=st.booleans())
    def free(self, data: st.DataObject, null: bool) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held())), unique=True))
        self.pool.free([NULL_BLOCK, *blocks] if null else blocks)
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                (self.used if block in self.hashed else self.plain).append(block)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.hashed.add(data.draw(st.sampled_from(sorted(self.held()))))

    def held(self) -> list[int]:
        return [block for block, count in self.holders.items() if count]

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        free = self.pool.free_blocks()
        assert len(free) == self.pool.num_free
        assert set(free[: len(self.plain)]) == set(self.plain)
        assert free[len(self.plain) :] == self.used
        assert self.pool.ref_count[1:] == list(self.holders.values())
        assert self.pool.num_free_of(self.holders) == len(free)
        assert NULL_BLOCK not in free


class PrefixIndexMachine(RuleBasedStateMachine):
    """Model: a dict from (salt, all tokens up to a block's end) to the block that was first to hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[tuple[object, ...], int] = {}
        self.next_block = 1

    @staticmethod
    def hashes(salt: str | None, tokens: list[int]) -> list[bytes]:
        found: list[bytes] = []
        extend_hashes(found, root_hash(salt), np.array(tokens, dtype=np.int32), len(tokens), BLOCK_SIZE)
        return found

    @staticmethod
    def names(salt: str | None, tokens: list[int]) -> list[tuple[object, ...]]:
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        return [(salt, *tokens[:end]) for end in ends]

    @rule(salt=st.sampled_from([None, "", "a"]), tokens=st.lists(st.integers(0, 1), max_size=7))
    def insert(self, salt: str | None, tokens: list[int]) -> None:
        for block_hash, name in zip(self.hashes(salt, tokens), self.names(salt, tokens), strict=True):
            version, is_new = self.index.version, name not in self.model
            assert self.index.insert(block_hash, self.next_block) is is_new
            assert (self.index.version != version) is is_new
            self.model.setdefault(name, self.next_block)
            self.next_block += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        version = self.index.version
        self.index.remove(self.model.pop(name))
        assert self.index.version != version

    @rule(salt=st.sampled_from([None, "", "a"]), tokens=st.lists(st.integers(0, 1), max_size=7))
    def lookup(self, salt: str | None, tokens: list[int]) -> None:
        expected = []
        for name in self.names(salt, tokens):
            if name not in self.model:
                break
            expected.append(self.model[name])
        assert self.index.longest_prefix(self.hashes(salt, tokens)) == expected

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.model.clear()

    @invariant()
    def same_size(self) -> None:
        assert len(self.index) == len(self.model)
        assert sorted(block for block, _ in self.index.items()) == sorted(self.model.values())
        for block, block_hash in self.index.items():
            assert self.index.is_hashed(block) and self.index.hash_of(block) == block_hash


_SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)
BlockPoolMachine.TestCase.settings = PrefixIndexMachine.TestCase.settings = _SETTINGS
TestBlockPool = BlockPoolMachine.TestCase
TestPrefixIndex = PrefixIndexMachine.TestCase
