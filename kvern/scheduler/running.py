"""Running requests take tokens and blocks, in running order. Order of side effects in schedule_running():

1. blocks that no token will read again (left of a sliding window) are given back
2. a row about to write into a block that a fork shares gets a copy of its own
3. rows with images are served one by one, since an image is computed whole or not at all; all others are served at
   once as far as the free blocks reach; if they do not reach all, first the drafts go, then, at the first row they do
   not reach, somebody leaves the batch, and the rest is tried again
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvern.request import RequestStatus
from kvern.scheduler.running_batch import Rows
from kvern.scheduler.state import SchedulerState
from kvern.step import Int32

NOBODY = -1


def schedule_running(state: SchedulerState, pending: Rows) -> bool:
    """Hand out tokens and blocks to the rows `pending`. Returns whether somebody had to be preempted for it."""
    batch, cache, size = state.batch, state.cache, state.config.block_size
    preempted_before = len(state.notices.preempted_rows)
    num_groups = len(cache.groups)
    state.reservation.rows_grow()
    _drop_unreadable(state, pending)
    if np.count_nonzero(batch.shares_tail):
        pending = _own_tails(state, pending)
    ordered = not state.policy.dynamic
    while len(pending):
        now = _together(state, pending)
        computed = batch.num_computed[now]
        wanted = _wanted(state, now, computed)
        grant = state.budget.cut(wanted)
        if batch.special[now[0]]:
            grant = _cut_before_image(state, int(now[0]), grant)
        after = computed + grant
        grows = (after > batch.num_blocks[now] * size).nonzero()[0]  # places of those that need blocks
        served = len(now)
        if len(grows):
            need = -(-after[grows] // size) - batch.num_blocks[now[grows]]
            served = _reach(need, grows, len(now), cache.num_free_blocks // num_groups)
        if served < len(now) and _forget_drafts(state, now):
            continue
        if not ordered and (served < len(now) or grant is not wanted):
            # Not everybody gets what they want: now the order matters, and it has to be fresh.
            ordered = True
            state.reorder()
            pending = batch.order[np.isin(batch.order, pending)]
            continue
        if served:
            rows, grant = now[:served], grant[:served]
            if batch.special[rows[0]]:
                request = batch.request_at(int(rows[0]))
                state.encoder.take(request.id, request.images, int(batch.num_computed[rows[0]]), int(grant[0]))
            state.budget.take(rows, grant)
            batch.num_computed[rows] = after[:served]
            if len(grows):
                grows = grows[: grows.searchsorted(served)]
                need = need[: len(grows)]
                blocks = np.array(cache.allocate(int(need.sum()) * num_groups), dtype=np.int32)
                placed = batch.append_blocks(rows[grows], need, blocks.reshape(num_groups, -1))
                state.notices.placed.append(placed)
        pending = pending[served:]
        if served < len(now):
            row = _make_room(state)
            pending = pending[(pending != row) & (batch.epoch[pending] >= 0)]  # it may have gone with siblings
    return len(state.notices.preempted_rows) > preempted_before


def _forget_drafts(state: SchedulerState, rows: Rows) -> bool:
    """Blocks are short, and a guess is worth nobody's place. False if these rows have none; drafts of a step under way
    are not theirs to forget."""
    batch = state.batch
    rows = rows[(batch.num_drafts[rows] > 0) & (batch.num_computed[rows] < batch.num_tokens[rows])]
    batch.num_drafts[rows] = 0
    return len(rows) > 0


def _reach(need: Int32, grows: NDArray[np.intp], num_rows: int, num_free: int) -> int:
    """How many rows, from the first on, can be served with num_free blocks, if the rows at `grows` need `need`."""
    if np.add.reduce(need) <= num_free:
        return num_rows
    return int(grows[int(np.searchsorted(np.cumsum(need), num_free, side="right"))])


def _together(state: SchedulerState, pending: Rows) -> Rows:
    """The rows, from the first on, that can be served in one go."""
    if not np.count_nonzero(state.batch.special):
        return pending
    special = state.batch.special[pending].nonzero()[0]
    return pending if not len(special) else pending[: max(int(special[0]), 1)]


def _cut_before_image(state: SchedulerState, row: int, grant: Int32) -> Int32:
    images, start = state.batch.request_at(row).images, int(state.batch.num_computed[row])
    return np.array([state.encoder.cut(images, start, int(grant[0]), state.budget.remaining)], dtype=np.int32)


def _wanted(state: SchedulerState, rows: Rows, computed: Int32) -> Int32:
    """How many tokens each row, with so many computed, could compute now, budget aside."""
    batch = state.batch
    wanted = batch.num_tokens[rows]
    if state.looks_ahead:
        wanted += batch.num_drafts[rows] + batch.num_placeholders[rows]
        # The last token a request may have is never computed: nothing comes after it.
        np.minimum(wanted, batch.max_total[rows] - 1, out=wanted)
    wanted -= computed
    if state.chunk_limit():
        np.minimum(wanted, state.chunk_limit(), out=wanted)
    if state.policy.caps:
        for i in np.flatnonzero(wanted > 1).tolist():
            wanted[i] = state.policy.cap_tokens(batch.request_at(int(rows[i])).info, int(wanted[i]))
    return wanted


def _drop_unreadable(state: SchedulerState, rows: Rows) -> None:
    if not any(group.drops for group in state.cache.groups):
        return
    batch, computed = state.batch, state.batch.num_computed[rows]
    if state.config.async_scheduling and state.config.num_speculative_tokens:
        computed = np.minimum(computed, batch.num_tokens[rows])  # drafts under way may be rejected
    for g, group in enumerate(state.cache.groups):
        if not group.drops:
            continue
        first = group.first_needed(computed)
        for i in np.flatnonzero(first > batch.num_dropped[g, rows]).tolist():
            row, end = int(rows[i]), int(first[i])
            start = int(batch.num_dropped[g, row])
            state.cache.drop(batch.request_at(row), batch.block_table[g, row, start:end].tolist())
            batch.block_table[g, row, start:end] = 0
            batch.num_dropped[g, row] = end


def _own_tails(state: SchedulerState, rows: Rows) -> Rows:
    """Copy-on-write. Returns the rows that can go on: making room for a copy may cost one its row."""
    batch = state.batch
    stuck = None
    for row in rows[batch.shares_tail[rows]].tolist():
        # One block, unless it goes back behind what it shares, or in a block of its own.
        first, end = int(batch.num_computed[row]) // state.config.block_size, int(batch.num_blocks[row])
        while first < end and batch.requests[row] is not None and _own_block(state, row, first):
            first += 1
        if batch.requests[row] is None:
            continue
        if first < end:
            stuck = row
        else:
            batch.shares_tail[row] = False
    goes_on = [batch.requests[row] is not None and row != stuck for row in rows.tolist()]
    return rows if all(goes_on) else rows[goes_on]


def _own_block(state: SchedulerState, row: int, place: int) -> bool:
    """Copy what others hold of the row's blocks at `place`. False if there is no room even after preempting."""
    batch, cache = state.batch, state.cache

    def shared() -> list[tuple[int, int]]:  # who leaves for it may be who shares it
        blocks = enumerate(batch.block_table[:, row, place].tolist())
        return [(g, block) for g, block in blocks if cache.pool.ref_count[block] > 1]

    while len(shared()) > cache.num_free_blocks:
        if _make_room(state) == row or batch.requests[row] is None:
            return False
    for g, block in shared():
        batch.block_table[g, row, place] = copy = cache.copy_on_write(block)
        state.copy([(block, copy)])
    state.notices.placed.append((np.array([row]), np.array([place])))
    return True


def _make_room(state: SchedulerState) -> int:
    """Blocks are short: if there is no kept prompt to take them from, somebody leaves the batch, be it the one that
    lacks them. Returns the row it had. The last row takes from those who wait with blocks, then from pinned prefixes;
    it stays, and gets nothing in this step, while tokens for it or blocks are under way."""
    batch = state.batch
    if state.kept_prompts.drop_one():
        return NOBODY
    row = _victim(state)
    request = batch.request_at(row)
    if len(batch) > 1:
        state.preempt(request)
    elif state.transfers.reclaim() or state.give_up_a_pin():
        return NOBODY
    elif not batch.num_placeholders[row] and not state.transfers.under_way():
        # Nothing is left to take from anybody: it cannot grow, now or later.
        num_tokens = int(batch.num_tokens[row])
        has_output = num_tokens > request.num_prompt_tokens
        status = RequestStatus.FINISHED_LENGTH if has_output else RequestStatus.FINISHED_IGNORED
        state.end(request, status, error=state.pool_too_small(num_tokens))
    return row


def _victim(state: SchedulerState) -> int:
    """The row that gives way. Requests that have gained no token since they were resumed are spared as long as there
    is another, so that no request is preempted twice without a step forward."""
    batch = state.batch
    requests = batch.requests_in_order()
    spared = [r.num_preemptions > 0 and batch.num_tokens[r.row] == batch.num_at_entry[r.row] for r in requests]
    candidates = [r for r, spare in zip(requests, spared, strict=True) if not spare] or requests
    if state.config.victim == "newest":
        return max(candidates, key=lambda r: (r.arrival_time, r.serial)).row
    if state.config.victim == "least_computed":
        return min(candidates, key=lambda r: (int(batch.num_computed[r.row]), -r.serial)).row
    if not state.policy.picks_victims:
        return candidates[-1].row
    infos = [r.info for r in candidates]
    chosen = state.policy.pick_victim(infos)
    return candidates[next(i for i, info in enumerate(infos) if info is chosen)].row
