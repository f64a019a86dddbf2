"""What the scheduler knows, and the few ways in which a request changes hands.

Who owns what: `requests` has every live request. A waiting one is in `waiting` and holds nothing; a swapped one is in
`swapped` and holds host blocks; a running one has a row in `batch`, which holds its progress and its block tables.
`cache` counts the references. Every departure goes through preempt() or end() here, so that blocks are given back, and
told, exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from kvern.cache.encoder_cache import EncoderCacheManager
from kvern.cache.kv_cache_manager import KVCacheManager, TierMoves
from kvern.config import InvalidConfig, SchedulerConfig
from kvern.request import Request, RequestStatus
from kvern.scheduler import preemption
from kvern.scheduler.budget import SchedulingBudget
from kvern.scheduler.kept_prompts import KeptPrompts
from kvern.scheduler.policies import RequestInfo, Served, make_policy
from kvern.scheduler.policies.guard import GuardedPolicy
from kvern.scheduler.reservation import Reservation
from kvern.scheduler.running_batch import Rows, RunningBatch
from kvern.scheduler.transfers import Transfers
from kvern.scheduler.waiting_queue import WaitingQueue
from kvern.step import FinishedRequest

if TYPE_CHECKING:
    from kvern.cache.connectors import SchedulerConnector


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0  # proposed, and judged by the model
    accepted_tokens: int = 0  # of those, the model would have said the same
    prefix_queried_tokens: int = 0  # tokens of requests at their first admission
    prefix_hit_tokens: int = 0  # of those, found in the cache
    preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    recomputed_tokens: int = 0  # computed before a preemption and computed again after it
    pins_given_up: int = 0  # because a request could not run otherwise
    policy_errors: int = 0


@dataclass(slots=True)
class Notices:
    """What the next SchedulerOutput tells the executor beside the tokens to compute. Each is told once."""

    finished_ids: list[str] = field(default_factory=list)
    finished_rows: list[int] = field(default_factory=list)
    preempted_ids: list[str] = field(default_factory=list)
    preempted_rows: list[int] = field(default_factory=list)
    ignored_ids: list[str] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    placed: list[tuple[Rows, Rows]] = field(default_factory=list)  # (rows, places) of blocks new in their tables
    tiers: TierMoves | None = None
    entered: list[int] = field(default_factory=list)  # rows whose occupant the executor does not know


@dataclass(slots=True)
class PreemptionCosts:
    """Measured by whoever computes the steps, for preemption = auto. Seconds."""

    copy_block: float = 0.0  # one block between device and host
    compute_token: float = 0.0  # one prompt token


class SchedulerState:
    def __init__(self, config: SchedulerConfig, connector: SchedulerConnector | None = None) -> None:
        # Nothing here knows of ranks: a block is what all of them hold of it.
        config = structs.replace(config, block_size=config.tokens_per_block, decode_context_parallel_size=1)
        self.config = config
        self.policy = GuardedPolicy(make_policy(config.policy, config.policy_options))
        self.cache = KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            config.kv_groups,
            config.max_num_batched_tokens,
            config.host_blocks,
            config.disk_blocks,
            config.record_cache_events,
            config.eviction,
            (config.num_blocks - 1) // 4 if config.max_pinned_blocks is None else config.max_pinned_blocks,
        )
        if self.cache.recurrent and (config.num_speculative_tokens or connector is not None):
            what = "num_speculative_tokens" if config.num_speculative_tokens else "a connector"
            raise InvalidConfig(f"{what} cannot be used with a mamba group: its state cannot go back by a token")
        groups = len(config.kv_groups)
        self.batch = RunningBatch(config.max_num_seqs, config.max_model_len, config.block_size, groups)
        self.reservation = Reservation(self.batch, self.cache)
        self.encoder = EncoderCacheManager(config.encoder_budget, config.encoder_cache_size)
        self.waiting = WaitingQueue(self.rank)
        self.swapped = WaitingQueue(self.rank)
        self.transfers = Transfers(self, connector)
        self.budget = SchedulingBudget(config.max_num_batched_tokens, config.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.kept_prompts = KeptPrompts(self)
        self.siblings: dict[str, list[Request]] = {}  # live request -> those added as its forks
        self.loras: dict[str, int] = {}  # adapter -> rows that use it
        self.stats = SchedulerStats()
        self.notices = Notices()
        self.costs = PreemptionCosts()
        # Whether requests can have drafts or placeholders; without, a live request's tokens are below its limit.
        self.looks_ahead = config.async_scheduling or config.num_speculative_tokens > 0
        self.planning = False  # within schedule()
        self.ended: list[FinishedRequest] = []  # told in the next StepOutputs, then cleared
        self._next_serial = 0

    # ---- order

    def begin_step(self, now: float) -> None:
        self.planning = True
        self.budget.reset()
        self.cache.pins.expire(now)
        self.encoder.begin_step()
        if self.policy.begin_step(now):
            self.reorder()  # the last step was planned without the policy
        if self.transfers.under_way():
            self.transfers.begin_step(now)

    def end_step(self) -> None:
        self.planning = False
        moves = self.cache.end_step()
        if moves is not None:
            self.notices.swap_out += moves.to_host
            self.notices.swap_in += moves.from_host
            self.notices.tiers = moves

    def reorder(self) -> None:
        """Ask the policy for every rank again."""
        self.waiting.resort()
        self.swapped.resort()
        self.transfers.arrived.resort()
        self.batch.reorder([self.running_key(request) for request in self.batch.requests_in_order()])

    def set_policy(self, policy: GuardedPolicy) -> None:
        """Another policy from now on; no request is touched."""
        policy.now = self.policy.now
        self.policy = policy
        for request in self.requests.values():
            policy.on_arrival(request.info)
        self.reorder()

    def running_key(self, request: Request) -> tuple[tuple[float, ...], float, int]:
        """Place in the running order; unless the policy says otherwise, the last of the order gives way first."""
        return (self.rank(request), request.arrival_time, request.serial)

    def rank(self, request: Request) -> tuple[float, ...]:
        return self.policy.rank(request.info)

    # ---- transitions

    def add(self, request: Request) -> None:
        """A new live request: it waits, or ends at once if it can never fit."""
        request.serial = self._next_serial
        self._next_serial += 1
        request.info = RequestInfo(request, self)
        limit, max_tokens = self.config.max_model_len, request.sampling.max_tokens
        request.max_total_tokens = limit if max_tokens is None else min(limit, request.num_prompt_tokens + max_tokens)
        self.requests[request.id] = request
        request.group = request.serial
        if request.fork_of in self.requests:
            request.group = self.requests[request.fork_of].group
            self.siblings.setdefault(request.fork_of, []).append(request)
        self.policy.on_arrival(request.info)
        error = self.never_fits(request)
        if error is not None:
            self.end(request, RequestStatus.FINISHED_IGNORED, error=error)
        elif request.status is RequestStatus.WAITING:
            self.waiting.add(request)
        else:
            self.waiting.park(request)

    def enter(self, request: Request, tables: list[list[int]], num_computed: int, num_published: int) -> int:
        """Give a request a row with these tables, which hold the cache of its first num_computed tokens; their first
        num_published blocks are hittable."""
        request.status = RequestStatus.RUNNING
        key, stop_ids = self.running_key(request), self.stop_ids(request)
        self.kept_prompts.release(request)
        row = self.batch.insert(request, key, tables, num_computed, stop_ids)
        self.batch.num_published[row] = num_published
        self.reservation.entered(row)
        self.notices.entered.append(row)
        if request.lora is not None:
            self.loras[request.lora] = self.loras.get(request.lora, 0) + 1
        return row

    def preempt(self, request: Request) -> None:
        """Running -> swapped or waiting, in front of its rank. Tokens are kept; the blocks' content is kept on the
        host if the mode, and the room there, allow it: then running siblings that share blocks go with it."""
        preemption.preempt(self, request)

    def end(
        self, request: Request, status: RequestStatus, stop_reason: int | None = None, error: str | None = None
    ) -> None:
        """The one place where a request stops being live."""
        if request.row >= 0:
            self.notices.finished_rows.append(request.row)
        heirs = self._not_started(self.siblings.pop(request.id, []))
        self.kept_prompts.pass_on(request, status, heirs[0] if heirs else None)
        self.leave(request, ended=True)
        request.status, request.stop_reason, request.error = status, stop_reason, error
        del self.requests[request.id]
        self._pass_on_prompt(heirs)
        self.policy.on_finish(request.info)
        self.notices.finished_ids.append(request.id)
        if status is RequestStatus.FINISHED_IGNORED:
            self.notices.ignored_ids.append(request.id)
        self.ended.append(FinishedRequest(request, status, stop_reason, error))

    def _not_started(self, siblings: list[Request]) -> list[Request]:
        return [s for s in siblings if s.row < 0 and not s.resumed and self.requests.get(s.id) is s]

    def _pass_on_prompt(self, siblings: list[Request]) -> None:
        """Whose prompt they were to share has ended: those that have not started share that of the first of them."""
        if siblings:
            heir, *others = siblings
            heir.fork_of = None
            for sibling in others:
                sibling.fork_of = heir.id
            self.siblings[heir.id] = others

    def leave(self, request: Request, ended: bool = False) -> None:
        """Out of the batch or the queue, blocks given back; those of a request that has ended may still be sent."""
        self.cache.forget(request.id)  # a policy may have looked up anybody
        if request.row >= 0:
            num_computed = int(self.batch.num_computed[request.row])
            tables = self.batch.tables_of(request.row).copy()
            self.encoder.give_back(request.id, request.images)
            if self.notices.copies:  # what was to be copied for it must not land in blocks that are others' now
                mine = tables.ravel().tolist()
                self.notices.copies = [copy for copy in self.notices.copies if copy[1] not in mine]
            self._tell_nothing_more_of(request.row)
            self.reservation.leaves(request.row)
            self.batch.remove(request.row)
            if not ended or not self.transfers.hold_for_sending(request, tables, num_computed):
                self.cache.free(request, tables)
            if request.lora is not None:
                self.loras[request.lora] -= 1
                if not self.loras[request.lora]:
                    del self.loras[request.lora]
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request in self.swapped:
            self.swapped.remove(request)
            self.cache.swap.free(request.host_tables)
            request.host_tables = []
        elif request in self.transfers.arrived:
            self.transfers.arrived.remove(request)
        if request.tables is not None:
            self.cache.free(request, request.tables)
            request.tables = None

    def compute_again(self, request: Request, num_computed: int) -> None:
        """A running request has at most so many tokens in the cache, and nothing of what steps under way sample for it
        counts. The executor is told the row anew, since it may know tokens that are none."""
        row, batch = request.row, self.batch
        batch.num_computed[row] = min(int(batch.num_computed[row]), num_computed)
        batch.num_drafts[row] = batch.num_placeholders[row] = 0
        batch.epoch[row] = request.epoch = batch.new_epoch()
        if row not in self.notices.entered:
            self.notices.finished_rows.append(row)
            self.notices.entered.append(row)

    def forget_host_copy(self, request: Request) -> None:
        """A swapped request, and those who may share its host blocks, will be computed again instead of coming back; of
        others, nothing."""
        if request.status is not RequestStatus.SWAPPED:
            return
        for other in [other for other in self.swapped if other.group == request.group]:
            self.leave(other)
            other.status, other.num_computed_tokens = RequestStatus.PREEMPTED, 0
            self.waiting.add(other)

    def _tell_nothing_more_of(self, row: int) -> None:
        told = self.notices
        if row in told.entered:
            told.entered.remove(row)

    def fork(self, parent: Request, child: Request) -> None:
        """`child` goes on from where `parent` is, with its tokens; every block is shared until one of them writes to
        it. If the parent does not run, or no row is free, the child waits like a resumed request."""
        row = parent.row
        tokens = self.batch.tokens_of(row) if row >= 0 else parent.token_ids
        child.token_ids, child.num_prompt_tokens = tokens.copy(), parent.num_prompt_tokens
        child.block_hashes = list(parent.block_hashes)
        child.num_charged_tokens = parent.num_charged_tokens
        child.resumed = len(tokens) > parent.num_prompt_tokens
        self.add(child)
        child.group = parent.group
        if row < 0 or self.batch.full or child.status is not RequestStatus.WAITING:
            return
        # What steps under way bring the parent is not the child's: it computes its last known token itself.
        num_computed = min(int(self.batch.num_computed[row]), len(tokens) - 1)
        tables = self.batch.tables_of(row)[:, : -(-num_computed // self.config.block_size)]
        if self.cache.recurrent and num_computed < self.batch.num_computed[row]:
            return
        if not self.cache.holds_all(tables, num_computed):
            return
        self.waiting.remove(child)
        self.cache.share(tables)
        new_row = self.enter(child, tables.tolist(), num_computed, int(self.batch.num_published[row]))
        self.batch.shares_tail[[row, new_row]] = True
        self.batch.num_at_entry[new_row] = self.batch.num_at_entry[row]  # it decodes if its parent does

    def replace_last_token(self, request: Request, token: int) -> None:
        row, batch = request.row, self.batch
        last = int(batch.num_tokens[row] if row >= 0 else request.num_tokens) - 1
        del request.block_hashes[last // self.config.block_size :]  # it may have been looked up with the other token
        self.cache.forget(request.id)
        if row < 0:
            request.token_ids[last] = token
            return
        assert batch.num_computed[row] <= last and not batch.num_placeholders[row], f"{request.id}: computed already"
        batch.token_ids[row, last] = token
        batch.num_drafts[row] = 0
        if row not in self.notices.entered:
            self.notices.entered.append(row)  # the executor is told the row anew

    def account(self, rows: list[int]) -> None:
        """Tell the policy what this step gives these rows: tokens computed for the first time, each told once."""
        served = []
        for row, end in zip(rows, self.batch.num_computed[rows].tolist(), strict=True):
            request = self.batch.request_at(row)
            before = request.num_charged_tokens
            if end > before:
                request.num_charged_tokens = end
                prompt = max(0, min(end, request.num_prompt_tokens) - before)
                served.append(Served(request.info, prompt, end - before - prompt))
        self.policy.on_served(served)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Have the executor copy blocks (source, destination) before this step. A source that is itself the
        destination of such a copy is not there yet: then its own source is taken."""
        origin = {destination: source for source, destination in self.notices.copies}
        self.notices.copies += [(origin.get(source, source), destination) for source, destination in pairs]

    def give_up_a_pin(self) -> bool:
        """The last resort when nothing else can make room. False if no pin stands in the way."""
        given_up = self.cache.pins.give_way()
        self.stats.pins_given_up += given_up
        return given_up

    # ---- facts that more than one phase needs

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Token ids that end the request, EOS first."""
        if request.sampling.ignore_eos:
            return request.sampling.stop_token_ids
        return self.config.eos_token_ids + request.sampling.stop_token_ids

    def chunk_limit(self) -> int:
        """Most tokens of one request in this step, 0 = no such limit. Who is alone delays nobody."""
        return self.config.long_prefill_token_threshold if len(self.requests) > 1 else 0

    def whole(self, request: Request) -> bool:
        """Whether it has to be computed in one step. What was said before a preemption need not fit into one."""
        return not self.config.enable_chunked_prefill and not request.resumed

    def never_fits(self, request: Request) -> str | None:
        """Why a waiting request could never be admitted, or None."""
        config = self.config
        if request.num_prompt_tokens >= config.max_model_len:
            return (
                f"the prompt has {request.num_prompt_tokens} tokens, at most {config.max_model_len - 1} fit: "
                f"max_model_len is {config.max_model_len}, and one token is kept for the output"
            )
        if self.whole(request) and request.num_prompt_tokens > config.max_num_batched_tokens:
            return (
                f"the prompt has {request.num_prompt_tokens} tokens and chunked prefill is off: "
                f"at most max_num_batched_tokens = {config.max_num_batched_tokens} fit into a step"
            )
        error = self.encoder.never_fits(request.images, at_once=self.whole(request))
        if error is not None:
            return error
        if any(image.length > config.max_num_batched_tokens for image in request.images):
            return f"an image is longer than a step: max_num_batched_tokens is {config.max_num_batched_tokens}"
        if self.cache.most_held(request.num_tokens) > self.cache.num_usable_blocks:
            return self.pool_too_small(request.num_tokens)
        return None

    def pool_too_small(self, num_tokens: int) -> str:
        blocks, size = self.cache.num_usable_blocks, self.config.block_size
        return (
            f"the whole KV cache holds {blocks * size} tokens ({blocks} blocks of {size}); "
            f"a request with {num_tokens} tokens does not fit or cannot grow in it"
        )

    def publish(self, rows: Rows) -> None:
        """Make the blocks hittable that these rows fill in this step. Only final tokens count, never drafts."""
        if not self.config.enable_prefix_caching:
            return
        batch, size = self.batch, self.config.block_size
        final, published = np.minimum(batch.num_computed[rows], batch.num_tokens[rows]), batch.num_published[rows]
        fills = (final >= (published + 1) * size).nonzero()[0]
        if not len(fills):
            return
        rows, places = rows[fills], published[fills]
        if len(rows) > 1 and (final[fills] // size == places + 1).all():
            batch.num_published[rows] = places + 1
            requests = [batch.request_at(row) for row in rows.tolist()]
            self.cache.publish_next(requests, places, batch.token_ids, batch.block_table[:, rows, places], rows)
        else:
            for row in rows.tolist():
                self.publish_row(row)

    def publish_row(self, row: int) -> None:
        """The same for one row, however many blocks it fills."""
        batch, first = self.batch, int(self.batch.num_published[row])
        end = min(int(batch.num_computed[row]), int(batch.num_tokens[row])) // self.config.block_size
        if self.config.enable_prefix_caching and end > first:
            batch.num_published[row] = end
            blocks = batch.block_table[:, row, first:end]
            self.cache.publish(batch.request_at(row), batch.token_ids[row], blocks, first, row)
