"""Blocks that are spoken for: those that running requests may still take for the tokens they have.

They are kept from further admissions, not from the growth of running requests. The sum is made when it is first asked
for, and again when rows have grown; who enters or leaves a row in between is added or taken off. So a step in which
nobody is admitted pays nothing, and one more admission costs the same however many run.
"""

from __future__ import annotations

import numpy as np

from kvern.cache.kv_cache_manager import KVCacheManager
from kvern.scheduler.running_batch import RunningBatch


class Reservation:
    def __init__(self, batch: RunningBatch, cache: KVCacheManager) -> None:
        self._batch = batch
        self._cache = cache
        self._total: int | None = None  # None: to be summed anew

    def total(self) -> int:
        """Of all rows. Not to be asked while rows grow."""
        if self._total is None:
            batch, cache, total = self._batch, self._cache, 0
            for g, group in enumerate(cache.groups):  # empty rows have neither tokens nor blocks
                held = batch.num_blocks - batch.num_dropped[g]
                missing = group.most_held(batch.num_tokens, cache.chunk) - held
                total += int(np.add.reduce(np.maximum(missing, 0)))
            self._total = total
        return self._total

    def of(self, row: int) -> int:
        batch, cache = self._batch, self._cache
        num_tokens, num_blocks = int(batch.num_tokens[row]), int(batch.num_blocks[row])
        dropped = batch.num_dropped[:, row].tolist()
        groups = zip(cache.groups, dropped, strict=True)
        return sum(max(g.most_held(num_tokens, cache.chunk) - (num_blocks - gone), 0) for g, gone in groups)

    def rows_grow(self) -> None:
        """Rows are about to get tokens or blocks, or to give blocks back."""
        self._total = None

    def entered(self, row: int) -> None:
        if self._total is not None:
            self._total += self.of(row)

    def leaves(self, row: int) -> None:
        """Called while the row is still there."""
        if self._total is not None:
            self._total -= self.of(row)
