"""The second half of a step: waiting requests are admitted, in waiting order.

A request is admitted only if all of its tokens will fit, whatever of them it computes in this step; what admitted
requests still need is reserved for them against further admissions (not against the growth of running ones).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvern.cache.kv_cache_manager import CacheHit
from kvern.request import BlockedBy, Request, RequestStatus
from kvern.scheduler.state import SchedulerState
from kvern.step import Int32, NewRequest

# How many requests short of blocks one step looks past: bounds the walk when max_bypass lets others overtake.
_MAX_PASSED_OVER = 32


class Admission:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._watermark_blocks = int(state.config.watermark * state.cache.num_usable_blocks)
        # Why requests wait, as of the last step: those that were looked at, and everybody behind them.
        self._reasons: dict[str, BlockedBy] = {}
        self._reason_of_the_rest = BlockedBy.POLICY
        # Of the step being planned.
        self._new: list[NewRequest] = []
        self._copies: list[tuple[int, int]] = []
        self._first_new_epoch = 0

    def admit_waiting(self, now: float) -> tuple[list[NewRequest], list[tuple[int, int]]]:
        """Admit who can be admitted; returns them and the blocks to copy for them.

        Stops at the first that cannot be, unless it lacks blocks and may be overtaken: at most max_bypass others are
        ever admitted before it."""
        waiting, passed_over = self.state.waiting, list[Request]()
        self._reasons, self._reason_of_the_rest = {}, BlockedBy.POLICY
        self._new, self._copies, self._first_new_epoch = [], [], self.state.batch.next_epoch
        while len(passed_over) < waiting.num_ready:
            request = waiting.at(len(passed_over))
            error = self.state.never_fits(request)  # it may have grown before it was preempted
            if error is not None:
                self.state.end(request, RequestStatus.FINISHED_LENGTH, error=error)
                continue
            reason = self._try_admit(request, now)
            if reason is None:
                for other in passed_over:
                    other.num_bypassed += 1
            else:
                self._reasons[request.id] = reason
                self._reason_of_the_rest = reason
                passed_over.append(request)
            if passed_over and not self._may_overtake(passed_over):
                break
        return self._new, self._copies

    def admit_nobody(self, reason: BlockedBy) -> tuple[list[NewRequest], list[tuple[int, int]]]:
        """A step in which all that wait go on waiting."""
        self._reasons, self._reason_of_the_rest = {}, reason
        return [], []

    # ---- one request

    def _try_admit(self, request: Request, now: float) -> BlockedBy | None:
        """Give a waiting request a row, blocks and tokens, or say what it lacks and change nothing."""
        if self.state.budget.remaining == 0:
            return BlockedBy.TOKEN_BUDGET
        hit = self._find_hit(request)
        reason = self._lacks(request, hit)
        if reason is not None:
            if not self._preempt_for(request, hit):
                return reason
            hit = self._find_hit(request)
            reason = self._lacks(request, hit)
            assert reason is None, f"{request.id} still lacks {reason} after the preemptions made for it"
        self._admit(request, hit, now)
        return None

    def _find_hit(self, request: Request) -> CacheHit:
        cache = self.state.cache
        hit = cache.lookup(request)
        if hit.copy_from and cache.cost(hit, request.num_tokens) > self._admissible_blocks():
            return hit.without_copy(cache.block_size)
        return hit

    def _lacks(self, request: Request, hit: CacheHit) -> BlockedBy | None:
        if self.state.batch.full:
            return BlockedBy.MAX_NUM_SEQS
        if self.state.cache.cost(hit, request.num_tokens) > self._admissible_blocks():
            return BlockedBy.NO_FREE_BLOCKS
        return None

    def _admissible_blocks(self) -> int:
        """Free blocks that are not spoken for: what admitted prompts still need is theirs, and while something runs
        the watermark stays free."""
        rows, free = self.state.batch.order, self.state.cache.num_free_blocks
        if not len(rows):
            return free
        return free - int(self._reserved(rows).sum()) - self._watermark_blocks

    def _reserved(self, rows: Int32) -> Int32:
        """Blocks each row still needs for the tokens it has."""
        batch, size = self.state.batch, self.state.config.block_size
        need: Int32 = (batch.num_tokens[rows] + (size - 1)) // size - batch.num_blocks[rows]
        return np.maximum(need, 0)

    def _preempt_for(self, request: Request, hit: CacheHit) -> bool:
        """Preempt running requests, the last in order first, for a waiting one that the policy puts above them. Only
        if it is enough, and no more than needed. Never one that was admitted in this step, nor one whose work of this
        step another request reads, or the waiting one would."""
        batch, cache = self.state.batch, self.state.cache
        need, admissible = cache.cost(hit, request.num_tokens), self._admissible_blocks()
        wanted_blocks = (*hit.blocks, hit.copy_from)
        victims: list[Request] = []
        leaving: Counter[int] = Counter()  # block -> how many victims hold it
        for row in reversed(batch.order.tolist()):
            running = batch.request_at(row)
            if not self.state.policy.may_preempt(request, running):
                break
            if running.epoch >= self._first_new_epoch or cache.has_readers(row, wanted_blocks):
                continue
            victims.append(running)
            table = batch.table_of(row).tolist()
            leaving.update(table)
            # One that the waiting request wants is not gained: free, it would cost what it brings.
            admissible += sum(leaving[b] == cache.pool.ref_count[b] and b not in wanted_blocks for b in table)
            admissible += int(self._reserved(batch.order[batch.order == row])[0])
            if len(victims) == len(batch):
                admissible += self._watermark_blocks
            if need <= admissible:
                for victim in victims:
                    self.state.preempt(victim)
                return True
        return False

    def _admit(self, request: Request, hit: CacheHit, now: float) -> None:
        state, batch = self.state, self.state.batch
        num_new = min(request.num_tokens - hit.num_tokens, state.budget.remaining)
        if state.chunk_limit():
            num_new = min(num_new, state.chunk_limit())
        self._count_hit(request, hit)
        table = state.cache.take(request, hit, hit.num_tokens + num_new)
        if hit.copy_from:
            self._copies.append((hit.copy_from, table[len(hit.blocks)]))
        state.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        key, stop_ids = state.running_key(request), state.stop_ids(request)
        row = batch.insert(request, key, table, hit.num_tokens, stop_ids)
        rows = np.array([row], dtype=np.int32)
        state.budget.take(rows, np.array([num_new], dtype=np.int32))
        batch.num_computed[row] += num_new
        state.publish(rows)
        self._new.append(
            NewRequest(
                request_id=request.id,
                row=row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                block_ids=table,
                num_computed_tokens=hit.num_tokens,
            )
        )

    def _count_hit(self, request: Request, hit: CacheHit) -> None:
        """Once for each admission; lookups that led to none do not count."""
        stats = self.state.stats
        if request.resumed:
            request.num_recached_tokens += hit.num_tokens
            stats.recomputed_tokens += max(0, request.num_lost_tokens - hit.num_tokens)
            request.num_lost_tokens = 0
        else:
            request.num_cached_tokens = hit.num_tokens
            if self.state.config.enable_prefix_caching:
                stats.prefix_queried_tokens += request.num_tokens
                stats.prefix_hit_tokens += hit.num_tokens

    # ---- who may overtake, and why the others wait

    def _may_overtake(self, passed_over: list[Request]) -> bool:
        last_reason = self._reasons[passed_over[-1].id]
        return (
            last_reason is BlockedBy.NO_FREE_BLOCKS
            and len(passed_over) < _MAX_PASSED_OVER
            and all(request.num_bypassed < self.state.config.max_bypass for request in passed_over)
        )

    def blocked_by(self, request: Request) -> BlockedBy | None:
        """Why a live request waits; None if it runs or has ended."""
        if request.row >= 0 or request.status.finished:
            return None
        return self._reasons.get(request.id, self._reason_of_the_rest)

    def waiting_by_reason(self) -> dict[BlockedBy, int]:
        """How many wait for what. Costs by how many the last step looked at, not by how many wait."""
        counts: dict[BlockedBy, int] = {}
        looked_at = 0
        for request_id, reason in self._reasons.items():
            request = self.state.requests.get(request_id)
            if request is not None and request.row < 0:
                counts[reason] = counts.get(reason, 0) + 1
                looked_at += 1
        if len(self.state.waiting) > looked_at:
            rest = self._reason_of_the_rest
            counts[rest] = counts.get(rest, 0) + len(self.state.waiting) - looked_at
        return counts
