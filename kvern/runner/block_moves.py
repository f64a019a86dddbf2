"""Blocks on the move: within the cache, and between it and the host.

Order within a step, as kvern.step fixes it: all swapping out, all copies, all swapping in, then zeroing. Each is one
call that reads every source before it writes any destination. So a block may be taken over in the very step in which
its content leaves. The mover owns the host's memory; the scheduler owns which block, here or there, is whose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvern.kernels.ops import Int64, KVCache, Ops
from kvern.step import SchedulerOutput


class BlockMover:
    """slots: the cache, as Ops.allocate_kv_cache gives it. host_slots: the same on the host, empty if there is none."""

    def __init__(self, ops: Ops, slots: Sequence[KVCache], host_slots: Sequence[KVCache]) -> None:
        self.ops = ops
        self.slots = slots
        self.host_slots = host_slots

    def apply(self, output: SchedulerOutput) -> None:
        """Raises ValueError if blocks are to be swapped and there is no host tier."""
        if (output.blocks_to_swap_out or output.blocks_to_swap_in) and not self.host_slots:
            raise ValueError("this executor has no host tier to swap blocks with")
        self.copy(self.slots, self.host_slots, output.blocks_to_swap_out)
        self.copy(self.slots, self.slots, output.blocks_to_copy)
        self.copy(self.host_slots, self.slots, output.blocks_to_swap_in)
        if output.blocks_to_zero:
            self.ops.zero_blocks(self.slots, np.array(output.blocks_to_zero, dtype=np.int64))

    def copy(self, source: Sequence[KVCache], destination: Sequence[KVCache], moves: list[tuple[int, int]]) -> None:
        """moves: (block of `source`, block of `destination`)."""
        if moves:
            from_blocks, to_blocks = _columns(moves)
            self.ops.copy_blocks(source, destination, from_blocks, to_blocks)


def _columns(moves: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    columns = np.array(moves, dtype=np.int64).T.copy()
    return columns[0], columns[1]
