"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has tokens (prompt, output, drafts) and a count of those whose
keys and values are in the cache; each step hands out tokens so that the count catches up. Chunked prefill, cache hits,
resumption after a preemption, speculation and decode are that one rule.

Pure: no clock (`now` is an argument), no I/O, no randomness; the same calls give the same outputs.

Who owns what: `requests` has every live request. A waiting one is in `waiting` and holds nothing. A running one has a
row in `batch`, which holds its progress and its block table; `cache` counts the references. Order within schedule():

  1. running requests take tokens and blocks, in running order; who lacks a block has the last of the order preempted
  2. blocks that become full are made hittable
  3. if nobody was preempted: waiting requests are admitted, in waiting order, as far as all of their prompt will fit
  4. the plan is written down as a SchedulerOutput; num_computed has already advanced

update_from_output() appends what was sampled, takes back rejected drafts, and ends requests. Results are matched by
the row's epoch, so those of a request that was preempted or aborted meanwhile never reach another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvern.cache.kv_cache_manager import CacheHit, KVCacheManager
from kvern.config import SchedulerConfig
from kvern.request import BlockedBy, Request, RequestStatus
from kvern.sampling_params import InvalidRequest
from kvern.scheduler.budget import SchedulingBudget
from kvern.scheduler.policies import make_policy
from kvern.scheduler.running_batch import RunningBatch
from kvern.scheduler.view import RequestView, view_of
from kvern.scheduler.waiting_queue import WaitingQueue
from kvern.step import (
    FinishedRequest,
    Int32,
    ModelRunnerOutput,
    NewBlocks,
    NewRequest,
    SchedulerOutput,
    StepOutputs,
)

# How many requests short of blocks one step looks past: bounds the walk when max_bypass lets others overtake.
_MAX_PASSED_OVER = 32


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0  # tokens of requests at their first admission
    prefix_hit_tokens: int = 0  # of those, found in the cache
    preemptions: int = 0
    recomputed_tokens: int = 0  # computed before a preemption and computed again after it


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = make_policy(config.policy)
        self.cache = KVCacheManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.batch = RunningBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self.waiting = WaitingQueue(self.policy.rank)
        self.budget = SchedulingBudget(config.max_num_batched_tokens, config.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self._watermark_blocks = int(config.watermark * self.cache.num_usable_blocks)
        self._next_serial = 0
        # Why requests wait, as of the last step: those that were looked at, and everybody behind them.
        self._reasons: dict[str, BlockedBy] = {}
        self._reason_of_the_rest = BlockedBy.POLICY
        self._first_new_epoch = 0  # rows with this epoch or a later one were admitted in this step
        # Told in the next output, then cleared.
        self._finished_ids: list[str] = []
        self._finished_rows: list[int] = []
        self._preempted_ids: list[str] = []
        self._preempted_rows: list[int] = []
        self._ignored_ids: list[str] = []
        # Told in the next StepOutputs, then cleared.
        self._ended: list[FinishedRequest] = []

    # ---- what goes in

    def add_request(self, request: Request) -> None:
        """Let a request wait for its turn. One that can never fit ends at once, FINISHED_IGNORED, and is told with
        the next step. Raises InvalidRequest if a live request has its id."""
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        request.serial = self._next_serial
        self._next_serial += 1
        limit = self.config.max_model_len
        max_tokens = request.sampling.max_tokens
        request.max_total_tokens = limit if max_tokens is None else min(limit, request.num_prompt_tokens + max_tokens)
        self.requests[request.id] = request
        error = self._never_fits(request)
        if error is None:
            self.waiting.add(request)
        else:
            self._end(request, RequestStatus.FINISHED_IGNORED, error=error)

    def abort(self, request_id: str) -> bool:
        """End a request now; its blocks are free at once, and what a step under way samples for it is dropped.
        False if there is no such live request."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end(request, RequestStatus.FINISHED_ABORTED)
        return True

    def preempt(self, request_id: str) -> bool:
        """Make a running request wait again, its blocks given back. False if it does not run."""
        request = self.requests.get(request_id)
        if request is None or request.row < 0:
            return False
        self._preempt(request)
        return True

    # ---- one step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan a step. `now`: seconds on the caller's clock."""
        self.budget.reset()
        self._first_new_epoch = self.batch.next_epoch
        running = self.batch.order
        epochs = self.batch.epoch[running]
        blocks_before = self.batch.num_blocks[running]
        preempted = self._schedule_running()
        self._publish(running)
        new_requests: list[NewRequest] = []
        copies: list[tuple[int, int]] = []
        if not preempted:
            self._schedule_waiting(now, new_requests, copies)
        else:
            self._reasons.clear()
            self._reason_of_the_rest = BlockedBy.NO_FREE_BLOCKS
        self.cache.end_step()
        stayed = (self.budget.by_row[running] > 0) & (self.batch.epoch[running] == epochs)
        return self._output(running[stayed], blocks_before[stayed], new_requests, copies)

    def _schedule_running(self) -> bool:
        """Hand tokens and blocks to running requests. Returns whether somebody had to be preempted for it."""
        batch, cache, size = self.batch, self.cache, self.config.block_size
        pending, preempted_before = batch.order, len(self._preempted_rows)
        while len(pending):
            grant = self.budget.cut(self._wanted(pending))
            need = (batch.num_computed[pending] + (grant + (size - 1))) // size - batch.num_blocks[pending]
            np.maximum(need, 0, out=need)
            ends = np.cumsum(need)
            served = len(pending)
            if ends[-1] > cache.num_free_blocks:
                served = int(np.searchsorted(ends, cache.num_free_blocks, side="right"))
            if served:
                rows, grant = pending[:served], grant[:served]
                self.budget.take(rows, grant)
                batch.num_computed[rows] += grant
                if ends[served - 1]:
                    grows = np.flatnonzero(need[:served])
                    batch.append_blocks(rows[grows], need[grows], cache.allocate(int(ends[served - 1])))
            pending = pending[served:]
            if len(pending):
                pending = pending[pending != self._make_room()]
        return len(self._preempted_rows) > preempted_before

    def _wanted(self, rows: Int32) -> Int32:
        """How many tokens each row could compute now, budget aside."""
        batch = self.batch
        computed = batch.num_computed[rows]
        wanted = batch.num_tokens[rows] + batch.num_drafts[rows] + batch.num_placeholders[rows] - computed
        # The last token a request may have is never computed: nothing comes after it.
        np.minimum(wanted, batch.max_total[rows] - 1 - computed, out=wanted)
        threshold = self._chunk_limit()
        if threshold:
            np.minimum(wanted, threshold, out=wanted)
        return wanted

    def _chunk_limit(self) -> int:
        """Most tokens of one request in this step, 0 = no such limit. Who is alone delays nobody."""
        return self.config.long_prefill_token_threshold if len(self.requests) > 1 else 0

    def _make_room(self) -> int:
        """Somebody lacks blocks, so the last in order leaves the batch, be it the same one. Returns the row it had."""
        victim = self.batch.request_at(int(self.batch.order[-1]))
        row = victim.row
        if len(self.batch) > 1:
            self._preempt(victim)
        else:
            # Nothing is left to take from anybody: it cannot grow, now or later.
            has_output = int(self.batch.num_tokens[row]) > victim.num_prompt_tokens
            status = RequestStatus.FINISHED_LENGTH if has_output else RequestStatus.FINISHED_IGNORED
            self._end(victim, status, error=self._pool_too_small(int(self.batch.num_tokens[row])))
        return row

    def _publish(self, rows: Int32) -> None:
        """Make the blocks hittable that these rows fill in this step. Only final tokens count, never drafts."""
        if not self.config.enable_prefix_caching:
            return
        batch = self.batch
        full = np.minimum(batch.num_computed[rows], batch.num_tokens[rows]) // self.config.block_size
        for i in np.flatnonzero(full > batch.num_published[rows]).tolist():
            row, end = int(rows[i]), int(full[i])
            first = int(batch.num_published[row])
            self.cache.publish(batch.request_at(row), batch.token_ids[row], batch.block_table[row], first, end, row)
            batch.num_published[row] = end

    # ---- admission

    def _schedule_waiting(self, now: float, new: list[NewRequest], copies: list[tuple[int, int]]) -> None:
        """Admit who can be admitted, in waiting order. Stops at the first that cannot, unless it lacks blocks and
        may be overtaken: at most max_bypass others are ever admitted before it."""
        self._reasons.clear()
        self._reason_of_the_rest = BlockedBy.POLICY
        passed_over: list[Request] = []
        while len(passed_over) < self.waiting.num_ready:
            request = self.waiting.at(len(passed_over))
            error = self._never_fits(request)  # it may have grown before it was preempted
            if error is not None:
                self._end(request, RequestStatus.FINISHED_LENGTH, error=error)
                continue
            reason = self._try_admit(request, now, new, copies)
            if reason is None:
                for other in passed_over:
                    other.num_bypassed += 1
            else:
                self._reasons[request.id] = reason
                self._reason_of_the_rest = reason
                passed_over.append(request)
            if passed_over and not self._may_overtake(passed_over):
                break

    def _may_overtake(self, passed_over: list[Request]) -> bool:
        last_reason = self._reasons[passed_over[-1].id]
        return (
            last_reason is BlockedBy.NO_FREE_BLOCKS
            and len(passed_over) < _MAX_PASSED_OVER
            and all(request.num_bypassed < self.config.max_bypass for request in passed_over)
        )

    def _try_admit(
        self, request: Request, now: float, new: list[NewRequest], copies: list[tuple[int, int]]
    ) -> BlockedBy | None:
        """Give a waiting request a row, blocks and tokens, or say what it lacks and change nothing."""
        if self.budget.remaining == 0:
            return BlockedBy.TOKEN_BUDGET
        hit = self._find_hit(request)
        reason = self._lacks(request, hit)
        if reason is not None:
            if not self._preempt_for(request, hit):
                return reason
            hit = self._find_hit(request)
            reason = self._lacks(request, hit)
            assert reason is None, f"{request.id} still lacks {reason} after the preemptions made for it"
        self._admit(request, hit, now, new, copies)
        return None

    def _find_hit(self, request: Request) -> CacheHit:
        hit = self.cache.lookup(request)
        if hit.copy_from and self.cache.cost(hit, request.num_tokens) > self._admissible_blocks():
            return hit.without_copy(self.config.block_size)
        return hit

    def _lacks(self, request: Request, hit: CacheHit) -> BlockedBy | None:
        if self.batch.full:
            return BlockedBy.MAX_NUM_SEQS
        if self.cache.cost(hit, request.num_tokens) > self._admissible_blocks():
            return BlockedBy.NO_FREE_BLOCKS
        return None

    def _admissible_blocks(self) -> int:
        """Free blocks that are not spoken for: what admitted prompts still need is theirs, and while something runs
        the watermark stays free."""
        rows = self.batch.order
        if not len(rows):
            return self.cache.num_free_blocks
        return self.cache.num_free_blocks - int(self._reserved(rows).sum()) - self._watermark_blocks

    def _reserved(self, rows: Int32) -> Int32:
        """Blocks each row still needs for the tokens it has."""
        size = self.config.block_size
        need: Int32 = (self.batch.num_tokens[rows] + (size - 1)) // size - self.batch.num_blocks[rows]
        return np.maximum(need, 0)

    def _preempt_for(self, request: Request, hit: CacheHit) -> bool:
        """Preempt running requests, the last in order first, for a waiting one that the policy puts above them. Only
        if it is enough, and no more than needed. Never one that was admitted in this step, nor one whose work of this
        step another request reads."""
        rows_short = 1 if self.batch.full else 0
        blocks_short = self.cache.cost(hit, request.num_tokens) - self._admissible_blocks()
        victims: list[Request] = []
        for row in reversed(self.batch.order.tolist()):
            running = self.batch.request_at(row)
            if not self.policy.may_preempt(request, running):
                break
            if running.epoch >= self._first_new_epoch or self.cache.has_readers(row):
                continue
            victims.append(running)
            rows_short -= 1
            table = self.batch.table_of(row).tolist()
            shared = (*hit.blocks, hit.copy_from)
            blocks_short -= sum(self.cache.pool.ref_count[b] == 1 and b not in shared for b in table)
            blocks_short -= int(self._reserved(np.array([row], dtype=np.int32))[0])
            if rows_short <= 0 and blocks_short <= 0:
                for victim in victims:
                    self._preempt(victim)
                return True
        return False

    def _admit(
        self, request: Request, hit: CacheHit, now: float, new: list[NewRequest], copies: list[tuple[int, int]]
    ) -> None:
        num_new = min(request.num_tokens - hit.num_tokens, self.budget.remaining)
        if self._chunk_limit():
            num_new = min(num_new, self._chunk_limit())
        self._count_hit(request, hit)
        table = self.cache.take(request, hit, hit.num_tokens + num_new)
        if hit.copy_from:
            copies.append((hit.copy_from, table[len(hit.blocks)]))
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        stop_ids = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:
            stop_ids = self.config.eos_token_ids + stop_ids
        row = self.batch.insert(request, self._running_key(request), table, hit.num_tokens, stop_ids)
        rows = np.array([row], dtype=np.int32)
        self.budget.take(rows, np.array([num_new], dtype=np.int32))
        self.batch.num_computed[row] += num_new
        self._publish(rows)
        new.append(
            NewRequest(
                request.id,
                row,
                request.token_ids,
                request.num_prompt_tokens,
                request.sampling,
                table,
                hit.num_tokens,
            )
        )

    def _running_key(self, request: Request) -> tuple[object, float, int]:
        return (self.policy.rank(request), request.arrival_time, request.serial)

    def _count_hit(self, request: Request, hit: CacheHit) -> None:
        """Once for each admission; lookups that led to none do not count."""
        if request.resumed:
            request.num_recached_tokens += hit.num_tokens
            self.stats.recomputed_tokens += max(0, request.num_lost_tokens - hit.num_tokens)
            request.num_lost_tokens = 0
        else:
            request.num_cached_tokens = hit.num_tokens
            if self.config.enable_prefix_caching:
                self.stats.prefix_queried_tokens += request.num_tokens
                self.stats.prefix_hit_tokens += hit.num_tokens

    # ---- who leaves

    def _preempt(self, request: Request) -> None:
        """Back among the waiting, in front of its rank; tokens are kept, blocks are not."""
        row = request.row
        self._preempted_rows.append(row)
        self._preempted_ids.append(request.id)
        self.budget.give_back(row)
        self.cache.retract(row)
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.resumed = True
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.add(request)

    def _leave(self, request: Request) -> None:
        """Take a request out of the batch or the queue, its blocks given back."""
        if request.row >= 0:
            table = self.batch.table_of(request.row).tolist()
            self.batch.remove([request.row])
            self.cache.free(table)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.cache.forget(request.id)

    def _end(
        self, request: Request, status: RequestStatus, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        """The one place where a request stops being live."""
        if request.row >= 0:
            self._finished_rows.append(request.row)
        self._leave(request)
        request.status, request.stop_reason, request.error = status, stop_reason, error
        del self.requests[request.id]
        self._finished_ids.append(request.id)
        if status is RequestStatus.FINISHED_IGNORED:
            self._ignored_ids.append(request.id)
        self._ended.append(FinishedRequest(request, status, stop_reason, error))

    def _never_fits(self, request: Request) -> str | None:
        """Why a waiting request could never be admitted, or None."""
        if request.num_prompt_tokens >= self.config.max_model_len:
            return (
                f"the prompt has {request.num_prompt_tokens} tokens, at most {self.config.max_model_len - 1} fit: "
                f"max_model_len is {self.config.max_model_len}, and one token is kept for the output"
            )
        if self.cache.blocks_for(request.num_tokens) > self.cache.num_usable_blocks:
            return self._pool_too_small(request.num_tokens)
        return None

    def _pool_too_small(self, num_tokens: int) -> str:
        blocks, size = self.cache.num_usable_blocks, self.config.block_size
        return (
            f"the whole KV cache holds {blocks * size} tokens ({blocks} blocks of {size}); "
            f"a request with {num_tokens} tokens does not fit or cannot grow in it"
        )

    # ---- the plan, written down

    def _output(
        self,
        kept: Int32,
        blocks_before: Int32,
        new_requests: list[NewRequest],
        copies: list[tuple[int, int]],
    ) -> SchedulerOutput:
        batch = self.batch
        rows = kept
        if new_requests:
            admitted = np.array([new.row for new in new_requests], dtype=np.int32)
            rows = np.concatenate([kept, admitted])
        num_new = self.budget.by_row[rows]
        after = batch.num_computed[rows]
        samples = after >= batch.num_tokens[rows] + batch.num_placeholders[rows]
        output = SchedulerOutput(
            step_id=self.stats.steps,
            rows=rows,
            epochs=batch.epoch[rows],
            request_ids=batch.ids[rows].tolist(),
            num_computed=after - num_new,
            num_new=num_new,
            samples=samples,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - self.budget.remaining,
            new_requests=new_requests,
            new_blocks=self._new_blocks(kept, blocks_before),
            blocks_to_copy=copies,
            finished_req_ids=self._finished_ids,
            finished_rows=self._finished_rows,
            preempted_req_ids=self._preempted_ids,
            preempted_rows=self._preempted_rows,
            ignored_req_ids=self._ignored_ids,
            num_lookahead_slots=self.config.num_speculative_tokens,
            running_queue_size=len(batch),
        )
        self._finished_ids, self._finished_rows, self._ignored_ids = [], [], []
        self._preempted_ids, self._preempted_rows = [], []
        if self.config.num_speculative_tokens:
            self._write_drafts(output)
        if self.config.async_scheduling:
            sampling = rows[samples]
            batch.num_placeholders[sampling] += 1 + batch.num_drafts[sampling]
            batch.num_drafts[sampling] = 0
        self.stats.steps += 1
        self.stats.scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def _new_blocks(self, rows: Int32, before: Int32) -> NewBlocks:
        grown = self.batch.num_blocks[rows] - before
        if not grown.any():
            return NewBlocks.none()
        owners = np.repeat(rows, grown)
        first = np.repeat(np.cumsum(grown) - grown, grown)
        index = np.repeat(before, grown) + np.arange(len(owners), dtype=np.int32) - first
        return NewBlocks(owners, index, self.batch.block_table[owners, index])

    def _write_drafts(self, output: SchedulerOutput) -> None:
        """Drafts that found no room in the budget are dropped, the first ones are kept."""
        batch, rows = self.batch, output.rows
        for row in rows[batch.num_drafts[rows] > 0].tolist():
            known, end = int(batch.num_tokens[row]), int(batch.num_computed[row])
            batch.num_drafts[row] = max(0, end - known)
            if end > known:
                output.draft_tokens[row] = batch.token_ids[row, known:end].tolist()

    # ---- what comes back

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepOutputs:
        """Take in the result of a planned step. Outputs are handed back in the order they were planned."""
        batch = self.batch
        live = batch.epoch[output.rows] == output.epochs
        sampled = result.count > 0
        self._take_back_rejected(output, result)
        if self.config.async_scheduling:
            self._settle_placeholders(output, live)
        chosen = np.flatnonzero(live & sampled)
        everybody = len(chosen) == len(output.rows)
        rows = output.rows if everybody else output.rows[chosen]
        tokens = result.token_ids if everybody else result.token_ids[chosen]
        counts = result.count.copy() if everybody else result.count[chosen]
        stopped = self._append_tokens(rows, tokens, counts)
        ids = output.request_ids if everybody else [output.request_ids[i] for i in chosen.tolist()]
        outputs = StepOutputs(ids, tokens, counts)
        if not (live | ~sampled).all():
            self._deliver_late(outputs, output, result, np.flatnonzero(sampled & ~live).tolist())
        self._attach_logprobs(outputs, output, result)
        self._end_stopped(rows, stopped)
        self._end_failed(output, result)
        for row, drafts in result.drafts.items():
            if self._live_index(output, row) is not None:
                self._accept_drafts(row, drafts)
        self.stats.generated_tokens += int(outputs.count.sum())
        outputs.finished, self._ended = self._ended, []
        return outputs

    def _append_tokens(self, rows: Int32, tokens: Int32, counts: Int32) -> Int32:
        """Append the sampled tokens, one column at a time, and look for a reason to stop after each, in the order
        EOS and stop ids, then length. `counts` is trimmed after the stop. Returns, per row, 0 or what stopped it:
        -1 for the length, else 1 + the place in the row's stop ids."""
        batch = self.batch
        stopped = np.zeros(len(rows), dtype=np.int32)
        for column in range(tokens.shape[1]):
            now_rows, now_tokens, places = rows, tokens[:, 0], None
            if column:
                places = np.flatnonzero((counts > column) & (stopped == 0))
                if not len(places):
                    break
                now_rows, now_tokens = rows[places], tokens[places, column]
            batch.append_tokens(now_rows, now_tokens)
            known = batch.num_tokens[now_rows]
            hits = batch.stop_ids[now_rows] == now_tokens[:, None]
            hits[known < batch.min_total[now_rows]] = False
            why = np.where(known >= batch.max_total[now_rows], -1, 0).astype(np.int32)
            if hits.any():
                why = np.where(hits.any(axis=1), 1 + hits.argmax(axis=1), why).astype(np.int32)
            if why.any():
                ended = np.flatnonzero(why) if places is None else places[why != 0]
                stopped[ended] = why[why != 0]
                counts[ended] = column + 1
        return stopped

    def _end_stopped(self, rows: Int32, stopped: Int32) -> None:
        for i in np.flatnonzero(stopped).tolist():
            row, why = int(rows[i]), int(stopped[i])
            request = self.batch.request_at(row)
            stop_reason = None
            if why > 0:
                token = int(self.batch.stop_ids[row, why - 1])
                is_eos = token in self.config.eos_token_ids and not request.sampling.ignore_eos
                stop_reason = None if is_eos else token
            status = RequestStatus.FINISHED_STOPPED if why > 0 else RequestStatus.FINISHED_LENGTH
            self._end(request, status, stop_reason)

    def _end_failed(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Rows that failed alone end alone."""
        for row, message in result.errors.items():
            if self._live_index(output, row) is not None:
                self._end(self.batch.request_at(row), RequestStatus.FINISHED_ERROR, error=message)

    def _live_index(self, output: SchedulerOutput, row: int) -> int | None:
        """Where `row` stands in `output`, or None if its occupant has changed or left since."""
        i = int(np.flatnonzero(output.rows == row)[0])
        return i if self.batch.epoch[row] == output.epochs[i] else None

    def _take_back_rejected(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Drafts that were not accepted have not been computed. One of the sampled tokens is never a draft."""
        for row, drafts in output.draft_tokens.items():
            i = self._live_index(output, row)
            if i is not None:
                self.batch.num_computed[row] -= len(drafts) - max(0, int(result.count[i]) - 1)
                if not self.config.async_scheduling:
                    self.batch.num_drafts[row] = 0

    def _settle_placeholders(self, output: SchedulerOutput, live: np.ndarray) -> None:
        """What this step stood for is known now."""
        rows = output.rows[live & output.samples]
        self.batch.num_placeholders[rows] -= 1
        for row, drafts in output.draft_tokens.items():
            if row in rows:
                self.batch.num_placeholders[row] -= len(drafts)

    def _accept_drafts(self, row: int, drafts: list[int]) -> None:
        """Drafts are for requests that decode; while a prompt is being computed there is nothing to guess."""
        batch = self.batch
        if batch.num_computed[row] == batch.num_tokens[row] - 1:
            batch.set_drafts(row, drafts[: self.config.num_speculative_tokens])

    def _deliver_late(
        self, outputs: StepOutputs, output: SchedulerOutput, result: ModelRunnerOutput, late: list[int]
    ) -> None:
        """Tokens sampled for requests that left their row meanwhile. A preempted one that still waits gets them: they
        follow what it has. Of an aborted one, or one that runs again and will sample them again, they are dropped."""
        for i in late:
            request = self.requests.get(output.request_ids[i])
            if request is None or request.row >= 0 or request.epoch != output.epochs[i]:
                continue
            tokens = result.token_ids[i, : min(int(result.count[i]), request.max_total_tokens - request.num_tokens)]
            stop_ids = request.sampling.stop_token_ids
            if not request.sampling.ignore_eos:
                stop_ids = self.config.eos_token_ids + stop_ids
            status = None
            for k, token in enumerate(tokens.tolist()):
                total = request.num_tokens + k + 1
                if token in stop_ids and total >= request.num_prompt_tokens + request.sampling.min_tokens:
                    tokens, status = tokens[: k + 1], RequestStatus.FINISHED_STOPPED
                    break
            request.token_ids = np.concatenate([request.token_ids, tokens])
            self.cache.forget(request.id)
            outputs.add(request.id, tokens)
            if status is None and request.num_tokens >= request.max_total_tokens:
                status = RequestStatus.FINISHED_LENGTH
            if status is not None:
                self._end(request, status)

    def _attach_logprobs(self, outputs: StepOutputs, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if not result.logprobs and not result.prompt_logprobs:
            return
        live = dict(zip(output.rows.tolist(), output.request_ids, strict=True))
        counts = dict(zip(outputs.request_ids, outputs.count.tolist(), strict=True))
        for row, entries in result.logprobs.items():
            rid = live[row]
            if counts.get(rid):
                outputs.logprobs[rid] = entries[: counts[rid]]
        for row, (first, entries) in result.prompt_logprobs.items():
            if live[row] in self.requests:
                outputs.prompt_logprobs[live[row]] = (first, entries)

    # ---- questions

    def has_work(self) -> bool:
        """Whether there is a live request, or an ending that update_from_output() has not told yet."""
        return bool(self.requests or self._ended)

    @property
    def num_running(self) -> int:
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_free_blocks(self) -> int:
        return self.cache.num_free_blocks

    def blocked_by(self, request: Request) -> BlockedBy | None:
        """Why a live request waits; None if it runs or has ended."""
        if request.row >= 0 or request.status.finished:
            return None
        return self._reasons.get(request.id, self._reason_of_the_rest)

    def waiting_by_reason(self) -> dict[BlockedBy, int]:
        counts: dict[BlockedBy, int] = {}
        looked_at = 0
        for request_id, reason in self._reasons.items():
            request = self.requests.get(request_id)
            if request is not None and request.row < 0:
                counts[reason] = counts.get(reason, 0) + 1
                looked_at += 1
        if len(self.waiting) > looked_at:
            rest = self._reason_of_the_rest
            counts[rest] = counts.get(rest, 0) + len(self.waiting) - looked_at
        return counts

    def view(self, request: Request) -> RequestView:
        """The present state of a request, live or ended, as plain data."""
        return view_of(request, self.batch, self.blocked_by(request))

    def check_invariants(self) -> None:
        """Raise AssertionError, with what is wrong, if the state contradicts itself. O(everything)."""
        from kvern.scheduler.invariants import check

        check(self)
