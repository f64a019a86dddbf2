"""A connector over a shared folder: blocks saved by one engine are loaded by another.

When a request ends, its full blocks are written, one file each, under names made of their chained hashes; another
engine (or this one, later) finds them there when a prompt begins alike. Files appear atomically and are checked when
read (see kvern.runner.disk_store); engines whose model, weights, dtype or block layout differ never see each other's.

The scheduler's half only asks whether files are there. Loading is synchronous: blocks are read at the start of the step
that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvern.cache.connectors import Matched, Transferred
from kvern.cache.prefix_index import extend_hashes, root_hash
from kvern.kernels.ops import KVCache, Ops
from kvern.request import Request
from kvern.runner.disk_store import DiskStore


class FileConnector:
    """The scheduler's half. For models with one cache group."""

    def __init__(self, store: DiskStore, block_size: int) -> None:
        self.store = store
        self.block_size = block_size
        self._loads: list[tuple[str, int, str, int]] = []  # (request id, place, file name, block)
        self._saves: dict[str, list[tuple[str, int]]] = {}  # request id -> (file name, block)

    def matched_tokens(self, request: Request, num_computed: int) -> Matched | None:
        names = self._names(request, request.num_tokens)
        first = place = num_computed // self.block_size
        while place < len(names) and self.store.has(names[place]):
            place += 1
        return Matched((place - first) * self.block_size, load_async=False)

    def allocated(self, request: Request, tables: list[list[int]], start: int, end: int) -> None:
        names = self._names(request, request.num_tokens)
        for place in range(start // self.block_size, -(-end // self.block_size)):
            self._loads.append((request.id, place, names[place], tables[0][place]))

    def finished(self, request: Request, tables: list[list[int]], num_computed: int) -> bool:
        names = self._names(request, min(num_computed, request.num_tokens))
        new = [(name, block) for name, block in zip(names, tables[0], strict=False) if not self.store.has(name)]
        if new:
            self._saves[request.id] = new
        return bool(new)

    def metadata(self) -> dict[str, Any] | None:
        loads, saves, self._loads, self._saves = self._loads, self._saves, [], {}
        return {"loads": loads, "saves": saves} if loads or saves else None

    def _names(self, request: Request, num_tokens: int) -> list[str]:
        """File names of the full blocks among the first num_tokens tokens."""
        root = root_hash(request.cache_salt, request.lora)
        extend_hashes(request.block_hashes, root, request.token_ids, num_tokens, self.block_size, request.images)
        return [block_hash.hex() for block_hash in request.block_hashes[: num_tokens // self.block_size]]


class FileWorker:
    """The executor's half."""

    def __init__(self, store: DiskStore, ops: Ops, slots: Sequence[KVCache]) -> None:
        self.store = store
        self.ops = ops
        self.slots = slots
        self._sent: list[str] = []
        self._failed: dict[str, list[int]] = {}

    def start_load(self, metadata: Any) -> None:
        """Saving comes first: what is saved was computed in earlier steps."""
        for request_id, blocks in metadata["saves"].items():
            for name, block in blocks:
                self.store.write(name, self.ops.read_block(self.slots, block))
            self._sent.append(request_id)
        for request_id, place, name, block in metadata["loads"]:
            content = self.store.read(name)
            if content is None:
                self._failed.setdefault(request_id, []).append(place)
            else:
                self.ops.write_block(self.slots, block, content)

    def wait_for_layer(self, layer: int) -> None:
        """Everything was read in start_load()."""

    def save_layer(self, layer: int) -> None:
        """Blocks are saved whole, when their request has ended."""

    def wait_for_save(self) -> None:
        """Everything was written in start_load()."""

    def transferred(self) -> Transferred:
        told = Transferred([], self._failed, self._sent)
        self._failed, self._sent = {}, []
        return told

    def close(self) -> None:
        """Nothing is held."""
