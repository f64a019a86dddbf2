"""Swapped requests: their blocks on the host, and the way there and back.

Requests that share device blocks share host blocks as well, if they go together: a host block counts its holders as a
device block does, and its content is moved once. On the way back those that come together share again:

    device   A: 1 2 3   B: 1 2 4        before; 1 and 2 are full, 3 and 4 are written to
    host     A: 7 8 9   B: 7 8 10       four moves, not six
    device   A: 5 6 1   B: 5 6 2        after
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvern.cache.block_pool import NULL_BLOCK, BlockPool
from kvern.cache.groups import CacheGroup
from kvern.cache.tiers import HostTier

Moves = list[tuple[int, int]]


class Swapped(NamedTuple):
    """What comes back of a request."""

    host_tables: list[list[int]]
    num_computed: int  # tokens that are on the host
    num_tokens: int  # tokens that its tables shall have room for


class SwapSpace:
    def __init__(self, pool: BlockPool, host: HostTier | None, groups: Sequence[CacheGroup], block_size: int) -> None:
        self._pool = pool
        self._host = host
        self._groups = groups
        self._block_size = block_size

    def has_room(self, count: int) -> bool:
        return self._host is not None and self._host.pool.num_free >= count

    def swap_out(
        self, tables: Sequence[list[list[int]]], copied_from: Mapping[int, int]
    ) -> tuple[list[list[list[int]]], Moves]:
        """Host tables for the device tables of requests that go together, and the moves (device block, host block).
        Callers have checked that there is room; the device blocks are still held. copied_from: destination -> source
        of the copies of this step, which are made after the moves: what is still in the source is what goes."""
        assert self._host is not None
        places: dict[int, int] = {}  # device block -> host block
        host_tables = []
        for request_tables in tables:
            mine = []
            for table in request_tables:
                host_table = []
                for block in table:
                    source = copied_from.get(block, block)
                    if block == NULL_BLOCK:
                        host_table.append(NULL_BLOCK)
                        continue
                    if source in places:
                        self._host.pool.touch((places[source],))
                    else:
                        places[source] = self._host.pool.allocate(1)[0]
                    host_table.append(places[source])
                mine.append(host_table)
            host_tables.append(mine)
        return host_tables, list(places.items())

    def num_shared(self, swapped: Sequence[Swapped]) -> int:
        """How many device blocks are saved if these come back together."""
        blocks = [block for request in swapped for block in self._full(request)]
        return len(blocks) - len(set(blocks))

    def _full(self, request: Swapped) -> list[int]:
        """Its host blocks that will not be written to any more."""
        num_full = request.num_computed // self._block_size
        return [block for table in request.host_tables for block in table[:num_full] if block != NULL_BLOCK]

    def swap_in(self, swapped: Sequence[Swapped]) -> tuple[list[list[list[int]]], Moves]:
        """Device tables of requests that come back together, and the moves (host block, device block). Callers have
        checked that there is room. A shared block that both are going to write to is loaded once for each."""
        moves: Moves = []
        back: dict[int, int] = {}  # host block -> device block, of full ones
        all_tables = []
        for request in swapped:
            num_full, tables = request.num_computed // self._block_size, []
            for host_table in request.host_tables:
                table = []
                for place, block in enumerate(host_table):
                    if block == NULL_BLOCK:
                        table.append(NULL_BLOCK)
                    elif place < num_full and block in back:
                        self._pool.touch((back[block],))
                        table.append(back[block])
                    else:
                        table += self._pool.allocate(1)
                        moves.append((block, table[-1]))
                        if place < num_full:
                            back[block] = table[-1]
                more = -(-request.num_tokens // self._block_size) - len(table)
                tables.append(table + self._pool.allocate(more))
            all_tables.append(tables)
        for request in swapped:
            self.free(request.host_tables)
        return all_tables, moves

    def drop_unreadable(self, host_tables: list[list[int]], num_computed: int) -> None:
        """Let go of what no token from `num_computed` on will read."""
        for group, table in zip(self._groups, host_tables, strict=True):
            first = min(group.first_needed(num_computed), len(table))
            self.free([table[:first]])
            table[:first] = [NULL_BLOCK] * first

    def free(self, host_tables: Iterable[Iterable[int]]) -> None:
        """Let host blocks go. They are reused from the next step on, since a step's moves to the host come before its
        moves from there."""
        assert self._host is not None
        self._host.leaving += [block for table in host_tables for block in table if block != NULL_BLOCK]
