"""The executor's copy of the running batch, and what a step's model call needs of it.

`InputBatch` owns the rows' tokens and block tables. They change in two ways only: `apply` brings in the scheduler's
differences, `append` the tokens that were sampled here. `prepare` reads them; it is array arithmetic over the whole
batch, no loop over requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvern.config import SchedulerConfig
from kvern.kernels.ops import AttentionMetadata, Int32, Int64
from kvern.step import SchedulerOutput


class StepInputs(NamedTuple):
    token_ids: Int32  # [T]
    metadata: list[AttentionMetadata]  # one for each cache group; they differ in blocks only
    last: Int64  # [n] index of each row's last token among the T


class InputBatch:
    """Rows 0 .. max_num_seqs - 1. token_ids: [rows, max_model_len]; block_tables: [groups, rows, blocks of
    max_model_len]. A block that the scheduler has taken back since stays in its table; attention does not read it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        max_blocks = -(-config.max_model_len // config.block_size)
        self.token_ids: Int32 = np.zeros((config.max_num_seqs, config.max_model_len), dtype=np.int32)
        self.block_tables: Int32 = np.zeros((len(config.kv_groups), config.max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks_used = 0  # so many, from the first on, have been in a table

    def apply(self, output: SchedulerOutput) -> None:
        """Fill the rows of new requests, append new blocks, put drafts after what is known. What a row held before
        needs no clearing: nothing past a row's tokens and blocks is ever read."""
        for new in output.new_requests:
            self.token_ids[new.row, : len(new.token_ids)] = new.token_ids
            self.block_tables[:, new.row, : len(new.tables[0])] = new.tables
            self.num_blocks_used = max(self.num_blocks_used, *(max(table, default=0) + 1 for table in new.tables))
        rows, index, blocks = output.new_blocks
        if len(rows):
            self.block_tables[:, rows, index] = blocks
            self.num_blocks_used = max(self.num_blocks_used, int(blocks.max()) + 1)
        if output.draft_tokens:
            ends = dict(zip(output.rows.tolist(), (output.num_computed + output.num_new).tolist(), strict=True))
            for row, drafts in output.draft_tokens.items():
                self.token_ids[row, ends[row] - len(drafts) : ends[row]] = drafts

    def append(self, rows: Int32, positions: Int32, tokens: Int32) -> None:
        """Token tokens[i] was sampled for rows[i]; it is the one at positions[i] of its sequence."""
        self.token_ids[rows, positions] = tokens

    def prepare(self, output: SchedulerOutput) -> StepInputs:
        """The step's tokens, row after row in scheduling order. The output must have been applied."""
        q_len = output.num_new.astype(np.int64)
        computed = output.num_computed.astype(np.int64)
        context_len = computed + q_len
        rows = output.rows
        if int(np.add.reduce(q_len)) == len(q_len):  # all decode: most steps
            positions, starts = computed, np.arange(len(q_len))
            ends = starts + 1
        else:
            ends = np.cumsum(q_len)
            starts = ends - q_len
            rows = np.repeat(rows, q_len)
            positions = np.arange(ends[-1]) + np.repeat(computed - starts, q_len)
        column, offset = np.divmod(positions, self.block_size)
        most_blocks = -(-int(np.maximum.reduce(context_len)) // self.block_size)
        metadata = [
            AttentionMetadata(
                positions=positions,
                slots=table[rows, column].astype(np.int64) * self.block_size + offset,
                q_start=starts,
                q_len=q_len,
                context_len=context_len,
                block_tables=table[output.rows, :most_blocks],
                block_size=self.block_size,
            )
            for table in self.block_tables
        ]
        return StepInputs(self.token_ids[rows, positions], metadata, ends - 1)
