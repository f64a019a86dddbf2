"""Block hashes: what they cover, and that they are the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvern.cache.prefix_index import PrefixIndex, extend_hashes, root_hash

SIZE = 4


def hashes_of(tokens: list[int], salt: str | None = None, size: int = SIZE) -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, root_hash(salt), np.array(tokens, dtype=np.int32), len(tokens), size)
    return found


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_hash_covers_all_tokens_up_to_its_end_but_none_after() -> None:
    """B034: the chain makes a block's hash speak for its whole prefix."""
    tokens = list(range(12))
    plain = hashes_of(tokens)
    for i in range(12):
        changed = hashes_of([*tokens[:i], 99, *tokens[i + 1 :]])
        assert [a == b for a, b in zip(plain, changed, strict=True)] == [j < i // SIZE for j in range(3)]


def test_same_block_at_another_place_has_another_hash() -> None:
    """B034: position is in the chain, equal tokens are not an equal block."""
    hashes = hashes_of([1, 2, 3, 4] * 3)
    assert len(set(hashes)) == 3
    assert hashes_of([9, 9, 9, 9, 1, 2, 3, 4])[1] not in hashes


def test_salt_separates_and_absence_is_a_salt_of_its_own() -> None:
    tokens = list(range(8))
    roots = [None, "", "a", "b", "a ", "é", "\udcff", " salt ", "kvern prefix 1"]
    seen = [h for salt in roots for h in hashes_of(tokens, salt)]
    assert len(set(seen)) == 2 * len(roots)


def test_block_size_is_part_of_what_a_hash_means() -> None:
    """B031: two granularities never match by accident."""
    assert not set(hashes_of(list(range(16)), size=4)) & set(hashes_of(list(range(16)), size=8))


@pytest.mark.parametrize("low", [0, 2**31 - 8])
def test_tokens_of_any_size(low: int) -> None:
    assert len(set(hashes_of(list(range(low, low + 8))))) == 2


def test_hashes_grow_on_demand_without_computing_again() -> None:
    tokens = np.arange(20, dtype=np.int32)
    grown: list[bytes] = []
    for end in (3, 4, 4, 11, 9, 20):
        before = list(grown)
        extend_hashes(grown, root_hash(None), tokens, end, SIZE)
        assert grown[: len(before)] == before and len(grown) == max(len(before), end // SIZE)
    assert grown == hashes_of(tokens.tolist())


def test_hashes_are_256_bits_and_equal_in_every_process() -> None:
    """Persisted and shared caches depend on it; Python's own hash() differs from process to process."""
    code = (
        "import numpy as np; from kvern.cache.prefix_index import *; h = [];"
        "extend_hashes(h, root_hash('s'), np.arange(8, dtype=np.int32), 8, 4); print(*[x.hex() for x in h])"
    )
    seen = []
    for seed in ("0", "1", "random"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        seen.append(done.stdout.split())
    assert seen == [[h.hex() for h in hashes_of(list(range(8)), "s")]] * 3
    assert all(len(h) == 64 for h in seen[0])


def test_rewritten_tail_is_not_found_under_the_old_tokens() -> None:
    """B029: hashes come from the tokens as they are; whoever looks up the old tail does not get the new block."""
    index = PrefixIndex()
    old, new = [*range(15), 50], [*range(15), 60]
    index.insert(hashes_of(new, size=16)[0], 1)
    assert index.longest_prefix(hashes_of(old, size=16)) == []
    assert index.longest_prefix(hashes_of(new, size=16)) == [1]


def test_first_of_two_equal_blocks_stays() -> None:
    index = PrefixIndex()
    (h,) = hashes_of([1, 2, 3, 4])
    assert index.insert(h, 7) and not index.insert(h, 8)
    assert index.longest_prefix([h]) == [7] and not index.is_hashed(8)


def test_longest_prefix_ends_at_the_first_gap() -> None:
    index = PrefixIndex()
    hashes = hashes_of(list(range(16)))
    for block, h in enumerate(hashes, 1):
        index.insert(h, block)
    index.remove(2)
    assert index.longest_prefix(hashes) == [1]
    assert index.longest_prefix(hashes[2:]) == [3, 4]
    assert index.longest_prefix([]) == []


def test_version_changes_with_every_change_and_only_then() -> None:
    index = PrefixIndex()
    hashes = hashes_of(list(range(8)))
    versions = [index.version]

    def did(change: bool) -> None:
        assert (index.version != versions[-1]) is change
        versions.append(index.version)

    index.insert(hashes[0], 1)
    did(True)
    index.insert(hashes[0], 2)
    did(False)
    index.longest_prefix(hashes)
    did(False)
    index.remove(1)
    did(True)
    index.clear()
    did(True)
