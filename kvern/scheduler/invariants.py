"""What must hold after every step. Written against the plain meaning, not against how the state is kept."""

from __future__ import annotations

from collections import Counter

from kvern.cache.block_pool import NULL_BLOCK
from kvern.request import RequestStatus
from kvern.scheduler.admission import Admission
from kvern.scheduler.state import SchedulerState


def check(state: SchedulerState, admission: Admission) -> None:
    """Raise AssertionError naming the first contradiction. Call between schedule() and update, or after it."""
    _check_batch(state)
    _check_blocks(state)
    _check_reservation(state)
    _check_queue(state, admission)


def _check_batch(state: SchedulerState) -> None:
    batch, config = state.batch, state.config
    order = batch.order.tolist()
    assert len(order) == len(set(order)) == len(batch), "a row stands twice in the order"
    assert len(order) <= config.max_num_seqs, f"{len(order)} requests run, max_num_seqs is {config.max_num_seqs}"
    used = int(state.budget.by_row.sum())
    assert used + state.budget.remaining == config.max_num_batched_tokens, "the budget does not add up"
    assert state.budget.remaining >= 0, "more tokens were handed out than max_num_batched_tokens"
    for row in order:
        request = batch.request_at(row)
        who = f"request {request.id} in row {row}"
        assert request.row == row and request.status is RequestStatus.RUNNING, f"{who} is {request.status.name}"
        assert state.requests.get(request.id) is request, f"{who} is not live"
        computed, tokens = int(batch.num_computed[row]), int(batch.num_tokens[row])
        most = tokens + int(batch.num_drafts[row]) + int(batch.num_placeholders[row])
        assert 0 <= computed <= most, f"{who}: {computed} computed of {most}"
        assert tokens <= int(batch.max_total[row]) <= config.max_model_len, f"{who}: {tokens} tokens, over its limit"
        held = int(batch.num_blocks[row]) * config.block_size
        assert computed <= held, f"{who}: {computed} tokens computed, its blocks hold {held}"
    assert batch.keys == sorted(batch.keys), "the running order is not sorted"
    rows = [r for r in range(config.max_num_seqs) if batch.requests[r] is not None]
    assert rows == sorted(order), "a row is taken that is not in the order"


def _check_blocks(state: SchedulerState) -> None:
    batch, pool, index = state.batch, state.cache.pool, state.cache.index
    held: Counter[int] = Counter()
    for row in batch.order.tolist():
        real = [block for block in batch.tables_of(row).ravel().tolist() if block != NULL_BLOCK]
        held.update(real)
        assert len(real) == len(set(real)), f"row {row} holds a block twice: {real}"
        for g, group in enumerate(state.cache.groups):
            table, dropped = batch.tables_of(row)[g], int(batch.num_dropped[g, row])
            assert not table[:dropped].any() and table[dropped:].all(), f"row {row}, group {g}: {table.tolist()}"
            assert group.drops or not dropped, f"row {row}: blocks of a group that keeps all were given back"
    for tables in state.transfers.tables():
        held.update(block for block in tables.ravel().tolist() if block != NULL_BLOCK)
    for tables in state.kept_prompts.tables():
        held.update(block for block in tables.ravel().tolist() if block != NULL_BLOCK)
    pinned = state.cache.pins.held()
    held.update(pinned)
    assert len(pinned) <= state.cache.pins.most, f"{len(pinned)} blocks are pinned, at most {state.cache.pins.most} may"
    for block in pinned:
        assert index.is_hashed(block), f"block {block} is pinned and cannot be hit"
    free = pool.free_blocks()
    assert len(free) == len(set(free)) == pool.num_free, "the free list contradicts its count"
    assert NULL_BLOCK not in free and held[NULL_BLOCK] == 0, "the null block was given out"
    for block in range(1, pool.num_blocks):
        count = pool.ref_count[block]
        assert count == held[block], f"block {block} has {count} references, {held[block]} tables hold it"
    assert len(free) + len(held) == pool.num_usable, "free and held blocks are not all blocks"
    assert not set(free) & set(held), "a block is both free and held"
    for block, block_hash in index.items():
        assert index.get(block_hash) == block, f"block {block} and its hash point past each other"


def _check_reservation(state: SchedulerState) -> None:
    reserved = 0
    for row in state.batch.order.tolist():
        num_tokens, tables = int(state.batch.num_tokens[row]), state.batch.tables_of(row).tolist()
        for group, table in zip(state.cache.groups, tables, strict=True):
            held = len(table) - table.count(NULL_BLOCK)
            reserved += max(0, group.most_held(num_tokens, state.cache.chunk) - held)
    kept = state.reservation.total()
    assert kept == reserved, f"{kept} blocks are reserved for running requests, which need {reserved}"


def _check_queue(state: SchedulerState, admission: Admission) -> None:
    waiting, swapped = [*state.waiting, *state.transfers.arrived], list(state.swapped)
    assert len(waiting) == len(state.waiting) + len(state.transfers.arrived) and len(swapped) == len(state.swapped)
    apart = len(waiting) + len(swapped) + len(state.batch)
    assert apart == len(state.requests), "a live request is not in exactly one of running, waiting and swapped"
    for request in [*waiting, *swapped]:
        who = f"request {request.id}, {request.status.name}"
        assert request.id in state.requests and request.row < 0, f"{who} waits and is not live"
        assert (request.status is RequestStatus.SWAPPED) == (request in state.swapped), f"{who} is in the wrong queue"
        assert admission.blocked_by(request) is not None, f"{who} waits without a reason"
    host = state.cache.host
    if host is not None:
        held = Counter(block for r in swapped for table in r.host_tables for block in table if block != NULL_BLOCK)
        held.update(host.leaving)
        for block, count in enumerate(host.pool.ref_count):
            assert count == held[block], f"host block {block} has {count} references, {held[block]} tables hold it"
    assert sum(state.loras.values()) == sum(r.lora is not None for r in state.batch.requests_in_order())
    state.encoder.check()
    if not state.requests and not state.transfers.under_way():
        free = state.cache.num_free_blocks + state.cache.pins.num_held
        assert free == state.cache.num_usable_blocks, "nobody lives and blocks are held"
