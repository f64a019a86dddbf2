"""The first half of a step: running requests take tokens and blocks, in running order."""

from __future__ import annotations

import numpy as np

from kvern.request import RequestStatus
from kvern.scheduler.state import SchedulerState
from kvern.step import Int32


def schedule_running(state: SchedulerState) -> bool:
    """Hand out tokens and blocks. Returns whether somebody had to be preempted for it.

    All rows are served at once as far as the free blocks reach; at the first row they do not reach, the last of the
    order leaves the batch, and the rest is tried again.
    """
    batch, cache, size = state.batch, state.cache, state.config.block_size
    pending, preempted_before = batch.order, len(state.notices.preempted_rows)
    while len(pending):
        grant = state.budget.cut(_wanted(state, pending))
        need = (batch.num_computed[pending] + (grant + (size - 1))) // size - batch.num_blocks[pending]
        np.maximum(need, 0, out=need)
        ends = np.cumsum(need)
        served = len(pending)
        if ends[-1] > cache.num_free_blocks:
            served = int(np.searchsorted(ends, cache.num_free_blocks, side="right"))
        if served:
            rows, grant = pending[:served], grant[:served]
            state.budget.take(rows, grant)
            batch.num_computed[rows] += grant
            if ends[served - 1]:
                grows = np.flatnonzero(need[:served])
                batch.append_blocks(rows[grows], need[grows], cache.allocate(int(ends[served - 1])))
        pending = pending[served:]
        if len(pending):
            pending = pending[pending != _make_room(state)]
    return len(state.notices.preempted_rows) > preempted_before


def _wanted(state: SchedulerState, rows: Int32) -> Int32:
    """How many tokens each row could compute now, budget aside."""
    batch = state.batch
    computed = batch.num_computed[rows]
    wanted = batch.num_tokens[rows] + batch.num_drafts[rows] + batch.num_placeholders[rows] - computed
    # The last token a request may have is never computed: nothing comes after it.
    np.minimum(wanted, batch.max_total[rows] - 1 - computed, out=wanted)
    if state.chunk_limit():
        np.minimum(wanted, state.chunk_limit(), out=wanted)
    return wanted


def _make_room(state: SchedulerState) -> int:
    """Somebody lacks blocks, so the last in order leaves the batch, be it the same one. Returns the row it had."""
    batch = state.batch
    victim = batch.request_at(int(batch.order[-1]))
    row = victim.row
    if len(batch) > 1:
        state.preempt(victim)
    elif not batch.num_placeholders[row]:  # else the tokens under way are still to come
        # Nothing is left to take from anybody: it cannot grow, now or later.
        num_tokens = int(batch.num_tokens[row])
        has_output = num_tokens > victim.num_prompt_tokens
        status = RequestStatus.FINISHED_LENGTH if has_output else RequestStatus.FINISHED_IGNORED
        state.end(victim, status, error=state.pool_too_small(num_tokens))
    return row
