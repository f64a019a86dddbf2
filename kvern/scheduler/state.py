"""What the scheduler knows, and the few ways in which a request changes hands.

Who owns what: `requests` has every live request. A waiting one is in `waiting` and holds nothing. A running one has a
row in `batch`, which holds its progress and its block table; `cache` counts the references of the table's blocks.
Every departure goes through preempt() or end() here, so that blocks are given back, and told, exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvern.cache.kv_cache_manager import KVCacheManager
from kvern.config import SchedulerConfig
from kvern.request import Request, RequestStatus
from kvern.scheduler.budget import SchedulingBudget
from kvern.scheduler.policies import make_policy
from kvern.scheduler.running_batch import RunningBatch
from kvern.scheduler.waiting_queue import WaitingQueue
from kvern.step import FinishedRequest, Int32


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


@dataclass(slots=True)
class Notices:
    """What the next SchedulerOutput tells the executor about those who left. Each is told once."""

    finished_ids: list[str] = field(default_factory=list)
    finished_rows: list[int] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)
    preempted_rows: list[int] = field(default_factory=list)
    ignored_ids: list[str] = field(default_factory=list)


class SchedulerState:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = make_policy(config.policy)
        self.cache = KVCacheManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.batch = RunningBatch(config.max_num_seqs, config.max_model_len, config.block_size)
        self.waiting = WaitingQueue(self.policy.rank)
        self.budget = SchedulingBudget(config.max_num_batched_tokens, config.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self.notices = Notices()
        self.ended: list[FinishedRequest] = []  # told in the next StepOutputs, then cleared
        self._next_serial = 0

    # ---- transitions

    def add(self, request: Request) -> None:
        """A new live request: it waits, or ends at once if it can never fit."""
        request.serial = self._next_serial
        self._next_serial += 1
        limit, max_tokens = self.config.max_model_len, request.sampling.max_tokens
        request.max_total_tokens = limit if max_tokens is None else min(limit, request.num_prompt_tokens + max_tokens)
        self.requests[request.id] = request
        error = self.never_fits(request)
        if error is None:
            self.waiting.add(request)
        else:
            self.end(request, RequestStatus.FINISHED_IGNORED, error=error)

    def preempt(self, request: Request) -> None:
        """Running -> waiting, in front of its rank. Tokens are kept, blocks are not."""
        self.notices.preempted_rows.append(request.row)
        self.notices.preempted_ids.append(request.id)
        self.budget.give_back(request.row)
        self.cache.retract(request.row)
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.resumed = True
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.add(request)

    def end(
        self, request: Request, status: RequestStatus, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        """The one place where a request stops being live."""
        if request.row >= 0:
            self.notices.finished_rows.append(request.row)
        self._leave(request)
        request.status, request.stop_reason, request.error = status, stop_reason, error
        del self.requests[request.id]
        self.notices.finished_ids.append(request.id)
        if status is RequestStatus.FINISHED_IGNORED:
            self.notices.ignored_ids.append(request.id)
        self.ended.append(FinishedRequest(request, status, stop_reason, error))

    def _leave(self, request: Request) -> None:
        """Out of the batch or the queue, blocks given back."""
        if request.row >= 0:
            table = self.batch.table_of(request.row).tolist()
            self.batch.remove([request.row])
            self.cache.free(table)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.cache.forget(request.id)

    # ---- facts that more than one phase needs

    def running_key(self, request: Request) -> tuple[object, float, int]:
        """Place in the running order; the last of the order gives way first."""
        return (self.policy.rank(request), request.arrival_time, request.serial)

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Token ids that end the request, EOS first."""
        if request.sampling.ignore_eos:
            return request.sampling.stop_token_ids
        return self.config.eos_token_ids + request.sampling.stop_token_ids

    def chunk_limit(self) -> int:
        """Most tokens of one request in this step, 0 = no such limit. Who is alone delays nobody."""
        return self.config.long_prefill_token_threshold if len(self.requests) > 1 else 0

    def never_fits(self, request: Request) -> str | None:
        """Why a waiting request could never be admitted, or None."""
        if request.num_prompt_tokens >= self.config.max_model_len:
            return (
                f"the prompt has {request.num_prompt_tokens} tokens, at most {self.config.max_model_len - 1} fit: "
                f"max_model_len is {self.config.max_model_len}, and one token is kept for the output"
            )
        if self.cache.blocks_for(request.num_tokens) > self.cache.num_usable_blocks:
            return self.pool_too_small(request.num_tokens)
        return None

    def pool_too_small(self, num_tokens: int) -> str:
        blocks, size = self.cache.num_usable_blocks, self.config.block_size
        return (
            f"the whole KV cache holds {blocks * size} tokens ({blocks} blocks of {size}); "
            f"a request with {num_tokens} tokens does not fit or cannot grow in it"
        )

    def publish(self, rows: Int32) -> None:
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
