"""The running requests as a table: one row each, one NumPy column per fact, so that a step is array arithmetic.

A row is a place, not a rank: requests keep their row while they run, and `order` lists the rows in running order.
The columns here are the only truth about a running request's progress; `Request` gets them back when it leaves.

    0 <= num_computed <= num_tokens + num_drafts + num_placeholders,   num_tokens <= max_total
    token_ids[row, :num_tokens] are final; the drafts, if any, follow them.
    block_table[group, row, :num_blocks] holds the blocks of positions 0 .. num_blocks * block_size - 1, of which the
    first num_dropped[group, row] have been given back and read as 0.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvern.request import Request
from kvern.step import Int32

Rows = NDArray[np.intp]  # what NumPy indexes with: it would convert any other kind at every use

_NO_STOP = -1


class RunningBatch:
    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        rows, blocks = max_num_seqs, -(-max_model_len // block_size)
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.token_ids: Int32 = np.zeros((rows, max_model_len), dtype=np.int32)
        self.block_table: Int32 = np.zeros((num_groups, rows, blocks), dtype=np.int32)
        self.num_dropped: Int32 = np.zeros((num_groups, rows), dtype=np.int32)

        def column(dtype: Any = np.int32) -> Any:
            return np.zeros(rows, dtype=dtype)

        self.num_tokens: Int32 = column()  # known tokens: prompt and output
        self.num_drafts: Int32 = column()  # proposed tokens after them, not verified
        self.num_placeholders: Int32 = column()  # tokens that steps under way will bring
        self.num_computed: Int32 = column()  # tokens whose keys and values are in the cache, or planned to be
        self.num_blocks: Int32 = column()
        self.num_published: Int32 = column()  # leading full blocks that are hittable, or would be equal to one
        self.num_at_entry: Int32 = column()  # tokens it had when it was given the row
        self.max_total: Int32 = column()  # prompt + output never exceed this
        self.min_total: Int32 = column()  # nothing but the length stops it before
        self.shares_tail: NDArray[np.bool_] = column(np.bool_)  # its last block may have another holder: a fork
        self.special: NDArray[np.bool_] = column(np.bool_)  # needs a look of its own in each step: it has images
        self.epoch: NDArray[np.int64] = column(np.int64)
        self.epoch.fill(-1)
        self.stop_ids: Int32 = np.full((rows, 1), _NO_STOP, dtype=np.int32)  # EOS and stop ids, widened on demand
        self.ids: NDArray[np.object_] = np.empty(rows, dtype=object)  # request ids, for taking many at once
        self.requests: list[Request | None] = [None] * rows
        self.order: Rows = np.zeros(0, dtype=np.intp)
        self.keys: list[Any] = []  # sort keys of `order`
        self._key_of_row: list[Any] = [None] * rows
        self._ids_in_order: tuple[Rows, list[str]] = (self.order, [])
        self._free_rows = list(range(rows - 1, -1, -1))
        self.next_epoch = 0

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def full(self) -> bool:
        return not self._free_rows

    def request_at(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def requests_in_order(self) -> list[Request]:
        return [self.request_at(row) for row in self.order.tolist()]

    def ids_of(self, rows: Rows) -> list[str]:
        """Their requests' ids, not to be modified: those of all that run are taken once for each `order`."""
        if rows is not self.order:
            return self.ids[rows].tolist()  # type: ignore[no-any-return]
        if self._ids_in_order[0] is not rows:
            self._ids_in_order = (rows, self.ids[rows].tolist())
        return self._ids_in_order[1]

    def tokens_of(self, row: int) -> Int32:
        """The known tokens of a row, as a view."""
        return self.token_ids[row, : self.num_tokens[row]]

    def tables_of(self, row: int) -> Int32:
        """The block tables of a row, [groups, num_blocks], as a view."""
        return self.block_table[:, row, : self.num_blocks[row]]

    # ---- rows come and go

    def insert(
        self, request: Request, key: Any, tables: list[list[int]], num_computed: int, stop_ids: tuple[int, ...]
    ) -> int:
        """Give the request a row and its place in the order. The caller sees to status and blocks."""
        place = bisect_left(self.keys, key)
        row = self._free_rows.pop()
        self.keys.insert(place, key)
        self._key_of_row[row] = key
        self.order = np.concatenate([self.order[:place], [row], self.order[place:]])
        n = request.num_tokens
        self.token_ids[row, :n] = request.token_ids
        self.num_tokens[row] = self.num_at_entry[row] = n
        self.num_drafts[row] = self.num_placeholders[row] = 0
        self.num_computed[row] = num_computed
        self.num_blocks[row] = len(tables[0])
        for group, table in enumerate(tables):
            self.block_table[group, row, : len(table)] = table
            self.num_dropped[group, row] = next((i for i, block in enumerate(table) if block), len(table))
        self.epoch[row] = request.epoch = self.new_epoch()
        self.max_total[row] = request.max_total_tokens
        self.min_total[row] = request.num_prompt_tokens + request.sampling.min_tokens
        self.shares_tail[row] = False
        self.special[row] = bool(request.images)
        self._set_stop_ids(row, stop_ids)
        self.ids[row] = request.id
        self.requests[row] = request
        request.row = row
        return row

    def new_epoch(self) -> int:
        """A number that no occupant of a row had before."""
        epoch = self.next_epoch
        self.next_epoch += 1
        return epoch

    def remove(self, row: int) -> None:
        """Free the row; what the request needs of it is written back first."""
        request = self.request_at(row)
        request.token_ids = self.tokens_of(row).copy()
        request.num_computed_tokens = int(self.num_computed[row])
        request.row = -1
        self.requests[row] = None
        self.ids[row] = None
        self.epoch[row] = -1
        self.num_blocks[row] = self.num_tokens[row] = self.num_computed[row] = 0
        self.num_drafts[row] = self.num_placeholders[row] = 0
        self.num_dropped[:, row] = 0
        self.shares_tail[row] = self.special[row] = False
        place = bisect_left(self.keys, self._key_of_row[row])
        del self.keys[place]
        self.order = np.concatenate([self.order[:place], self.order[place + 1 :]])
        self._free_rows.append(row)

    def reorder(self, keys: list[Any]) -> None:
        """New sort keys, one for each of requests_in_order(): sort by them."""
        places = sorted(range(len(keys)), key=keys.__getitem__)
        self.keys = [keys[i] for i in places]
        self.order = self.order[places]
        for row, key in zip(self.order.tolist(), self.keys, strict=True):
            self._key_of_row[row] = key

    # ---- many rows at once

    def append_blocks(self, rows: Rows, counts: Int32, blocks: Int32) -> tuple[Rows, Rows]:
        """counts[i] further blocks to the tables of rows[i]; blocks: [groups, counts.sum()], in order. Returns each
        block's row, and its place there."""
        owners = np.repeat(rows, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        index: Rows = self.num_blocks[owners] + (np.arange(len(owners)) - first)
        self.block_table[:, owners, index] = blocks
        self.num_blocks[rows] += counts
        return owners, index

    def append_tokens(self, rows: Rows, tokens: Int32) -> Int32:
        """One sampled token to each of these rows. Returns how many they have now."""
        places = self.num_tokens[rows]
        self.token_ids[rows, places] = tokens
        self.num_tokens[rows] = known = places + 1
        return known

    def set_drafts(self, row: int, drafts: list[int]) -> None:
        """Tokens proposed for the next step; clipped so that no step passes the request's limit."""
        n = int(self.num_tokens[row])
        drafts = drafts[: max(0, int(self.max_total[row]) - 1 - n)]
        self.token_ids[row, n : n + len(drafts)] = drafts
        self.num_drafts[row] = len(drafts)

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((self.max_num_seqs, len(stop_ids) - width), _NO_STOP, dtype=np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, wider], axis=1)
        self.stop_ids[row] = _NO_STOP
        self.stop_ids[row, : len(stop_ids)] = stop_ids
