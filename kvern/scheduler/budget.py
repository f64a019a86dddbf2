"""How many tokens a step may still hand out."""

from __future__ import annotations

import numpy as np

from kvern.scheduler.running_batch import Rows
from kvern.step import Int32


class SchedulingBudget:
    """Tokens of one step, counted once per row and given back exactly as taken.

    `by_row[row]` is what the row has of this step: the plan itself, in the form the rest of the step computes with.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.remaining = max_num_batched_tokens
        self.by_row: Int32 = np.zeros(max_num_seqs, dtype=np.int32)

    def reset(self) -> None:
        """A new step."""
        self.remaining = self.max_num_batched_tokens
        self.by_row.fill(0)

    def cut(self, wanted: Int32) -> Int32:
        """What each of these, in this order, can have of `wanted` when nobody after them counts."""
        if np.add.reduce(wanted) <= self.remaining:
            return wanted
        ends = np.cumsum(wanted)
        cut: Int32 = np.clip(self.remaining - (ends - wanted), 0, wanted).astype(np.int32)
        return cut

    def take(self, rows: Rows, counts: Int32) -> None:
        self.by_row[rows] = counts
        self.remaining -= int(np.add.reduce(counts))
        assert self.remaining >= 0, f"{-self.remaining} tokens more than the budget"

    def give_back(self, row: int) -> None:
        self.remaining += int(self.by_row[row])
        self.by_row[row] = 0
