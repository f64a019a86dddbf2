"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has tokens (prompt, output, drafts) and a count of those whose
keys and values are in the cache; each step hands out tokens so that the count catches up. Chunked prefill, cache hits,
resumption after a preemption, speculation and decode are that one rule.

Pure: no clock (`now` is an argument), no I/O, no randomness; the same calls give the same outputs. Order in schedule():

  1. running.py: running requests take tokens and blocks; if blocks are short, somebody is preempted
  2. state.publish: blocks that become full are made hittable
  3. admission.py, if nobody was preempted: swapped, then waiting requests are admitted if all of their tokens will fit
  4. the plan is written down as a SchedulerOutput; num_computed has already advanced

batching/ puts 1 to 3 into order: this one is `mixed`.

update_from_output() (results.py) appends what was sampled, takes back rejected drafts, and ends requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvern.cache.connectors import SchedulerConnector
from kvern.cache.events import CacheEvent
from kvern.cache.kv_cache_manager import TierMoves
from kvern.cache.pins import PinView
from kvern.config import SchedulerConfig
from kvern.request import BlockedBy, Request, RequestStatus
from kvern.sampling_params import InvalidRequest
from kvern.scheduler.admission import Admission
from kvern.scheduler.batching import Phases, make_batching
from kvern.scheduler.policies import make_policy
from kvern.scheduler.policies.guard import GuardedPolicy
from kvern.scheduler.results import take_in
from kvern.scheduler.running_batch import Rows
from kvern.scheduler.state import Notices, PreemptionCosts, SchedulerState, SchedulerStats
from kvern.scheduler.view import RequestView, view_of
from kvern.step import Int32, ModelRunnerOutput, NewBlocks, NewRequest, SchedulerOutput, StepOutputs

_NO_MOVES = TierMoves()


class Scheduler:
    """Continuous batching over a paged KV cache with prefix sharing. See kvern/step.py for what goes in and out."""

    def __init__(self, config: SchedulerConfig, connector: SchedulerConnector | None = None) -> None:
        self.config = config
        self.state = SchedulerState(config, connector)
        self.admission = Admission(self.state)
        self.phases = Phases(self.state, self.admission)
        self.batching = make_batching(config.batching, config.delay_factor)

    # ---- what goes in

    def add_request(self, request: Request) -> None:
        """Let a request wait for its turn. One that can never fit ends at once, FINISHED_IGNORED, and is told with
        the next step. Raises InvalidRequest if a live request has its id, or if its prompt is empty."""
        if request.id in self.state.requests:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        if not request.num_prompt_tokens:
            raise InvalidRequest("the prompt is empty, there is nothing to continue", "prompt")
        self.state.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; its blocks are free at once, and what a step under way samples for it is dropped.
        False if there is no such live request."""
        request = self.state.requests.get(request_id)
        if request is None:
            return False
        self.state.end(request, RequestStatus.FINISHED_ABORTED)
        return True

    def preempt(self, request_id: str) -> bool:
        """Make a running request wait again, its blocks given back. False if it does not run."""
        request = self.state.requests.get(request_id)
        if request is None or request.row < 0:
            return False
        self.state.preempt(request)
        return True

    def fork(self, parent_id: str, child: Request) -> None:
        """`child` goes on from where the live request `parent_id` is, sharing its blocks until one of them writes.
        Raises InvalidRequest if there is no such parent, or the child's id is in use."""
        parent = self.state.requests.get(parent_id)
        if parent is None:
            raise InvalidRequest(f"request {parent_id!r} is not live", "request_id")
        if child.id in self.state.requests:
            raise InvalidRequest(f"request id {child.id!r} is in use", "request_id")
        self.state.fork(parent, child)

    def replace_last_token(self, request_id: str, token: int) -> None:
        """The last token of a live request, which is sampled and not computed yet, is `token` instead; drafts after it
        are dropped. For who chooses over several requests. Not while a step is under way."""
        self.state.replace_last_token(self.state.requests[request_id], token)

    def grammar_ready(self, request_id: str) -> bool:
        """A request that waited for its grammar waits for its turn from now on. False if there is no such one."""
        request = self.state.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_GRAMMAR:
            return False
        request.status = RequestStatus.WAITING
        self.state.waiting.unpark(request)
        return True

    def set_policy(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Another policy from the next step on; running requests go on running. Raises InvalidConfig."""
        guard = GuardedPolicy(make_policy(name, options))
        guard.num_errors = self.state.policy.num_errors  # a total
        self.state.set_policy(guard)

    def set_preemption_costs(self, copy_block: float, compute_token: float) -> None:
        """Measured seconds to copy a block between device and host, and to compute a prompt token: what
        preemption=auto decides by. Part of the events in, like a request."""
        self.state.costs = PreemptionCosts(copy_block, compute_token)

    def found_on_disk(self, names: Sequence[str]) -> None:
        """Blocks that an earlier run left on disk, the longest unused first; called before the first step."""
        self.state.cache.moves.deleted += [bytes.fromhex(name) for name in self.state.cache.found_files(names)]

    def take_cache_events(self) -> list[CacheEvent]:
        """What happened to cached prefixes since the last call, if record_cache_events is set."""
        events = self.state.cache.events
        return [] if events is None else events.take()

    def persist(self) -> None:
        """Before the end: the next step writes to disk what can be hit and nobody uses."""
        self.state.cache.persist()

    # ---- pinned prefixes

    def pin(
        self,
        token_ids: Sequence[int],
        ttl: float,
        now: float,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> str:
        """Keep the full blocks of this prefix from eviction until now + ttl, those that are not cached yet from the
        moment they are. Returns the pin's id. Raises InvalidRequest, for instance if more than max_pinned_blocks would
        be pinned."""
        pins = self.state.cache.pins
        if not self.config.enable_prefix_caching:
            raise InvalidRequest("nothing can be pinned: enable_prefix_caching is off", "prompt")
        if len(token_ids) >= self.config.max_model_len:
            text = f"the prefix has {len(token_ids)} tokens, max_model_len is {self.config.max_model_len}"
            raise InvalidRequest(text, "prompt")
        pins.expire(now)
        pin_id = pins.add(token_ids, ttl, now, cache_salt, lora)
        pins.take_hold(self.admission.admissible_blocks())
        return pin_id

    def unpin(self, pin_id: str) -> bool:
        """The blocks can be evicted again. False if there is no such pin, or its time was over."""
        return self.state.cache.pins.remove(pin_id)

    def pins(self, now: float) -> list[PinView]:
        """What is pinned, the oldest first."""
        self.state.cache.pins.expire(now)
        return self.state.cache.pins.views()

    def _pins_bar_the_way(self) -> bool:
        """Nothing runs, and not because somebody has just been preempted or blocks are still on their way."""
        told, transfers = self.state.notices, self.state.transfers
        if told.preempted_rows or transfers.under_way():
            return False
        return BlockedBy.NO_FREE_BLOCKS in self.waiting_by_reason()

    # ---- one step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan a step. `now`: seconds on the caller's clock."""
        state, batch = self.state, self.state.batch
        state.begin_step(now)
        self.admission.begin_step()
        if len(state.cache.pins):
            state.cache.pins.take_hold(self.admission.admissible_blocks())
        running, first_new_epoch = batch.order, batch.next_epoch
        self.batching.plan(self.phases, now)
        while not len(batch) and len(state.cache.pins) and self._pins_bar_the_way() and state.give_up_a_pin():
            self.batching.plan(self.phases, now)
        state.end_step()
        num_new = state.budget.by_row[running]
        computes = num_new > 0
        if batch.order is not running:  # somebody came or left, and a row may be another's now
            computes &= batch.epoch[running] < first_new_epoch
        if np.count_nonzero(computes) < len(running):
            running, num_new = running[computes], num_new[computes]
        output = self._write_down(running, num_new, first_new_epoch)
        if state.policy.accounts:
            state.account(output.rows.tolist())
        state.stats.policy_errors = state.policy.num_errors
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepOutputs:
        """Take in the result of a planned step. Outputs are handed back in the order in which they were planned."""
        return take_in(self.state, output, result)

    # ---- the plan, written down

    def _write_down(self, rows: Rows, num_new: Int32, first_new_epoch: int) -> SchedulerOutput:
        """rows: those that were in the batch before and compute something; num_new: how much. Who was admitted in this
        step has first_new_epoch or a later one."""
        state, batch, config, told = self.state, self.state.batch, self.config, self.state.notices
        if told.entered:  # forks among them were in the batch before
            entered = np.array(told.entered, dtype=np.intp)
            added = entered[(batch.epoch[entered] >= first_new_epoch) & (state.budget.by_row[entered] > 0)]
            rows = np.concatenate([rows, added])
            num_new = state.budget.by_row[rows]
        after, known = batch.num_computed[rows], batch.num_tokens[rows]
        if state.looks_ahead:
            known += batch.num_placeholders[rows]
        tiers = told.tiers or _NO_MOVES
        output = SchedulerOutput(
            step_id=state.stats.steps,
            rows=rows.astype(np.int32),
            epochs=batch.epoch[rows],
            request_ids=batch.ids_of(rows),
            num_computed=after - num_new,
            num_new=num_new,
            samples=after >= known,
            total_num_scheduled_tokens=config.max_num_batched_tokens - state.budget.remaining,
            new_requests=[self._new_request(row) for row in told.entered],
            new_blocks=self._new_blocks() if told.placed else NewBlocks.none(),
            encoder_inputs=state.encoder.computed(),
            freed_encoder_ids=state.encoder.evicted(),
            blocks_to_copy=told.copies,
            blocks_to_swap_out=told.swap_out,
            blocks_to_swap_in=told.swap_in,
            blocks_to_disk=[(tier, block, h.hex()) for tier, block, h in tiers.to_disk],
            blocks_from_disk=[(h.hex(), block) for h, block in tiers.from_disk],
            deleted_from_disk=[h.hex() for h in tiers.deleted],
            finished_req_ids=told.finished_ids,
            finished_rows=told.finished_rows,
            preempted_req_ids=told.preempted_ids,
            preempted_rows=told.preempted_rows,
            ignored_req_ids=told.ignored_ids,
            connector_metadata=None if state.transfers.connector is None else state.transfers.connector.metadata(),
            num_lookahead_slots=config.num_speculative_tokens,
            running_queue_size=len(batch),
        )
        state.notices = Notices()
        state.transfers.untold = False
        if config.num_speculative_tokens:
            self._write_drafts(output, rows)
        if config.async_scheduling:
            sampling = rows[output.samples]
            batch.num_placeholders[sampling] += 1 + batch.num_drafts[sampling]
            batch.num_drafts[sampling] = 0
        state.stats.steps += 1
        state.stats.scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def _new_request(self, row: int) -> NewRequest:
        batch, request = self.state.batch, self.state.batch.request_at(row)
        return NewRequest(
            request_id=request.id,
            row=row,
            token_ids=batch.tokens_of(row).copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            tables=batch.tables_of(row).tolist(),
            num_computed_tokens=int(batch.num_computed[row] - self.state.budget.by_row[row]),
            lora=request.lora,
            images=request.images,
        )

    def _new_blocks(self) -> NewBlocks:
        """What this step put into tables, of rows that are still there and not told whole."""
        batch, told = self.state.batch, self.state.notices
        rows, places = (np.concatenate(parts) for parts in zip(*told.placed, strict=True))
        stayed = batch.epoch[rows] >= 0
        if told.entered:
            told_whole = np.zeros(self.config.max_num_seqs, dtype=np.bool_)
            told_whole[told.entered] = True
            stayed &= ~told_whole[rows]
        if np.count_nonzero(stayed) < len(rows):
            rows, places = rows[stayed], places[stayed]
        return NewBlocks(rows.astype(np.int32), places.astype(np.int32), batch.block_table[:, rows, places])

    def _write_drafts(self, output: SchedulerOutput, rows: Rows) -> None:
        """Drafts that found no room in the budget are dropped, the first ones are kept."""
        batch = self.state.batch
        for row in rows[batch.num_drafts[rows] > 0].tolist():
            known, end = int(batch.num_tokens[row]), int(batch.num_computed[row])
            batch.num_drafts[row] = max(0, end - known)
            if end > known:
                output.draft_tokens[row] = batch.token_ids[row, known:end].tolist()

    # ---- questions

    def has_work(self) -> bool:
        """Whether there is a live request, an ending that update_from_output() has not told yet, or blocks of an ended
        request that the executor has to send."""
        return bool(self.state.requests or self.state.ended or self.state.transfers.untold)

    @property
    def requests(self) -> dict[str, Request]:
        """Every live request, by id."""
        return self.state.requests

    @property
    def stats(self) -> SchedulerStats:
        return self.state.stats

    @property
    def policy(self) -> GuardedPolicy:
        """The policy in use, and how it fares."""
        return self.state.policy

    @property
    def num_running(self) -> int:
        return len(self.state.batch)

    @property
    def num_waiting(self) -> int:
        """All that have no row."""
        return len(self.state.requests) - len(self.state.batch)

    @property
    def num_free_blocks(self) -> int:
        return self.state.cache.num_free_blocks

    @property
    def num_pinned_blocks(self) -> int:
        """Different blocks that pinned prefixes hold."""
        return self.state.cache.pins.num_held

    @property
    def num_free_host_blocks(self) -> int:
        """Those that hold evicted prefixes included."""
        host = self.state.cache.host
        return 0 if host is None else host.pool.num_free

    def running(self) -> list[Request]:
        """Running requests, in running order."""
        return self.state.batch.requests_in_order()

    def waiting(self) -> list[Request]:
        """Swapped and waiting requests, in the order in which they will be tried, then the parked ones."""
        return [*self.state.transfers.arrived, *self.state.swapped, *self.state.waiting]

    def waiting_by_reason(self) -> dict[BlockedBy, int]:
        return self.admission.waiting_by_reason()

    def view(self, request: Request) -> RequestView:
        """The present state of a request, live or ended, as plain data."""
        return view_of(request, self.state.batch, self.admission.explain(request))

    def check_invariants(self) -> None:
        """Raise AssertionError, with what is wrong, if the state contradicts itself. O(everything)."""
        from kvern.scheduler.invariants import check

        check(self.state, self.admission)
