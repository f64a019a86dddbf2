"""Blocks on the move: within the cache, between it and the host, and to and from the disk.

Order within a step, as kvern.step fixes it: all writing to disk, all swapping out, all copies, all reading from disk,
all swapping in, then deleting and zeroing. A move within memory is one call that reads every source before it writes
any destination. So a block may be taken over in the very step in which its content leaves. The mover owns the host's
memory and the files; the scheduler owns which block, here or there, is whose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvern.kernels.ops import Int64, KVCache, Ops
from kvern.runner.disk_store import DiskStore
from kvern.step import SchedulerOutput


class BlockMover:
    """slots: the cache, as Ops.allocate_kv_cache gives it. host_slots: the same on the host, empty if there is none.
    store: the files, None if there are none."""

    def __init__(
        self, ops: Ops, slots: Sequence[KVCache], host_slots: Sequence[KVCache], store: DiskStore | None = None
    ) -> None:
        self.ops = ops
        self.slots = slots
        self.host_slots = host_slots
        self.store = store

    def apply(self, output: SchedulerOutput) -> list[tuple[str, int]]:
        """Returns (file name, block) of what could not be read from disk. Raises ValueError if blocks are to be
        moved to or from a tier that is not there."""
        if (output.blocks_to_swap_out or output.blocks_to_swap_in) and not self.host_slots:
            raise ValueError("this executor has no host tier to swap blocks with")
        if self.store is None and (output.blocks_to_disk or output.blocks_from_disk):
            raise ValueError("this executor has no disk tier to move blocks to")
        self._write(output.blocks_to_disk)
        self.copy(self.slots, self.host_slots, output.blocks_to_swap_out)
        self.copy(self.slots, self.slots, output.blocks_to_copy)
        lost = [(name, block) for name, block in output.blocks_from_disk if not self._read(name, block)]
        self.copy(self.host_slots, self.slots, output.blocks_to_swap_in)
        if self.store is not None:
            for name in output.deleted_from_disk:
                self.store.delete(name)
        if output.blocks_to_zero:
            self.ops.zero_blocks(self.slots, np.array(output.blocks_to_zero, dtype=np.int64))
        return lost

    def _write(self, moves: list[tuple[str, int, str]]) -> None:
        """moves: (tier, block, file name)."""
        for tier, block, name in moves:
            if self.store is not None:
                content = self.ops.read_block(self.host_slots if tier == "host" else self.slots, block)
                self.store.write(name, content)

    def _read(self, name: str, block: int) -> bool:
        content = self.store.read(name) if self.store is not None else None
        if content is not None:
            self.ops.write_block(self.slots, block, content)
        return content is not None

    def copy(self, source: Sequence[KVCache], destination: Sequence[KVCache], moves: list[tuple[int, int]]) -> None:
        """moves: (block of `source`, block of `destination`)."""
        if moves:
            from_blocks, to_blocks = _columns(moves)
            self.ops.copy_blocks(source, destination, from_blocks, to_blocks)


def _columns(moves: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    columns = np.array(moves, dtype=np.int64).T.copy()
    return columns[0], columns[1]
