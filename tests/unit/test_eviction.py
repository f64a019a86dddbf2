"""Which cached prefixes go first."""

from __future__ import annotations

import pytest

from kvern.cache.block_pool import BlockPool
from kvern.config import InvalidConfig
from kvern.testing import SchedulerHarness
from kvern.testing.harness import own_tokens

URGENT, NORMAL, UNHURRIED = (own_tokens(name, 49) for name in ("urgent", "normal", "unhurried"))


def found_after_pressure(eviction: str, pressure: int) -> dict[str, int]:
    """Three prompts of three full blocks each are cached, the urgent one first; then a stranger takes `pressure`
    blocks of twelve. How many tokens of each can still be hit."""
    h = SchedulerHarness(num_blocks=13, eviction=eviction)
    for prompt, priority in ((URGENT, -1), (NORMAL, 0), (UNHURRIED, 1)):
        h.add(prompt, max_tokens=1, priority=priority)
        h.run()
    h.add(own_tokens("stranger", 16 * pressure), max_tokens=1)
    h.run()
    index, found = h.scheduler.state.cache.index, {}
    for name, prompt in (("urgent", URGENT), ("normal", NORMAL), ("unhurried", UNHURRIED)):
        probe = h.requests[h.add(prompt, max_tokens=1)]
        found[name] = h.scheduler.state.cache.lookup(probe).num_tokens
        h.abort(probe.id)
    assert len(index) <= 12
    return found


def test_lru_forgets_who_came_first() -> None:
    assert found_after_pressure("lru", 6) == {"urgent": 0, "normal": 48, "unhurried": 48}


def test_priority_keeps_what_urgent_requests_used() -> None:
    assert found_after_pressure("priority", 6) == {"urgent": 48, "normal": 48, "unhurried": 0}
    assert found_after_pressure("priority", 9) == {"urgent": 48, "normal": 0, "unhurried": 0}


def test_the_last_user_decides() -> None:
    h = SchedulerHarness(num_blocks=13, eviction="priority")
    for priority in (1, -1):
        h.add(NORMAL, max_tokens=1, priority=priority)
        h.run()
    h.add(own_tokens("other", 49), max_tokens=1)
    h.run()
    h.add(own_tokens("stranger", 16 * 9), max_tokens=1)
    h.run()
    again = h.add(NORMAL, max_tokens=1)
    h.run()
    assert h.request(again).num_cached_tokens == 48


def test_order_of_a_pool_with_levels() -> None:
    hashed: set[int] = set()
    pool = BlockPool(8, hashed.__contains__, hashed.discard, num_levels=3)
    taken = pool.allocate(7)
    hashed.update((2, 3, 4, 5))
    pool.free([5, 2], level=2)
    pool.free([4], level=0)
    pool.free([3], level=1)
    pool.free([6, 7, 1])
    assert sorted(taken) == list(range(1, 8))
    assert pool.free_blocks() == [1, 7, 6, 4, 3, 5, 2]
    pool.touch([3])
    assert pool.free_blocks() == [1, 7, 6, 4, 5, 2] and pool.num_free == 6
    assert pool.allocate(5) == [1, 7, 6, 4, 5] and hashed == {2, 3}


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="eviction must be one of lru, priority"):
        SchedulerHarness(eviction="random")
