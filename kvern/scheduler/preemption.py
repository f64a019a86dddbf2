"""Who leaves the batch with whom, what becomes of what they have computed, and how it comes back.

RECOMPUTE gives the blocks of one request back. SWAP moves them to the host; since siblings (n > 1, forks, beams) share
blocks, the running siblings of a request that shares some with them go in the same step, each block once, and come back
in one step, sharing again. If the host has no room for all of them, nobody is moved, and the victim alone is computed
again, as if the mode were RECOMPUTE.

Order of side effects in preempt(): all who leave give back what they had of this step; their blocks are held until the
moves to the host are written down; then each gives up its row and its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvern.cache.block_pool import NULL_BLOCK
from kvern.cache.swap import Swapped
from kvern.request import Request, RequestStatus
from kvern.step import Int32

if TYPE_CHECKING:
    from kvern.scheduler.admission import Admission
    from kvern.scheduler.state import SchedulerState


# ---- out


def preempt(state: SchedulerState, request: Request) -> None:
    batch, limit = state.batch, state.config.max_preemptions
    leaving, swap = _who_leaves(state, request)
    to_host = [other for other in leaving if swap and _can_be_kept(state, other)]
    for other in leaving:
        _give_back_step(state, other)
    for other in leaving:
        if other.num_preemptions > limit:
            error = f"preempted {other.num_preemptions} times, max_preemptions is {limit}"
            state.end(other, RequestStatus.FINISHED_ERROR, error=error)
    leaving = [other for other in leaving if other.row >= 0]
    to_host = [other for other in to_host if other.row >= 0]
    if to_host:
        copied_from = {destination: source for source, destination in state.notices.copies}
        held = [_kept_tables(state, other).tolist() for other in to_host]
        host_tables, moves = state.cache.swap.swap_out(held, copied_from)
        for other, tables in zip(to_host, host_tables, strict=True):
            other.host_tables = tables
        state.notices.swap_out += moves
        state.stats.swapped_out_blocks += len(moves)
    for other in leaving:
        num_computed = int(batch.num_computed[other.row])
        state.leave(other)
        if other in to_host:
            other.status = RequestStatus.SWAPPED
            state.swapped.add(other)
        else:
            other.status = RequestStatus.PREEMPTED
            other.num_lost_tokens, other.num_computed_tokens = num_computed, 0
            state.waiting.add(other)


def leaving_with(state: SchedulerState, request: Request) -> list[Request]:
    """Who leaves the batch if this running request is preempted: itself first, then its siblings if they go along."""
    return _who_leaves(state, request)[0]


def _who_leaves(state: SchedulerState, request: Request) -> tuple[list[Request], bool]:
    """The same, and whether they are swapped."""
    if state.config.preemption == "recompute":
        return [request], False
    siblings = [r for r in state.batch.requests_in_order() if r.group == request.group and r is not request]
    mine = state.batch.tables_of(request.row)
    shared = mine[mine != NULL_BLOCK]
    if not any(np.isin(state.batch.tables_of(sibling.row), shared).any() for sibling in siblings):
        return [request], _should_swap(state, [request])
    together = [request, *siblings]
    return (together, True) if _should_swap(state, together) else ([request], False)


def _give_back_step(state: SchedulerState, request: Request) -> None:
    row, batch = request.row, state.batch
    state.notices.preempted_rows.append(row)
    state.notices.preempted_ids.append(request.id)
    batch.num_computed[row] = _num_kept(state, row)
    if state.planning:  # what was handed out in this step will not be computed
        state.budget.give_back(row)
    state.cache.retract(row)
    request.num_preemptions += 1
    request.resumed = True
    state.stats.preemptions += 1


def _num_kept(state: SchedulerState, row: int) -> int:
    """Tokens of a running request that are computed if it leaves now."""
    of_this_step = int(state.budget.by_row[row]) if state.planning else 0
    # Drafts under way may yet be rejected.
    return int(min(state.batch.num_computed[row] - of_this_step, state.batch.num_tokens[row]))


def _kept_tables(state: SchedulerState, request: Request) -> Int32:
    num_blocks = -(-_num_kept(state, request.row) // state.config.block_size)
    return state.batch.tables_of(request.row)[:, :num_blocks]


def _can_be_kept(state: SchedulerState, request: Request) -> bool:
    """Whether it has computed something, and has all that it will read of it."""
    num_kept = _num_kept(state, request.row)
    of_this_step = int(state.budget.by_row[request.row]) if state.planning else 0
    if state.cache.recurrent and num_kept < state.batch.num_computed[request.row] - of_this_step:
        return False  # a step under way takes its state further
    return num_kept > 0 and state.cache.holds_all(_kept_tables(state, request), num_kept)


def _should_swap(state: SchedulerState, leaving: Sequence[Request]) -> bool:
    if state.config.preemption == "recompute" or not _can_be_kept(state, leaving[0]):
        return False
    kept = [request for request in leaving if _can_be_kept(state, request)]
    blocks = np.unique(np.concatenate([_kept_tables(state, request).ravel() for request in kept]))
    num_blocks = int(np.count_nonzero(blocks))
    if not state.cache.swap.has_room(num_blocks):
        return False
    if state.config.preemption == "swap":
        return True
    there_and_back = 2 * num_blocks * state.costs.copy_block
    num_computed = sum(_num_kept(state, request.row) for request in kept)
    return 0.0 < there_and_back < num_computed * state.costs.compute_token


# ---- back


def swap_in(admission: Admission) -> bool:
    """See Admission.swap_in."""
    state = admission.state
    while state.swapped.num_ready:
        head = state.swapped.at(0)
        if _end_if_hopeless(state, head):
            continue
        state.cache.swap.drop_unreadable(head.host_tables, head.num_computed_tokens)
        coming = _coming_back(admission, head)
        if not coming:
            return False
        _bring_back(admission, coming)
    return True


def swapped_with(state: SchedulerState, request: Request) -> list[Request]:
    """The swapped requests of a group, in order."""
    return [other for other in state.swapped if other.group == request.group]


def blocks_to_come_back(state: SchedulerState, requests: Sequence[Request]) -> int:
    """Free blocks that these swapped requests take, sooner or later, for the tokens they have."""
    need = sum(state.cache.most_held(request.num_tokens) for request in requests)
    return need - state.cache.swap.num_shared([_as_it_was(request) for request in requests])


def _coming_back(admission: Admission, head: Request) -> list[Request]:
    """Who comes back in this step: the head and its siblings, together or not at all. While nothing else runs, as many
    as fit, since no room will become free for the others."""
    state = admission.state
    if not admission.num_new(head, head.num_computed_tokens) or admission.lacks_lora_slot(head):
        return []
    group = [head]
    if not _fit(admission, group):  # spares the look at everybody who waits
        return []
    for other in swapped_with(state, head):
        if other is not head and not _end_if_hopeless(state, other):
            state.cache.swap.drop_unreadable(other.host_tables, other.num_computed_tokens)
            group.append(other)
    if any(other.num_computed_tokens == other.num_tokens for other in group):
        return []  # its next token is under way, and would be lost if it ran again before
    while not _fit(admission, group):
        if len(state.batch):
            return []
        group.pop()
    return group


def _fit(admission: Admission, requests: Sequence[Request]) -> bool:
    batch = admission.state.batch
    if len(batch) + len(requests) > batch.max_num_seqs:
        return False
    need = blocks_to_come_back(admission.state, requests)
    while need > admission.admissible_blocks():
        if not admission.state.kept_prompts.drop_one():
            return False
    return True


def _bring_back(admission: Admission, coming: Sequence[Request]) -> None:
    """All get rows; the tokens of this step may not reach beyond the first ones."""
    state, remaining, swapped, counts = admission.state, admission.state.budget.remaining, list[Swapped](), list[int]()
    for request in coming:
        state.swapped.remove(request)
        num_new = min(admission.num_new(request, request.num_computed_tokens), remaining)
        if request.images and swapped:  # whether its next image fits as well is seen in the next step
            num_new = 0
        remaining -= num_new
        counts.append(num_new)
        # Never less than what comes back.
        end = max(request.num_computed_tokens + num_new, len(request.host_tables[0]) * state.config.block_size)
        swapped.append(_as_it_was(request)._replace(num_tokens=min(end, request.num_tokens)))
    tables, moves = state.cache.swap.swap_in(swapped)
    state.notices.swap_in += moves
    state.stats.swapped_in_blocks += len(moves)
    for request, its_tables, num_new in zip(coming, tables, counts, strict=True):
        request.host_tables = []
        admission.start(request, its_tables, request.num_computed_tokens, num_new, num_published=0)


def _as_it_was(request: Request) -> Swapped:
    return Swapped(request.host_tables, request.num_computed_tokens, request.num_tokens)


def _end_if_hopeless(state: SchedulerState, request: Request) -> bool:
    error = state.never_fits(request)  # it may have grown before it was preempted
    if error is not None:
        state.end(request, RequestStatus.FINISHED_LENGTH, error=error)
    return error is not None
