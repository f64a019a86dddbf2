"""Waiting requests are admitted, in waiting order; swapped ones come back before them.

A request is admitted only if all of its tokens will fit, whatever of them it computes in this step; what admitted
requests still need is reserved for them against further admissions (not against the growth of running ones).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvern.cache.block_pool import NULL_BLOCK
from kvern.cache.kv_cache_manager import CacheHit
from kvern.request import BlockedBy, Request, RequestStatus
from kvern.scheduler import preemption
from kvern.scheduler.state import SchedulerState
from kvern.scheduler.view import Explanation

# How many requests one step looks past that cannot be admitted while others behind them may: bounds the walk.
_MAX_PASSED_OVER = 32

_PARKED_FOR = {
    RequestStatus.WAITING_FOR_GRAMMAR: BlockedBy.GRAMMAR,
    RequestStatus.WAITING_FOR_REMOTE_KV: BlockedBy.REMOTE_KV,
}
# What these lack says nothing about those behind them, who may be admitted as if they were not there.
_PASSED_OVER_FREELY = (BlockedBy.LORA_SLOTS, BlockedBy.ENCODER_BUDGET, BlockedBy.REMOTE_KV, BlockedBy.POLICY)


class Admission:
    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._watermark_blocks = int(state.config.watermark * state.cache.num_usable_blocks)
        # Why requests wait, as of the last step: those that were looked at, and everybody behind them.
        self._reasons: dict[str, BlockedBy] = {}
        self._reason_of_the_rest = BlockedBy.POLICY
        self._first_new_epoch = 0  # rows with this epoch or a later one were admitted in this step

    def begin_step(self) -> None:
        self._first_new_epoch = self.state.batch.next_epoch

    def admit_waiting(self, now: float, only_above: Sequence[Request] = ()) -> int:
        """Admit who can be admitted; returns how many. only_above: requests that could not come back, and that only
        those may overtake whom the policy would let preempt them.

        Stops at the first that cannot be, unless it lacks blocks and may be overtaken: at most max_bypass others are
        ever admitted before it."""
        state, waiting = self.state, self.state.waiting
        if state.policy.dynamic and waiting.num_ready and (state.policy.preempts or not state.batch.full):
            waiting.resort()
        self._reasons, self._reason_of_the_rest = {}, BlockedBy.POLICY
        admitted, place, short_of_blocks = 0, 0, list[Request]()
        while place < min(waiting.num_ready, _MAX_PASSED_OVER):
            request = waiting.at(place)
            if request.id in self._reasons:
                place += 1
                continue
            if self._end_if_hopeless(request):
                continue
            if not all(state.policy.may_preempt(request.info, other.info) for other in only_above):
                self._reason_of_the_rest = BlockedBy.NO_FREE_BLOCKS
                break
            reason = self._try_admit(request, now)
            if reason is None:
                admitted += 1
                for other in short_of_blocks:
                    other.num_bypassed += 1
                if state.policy.accounts and request.row >= 0:  # who is served moves back before the next is chosen
                    state.account([request.row])
                    if state.policy.dynamic:
                        waiting.resort()
                        place = 0
            else:
                self._reasons[request.id] = self._reason_of_the_rest = reason
                place += 1
                if reason is BlockedBy.NO_FREE_BLOCKS:
                    short_of_blocks.append(request)
                elif reason not in _PASSED_OVER_FREELY:
                    break
            if any(other.num_bypassed >= state.config.max_bypass for other in short_of_blocks):
                self._reason_of_the_rest = BlockedBy.NO_FREE_BLOCKS
                break
        return admitted

    def admit_nobody(self, reason: BlockedBy) -> None:
        """A step in which all that wait go on waiting."""
        self._reasons, self._reason_of_the_rest = {}, reason

    def swap_in(self) -> bool:
        """Bring swapped requests back, in order, as far as rows and blocks reach, siblings together. Returns whether
        all are back."""
        return preemption.swap_in(self)

    def start_arrived(self) -> bool:
        """Give rows to requests whose remote load has ended, in order. Returns whether all have got one."""
        state, arrived = self.state, self.state.transfers.arrived
        while arrived.num_ready:
            request = arrived.at(0)
            if self._end_if_hopeless(request):
                continue
            num_computed, tables = request.num_computed_tokens, request.tables
            num_new = self.num_new(request, num_computed)
            size = state.config.block_size
            more = max(-(-(num_computed + num_new) // size) - tables.shape[1], 0)
            short = more * len(state.cache.groups) > state.cache.num_free_blocks
            if not num_new or state.batch.full or self.lacks_lora_slot(request) or short:
                return False
            arrived.remove(request)
            request.tables = None
            fresh = [table + state.cache.allocate(more) for table in tables.tolist()]
            self.start(request, fresh, num_computed, num_new, num_published=0)
        return True

    # ---- one request

    def _end_if_hopeless(self, request: Request) -> bool:
        error = self.state.never_fits(request)  # it may have grown before it was preempted
        if error is not None:
            self.state.end(request, RequestStatus.FINISHED_LENGTH, error=error)
            return True
        if self.state.policy.sheds:
            reason = self.state.policy.shed(request.info)
            if reason is not None:
                error = f"shed by policy {self.state.policy.policy.name}: {reason}"
                self.state.end(request, RequestStatus.FINISHED_IGNORED, error=error)
                return True
        return False

    def _try_admit(self, request: Request, now: float) -> BlockedBy | None:
        """Give a waiting request a row, blocks and tokens, or say what it lacks and change nothing."""
        state = self.state
        if state.budget.remaining == 0:
            return BlockedBy.TOKEN_BUDGET
        if self._waits_for_sibling(request):
            return BlockedBy.POLICY
        hit = self._find_hit(request)
        if self.state.whole(request) and request.num_tokens - hit.num_tokens > state.budget.remaining:
            return BlockedBy.TOKEN_BUDGET
        if state.transfers.connector is not None and request.ask_connector:
            matched = state.transfers.connector.matched_tokens(request, hit.num_tokens)
            if matched is None:
                return BlockedBy.REMOTE_KV
            num_loaded = min(matched.num_tokens, request.num_tokens - 1 - hit.num_tokens)
            if num_loaded > 0:
                return self._admit_remote(request, hit, num_loaded, matched.load_async, now)
        num_new = self.num_new(request, hit.num_tokens)
        if not num_new:
            return BlockedBy.ENCODER_BUDGET
        reason = self._lacks(request, hit)
        while reason is BlockedBy.NO_FREE_BLOCKS and state.kept_prompts.drop_one(last=request):
            hit = self._find_hit(request)
            num_new = self.num_new(request, hit.num_tokens)
            reason = self._lacks(request, hit) or (None if num_new else BlockedBy.TOKEN_BUDGET)
        if reason is not None:
            if not state.policy.preempts or not self._preempt_for(request, hit):
                return reason
            # They gave back what they had of this step; and if they went to the host, what was cached there has gone.
            hit = self._find_hit(request)
            num_new = self.num_new(request, hit.num_tokens)
            reason = self._lacks(request, hit) or (None if num_new else BlockedBy.TOKEN_BUDGET)
            if reason is not None:
                return reason
        self._admit(request, hit, num_new, now)
        return None

    def _admit_remote(
        self, request: Request, hit: CacheHit, num_loaded: int, load_async: bool, now: float
    ) -> BlockedBy | None:
        """Admit a request of which num_loaded tokens after `hit` come from a connector."""
        state, connector = self.state, self.state.transfers.connector
        assert connector is not None
        if self._lacks_blocks(request, hit):
            return BlockedBy.NO_FREE_BLOCKS
        reason = None if load_async else self._lacks(request, hit)  # who loads needs no row yet
        if reason is not None:
            return reason
        start, end = hit.num_tokens, hit.num_tokens + num_loaded
        num_new = 0 if load_async else self.num_new(request, end)
        if not load_async and not num_new:
            return BlockedBy.ENCODER_BUDGET
        self._count_hit(request, hit)
        request.num_charged_tokens = max(request.num_charged_tokens, end)
        tables, copies = state.cache.take(request, hit, end, end + num_new)
        state.copy(copies)
        connector.allocated(request, tables, start, end)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        if load_async:
            state.transfers.begin_load(request, tables, end)
        else:
            state.waiting.remove(request)
            self.start(request, tables, end, num_new, hit.num_on_device())
        return None

    def _find_hit(self, request: Request) -> CacheHit:
        return self._sibling_hit(request) or self.state.cache.lookup(request)

    def _lacks(self, request: Request, hit: CacheHit) -> BlockedBy | None:
        if self.state.batch.full:
            return BlockedBy.MAX_NUM_SEQS
        if self.lacks_lora_slot(request):
            return BlockedBy.LORA_SLOTS
        return BlockedBy.NO_FREE_BLOCKS if self._lacks_blocks(request, hit) else None

    def _lacks_blocks(self, request: Request, hit: CacheHit) -> bool:
        return self.state.cache.cost(hit, request.num_tokens) > self.admissible_blocks()

    def lacks_lora_slot(self, request: Request) -> bool:
        limit, in_use = self.state.config.max_loras, self.state.loras
        return bool(limit and request.lora is not None and request.lora not in in_use and len(in_use) >= limit)

    def admissible_blocks(self) -> int:
        """Free blocks that are not spoken for: what admitted prompts still need is theirs, and while something runs
        the watermark stays free."""
        state = self.state
        free = state.cache.num_free_blocks - state.transfers.reserved()
        return free - state.reservation.total() - self._watermark_blocks if len(state.batch) else free

    def _admit(self, request: Request, hit: CacheHit, num_new: int, now: float) -> None:
        state = self.state
        self._count_hit(request, hit)
        tables, copies = state.cache.take(request, hit, hit.num_tokens, hit.num_tokens + num_new)
        state.copy(copies)
        state.waiting.remove(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        self.start(request, tables, hit.num_tokens, num_new, hit.num_on_device())

    def num_new(self, request: Request, start: int) -> int:
        """How many tokens from `start` on it would compute in this step."""
        state = self.state
        num_new, whole = min(request.num_tokens - start, state.budget.remaining), state.whole(request)
        if num_new <= 0:
            return 0
        if state.chunk_limit() and not whole:
            num_new = min(num_new, state.chunk_limit())
        if state.policy.caps and not whole:
            num_new = state.policy.cap_tokens(request.info, num_new)
        if request.images:
            num_new = state.encoder.cut(request.images, start, num_new, state.budget.remaining)
        return 0 if whole and start + num_new < request.num_tokens else num_new

    def start(
        self, request: Request, tables: list[list[int]], num_computed: int, num_new: int, num_published: int
    ) -> None:
        if request.images:
            self.state.encoder.take(request.id, request.images, num_computed, num_new)
        row = self.state.enter(request, tables, num_computed, num_published)
        self.state.budget.take(np.array([row]), np.array([num_new], dtype=np.int32))
        self.state.batch.num_computed[row] += num_new
        self.state.publish_row(row)

    def _count_hit(self, request: Request, hit: CacheHit) -> None:
        """Once for each admission; lookups that led to none do not count."""
        stats = self.state.stats
        request.num_charged_tokens = max(request.num_charged_tokens, hit.num_tokens)
        if request.resumed:
            request.num_recached_tokens += hit.num_tokens
            stats.recomputed_tokens += max(0, request.num_lost_tokens - hit.num_tokens)
            request.num_lost_tokens = 0
        else:
            request.num_cached_tokens = hit.num_tokens
            if self.state.config.enable_prefix_caching:
                stats.prefix_queried_tokens += request.num_tokens
                stats.prefix_hit_tokens += hit.num_tokens

    # ---- siblings: requests with one prompt that is computed once

    def _sibling(self, request: Request) -> Request | None:
        """The live request whose prompt is this one's, while this one has not started."""
        if request.fork_of is None or request.resumed or request.sampling.prompt_logprobs is not None:
            return None
        return self.state.requests.get(request.fork_of)

    def _waits_for_sibling(self, request: Request) -> bool:
        sibling = self._sibling(request)
        if sibling is None:
            return False
        return sibling.row < 0 or self._computed_before(sibling) < request.num_prompt_tokens - 1

    def _computed_before(self, request: Request) -> int:
        """Tokens of a running request that were there before this step. What comes back from the host in this step is
        not there yet when the copies are made."""
        if request.epoch >= self._first_new_epoch:
            return 0
        return int(self.state.batch.num_computed[request.row] - self.state.budget.by_row[request.row])

    def _sibling_hit(self, request: Request) -> CacheHit | None:
        """Share the sibling's blocks, or those it has left, but for the one that the last prompt token is computed
        into: that is copied."""
        sibling, held = self._sibling(request), self.state.kept_prompts.of(request)
        if sibling is not None:
            held = self.state.batch.tables_of(sibling.row)
        if held is None or self.state.cache.recurrent:  # its state is further than the last prompt token
            return None
        size, last_token = self.state.config.block_size, request.num_prompt_tokens - 1
        full = last_token // size
        tables = held.tolist()
        for group, table in zip(self.state.cache.groups, tables, strict=True):
            first = group.first_needed(last_token)
            if NULL_BLOCK in table[first : full + 1]:
                return None  # already left of its window
            table[:first] = [NULL_BLOCK] * first
        shared = [table[:full] for table in tables]
        if last_token % size == 0:
            return CacheHit(shared, last_token)
        return CacheHit(shared, last_token, copy_from=tuple(table[full] for table in tables))

    # ---- preemption for the sake of a waiting request

    def _preempt_for(self, request: Request, hit: CacheHit) -> bool:
        """Preempt running requests, the last in order first, for a waiting one that the policy puts above them. Only
        if it is enough, and no more than needed. Never one that was admitted in this step, nor one whose work of this
        step another request reads, or the waiting one would, nor the sibling whose blocks it is to share."""
        state, cache, batch = self.state, self.state.cache, self.state.batch
        read = (*hit.blocks(), *hit.copy_from)
        willing = []
        for row in reversed(batch.order.tolist()):
            running = batch.request_at(row)
            if not state.policy.may_preempt(request.info, running.info):
                break
            needed = running.epoch >= self._first_new_epoch or running is self._sibling(request)
            if not needed and not cache.has_readers(row, read):
                willing.append(running)
        victims = self._victims_for_lora(request, willing)
        if victims is None:
            return False
        others = iter(willing)
        while not self._enough_without(victims, request, hit):
            victim = next(others, None)
            if victim is None:
                return False
            together = preemption.leaving_with(state, victim)
            if all(running in willing for running in together):
                victims += [running for running in together if running not in victims]
        for victim in victims:
            if victim.row >= 0:  # it may have gone with a sibling
                state.preempt(victim)
        return True

    def _enough_without(self, victims: list[Request], request: Request, hit: CacheHit) -> bool:
        """Whether the request could be admitted if these running ones were not there."""
        batch, cache = self.state.batch, self.state.cache
        if batch.full and not victims:
            return False
        admissible, wanted = self.admissible_blocks(), hit.blocks()
        leaving: Counter[int] = Counter()  # block -> how many victims hold it
        for victim in victims:
            leaving.update(batch.tables_of(victim.row).ravel().tolist())
            admissible += self.state.reservation.of(victim.row)
        for block, holders in leaving.items():
            # One that the waiting request wants is not gained: free, it would cost what it brings.
            if block != NULL_BLOCK and holders == cache.pool.ref_count[block] and block not in wanted:
                admissible += 1
        if victims and len(victims) == len(batch):
            admissible += self._watermark_blocks
        return cache.cost(hit, request.num_tokens) <= admissible

    def _victims_for_lora(self, request: Request, willing: list[Request]) -> list[Request] | None:
        """All rows of one adapter, if the request lacks an adapter slot: of those that can all give way, the one whose
        most urgent row is the least urgent. None if there is no such adapter."""
        if not self.lacks_lora_slot(request):
            return []
        by_adapter: dict[str, list[Request]] = {}
        for running in willing:  # the least urgent first
            if running.lora is not None:
                rows = by_adapter.setdefault(running.lora, [])
                rows.append(running)
                if len(rows) == self.state.loras[running.lora]:
                    return rows
        return None

    # ---- why the others wait

    def blocked_by(self, request: Request) -> BlockedBy | None:
        """Why a live request waits; None if it runs or has ended."""
        if request.row >= 0 or request.status.finished:
            return None
        if request.status is RequestStatus.SWAPPED:
            return BlockedBy.NO_FREE_BLOCKS
        if request in self.state.transfers.arrived:
            return BlockedBy.MAX_NUM_SEQS if self.state.batch.full else BlockedBy.TOKEN_BUDGET
        parked_for = _PARKED_FOR.get(request.status)
        return parked_for or self._reasons.get(request.id, self._reason_of_the_rest)

    def explain(self, request: Request) -> Explanation | None:
        """The numbers behind blocked_by(). Changes nothing."""
        state, reason = self.state, self.blocked_by(request)
        if reason is None:
            return None
        rank = before = 0
        for queue in (state.transfers.arrived, state.swapped, state.waiting):
            place = queue.place_of(request)
            if place is not None:
                rank = before + place
                break
            before += queue.num_ready
        blocks_short = max(0, self._blocks_needed(request) - self.admissible_blocks())
        sibling = self._sibling(request) if self._waits_for_sibling(request) else None
        return Explanation(
            reason,
            rank=None if place is None else rank,
            blocks_short=blocks_short,
            overtaken_by=request.num_bypassed,
            waits_for=None if sibling is None else sibling.id,
            blocks_pinned=state.cache.pins.num_held if blocks_short else 0,
            policy=state.policy.explain(request.info),
        )

    def _blocks_needed(self, request: Request) -> int:
        """Blocks that must be free for a waiting request to be admitted."""
        state, cache, num_tokens = self.state, self.state.cache, request.num_tokens
        if request.host_tables:
            return preemption.blocks_to_come_back(state, preemption.swapped_with(state, request))
        if request.tables is not None:  # what it has is not free
            num_groups, held = request.tables.shape
            return int(num_groups * max(0, -(-num_tokens // cache.block_size) - held))
        hit = cache.lookup(request) if self._waits_for_sibling(request) else self._find_hit(request)
        return cache.cost(hit, num_tokens)

    def waiting_by_reason(self) -> dict[BlockedBy, int]:
        """How many wait for what. Costs by how many the last step looked at, not by how many wait."""
        state, counts = self.state, dict[BlockedBy, int]()

        def add(reason: BlockedBy, count: int) -> None:
            if count:
                counts[reason] = counts.get(reason, 0) + count

        looked_at = 0
        for request_id, reason in self._reasons.items():
            request = state.requests.get(request_id)
            if request is not None and request.row < 0 and request.status in _IN_QUEUE:
                add(reason, 1)
                looked_at += 1
        for status, count in state.waiting.parked_by_status().items():
            add(_PARKED_FOR[status], count)
        add(BlockedBy.NO_FREE_BLOCKS, len(state.swapped))
        add(BlockedBy.MAX_NUM_SEQS if state.batch.full else BlockedBy.TOKEN_BUDGET, len(state.transfers.arrived))
        add(self._reason_of_the_rest, state.waiting.num_ready - looked_at)
        return counts


_IN_QUEUE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
