"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has tokens (prompt, output, drafts) and a count of those whose
keys and values are in the cache; each step hands out tokens so that the count catches up. Chunked prefill, cache hits,
resumption after a preemption, speculation and decode are that one rule.

Pure: no clock (`now` is an argument), no I/O, no randomness; the same calls give the same outputs. Order in schedule():

  1. running.py: running requests take tokens and blocks; who lacks a block has the last in order preempted
  2. state.publish: blocks that become full are made hittable
  3. admission.py, if nobody was preempted: waiting requests are admitted as far as all of their tokens will fit
  4. the plan is written down as a SchedulerOutput; num_computed has already advanced

update_from_output() (results.py) appends what was sampled, takes back rejected drafts, and ends requests.
"""

from __future__ import annotations

import numpy as np

from kvern.config import SchedulerConfig
from kvern.request import BlockedBy, Request, RequestStatus
from kvern.sampling_params import InvalidRequest
from kvern.scheduler.admission import Admission
from kvern.scheduler.results import take_in
from kvern.scheduler.running import schedule_running
from kvern.scheduler.state import Notices, SchedulerState, SchedulerStats
from kvern.scheduler.view import RequestView, view_of
from kvern.step import Int32, ModelRunnerOutput, NewBlocks, NewRequest, SchedulerOutput, StepOutputs


class Scheduler:
    """Continuous batching over a paged KV cache with prefix sharing. See kvern/step.py for what goes in and out."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.state = SchedulerState(config)
        self.admission = Admission(self.state)

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

    # ---- one step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan a step. `now`: seconds on the caller's clock."""
        state, batch = self.state, self.state.batch
        state.budget.reset()
        running = batch.order
        epochs, blocks_before = batch.epoch[running], batch.num_blocks[running]
        preempted = schedule_running(state)
        state.publish(running)
        if preempted:
            new_requests, copies = self.admission.admit_nobody(BlockedBy.NO_FREE_BLOCKS)
        else:
            new_requests, copies = self.admission.admit_waiting(now)
        state.cache.end_step()
        stayed = (state.budget.by_row[running] > 0) & (batch.epoch[running] == epochs)
        return self._write_down(running[stayed], blocks_before[stayed], new_requests, copies)

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepOutputs:
        """Take in the result of a planned step. Outputs are handed back in the order in which they were planned."""
        return take_in(self.state, output, result)

    # ---- the plan, written down

    def _write_down(
        self, kept: Int32, blocks_before: Int32, new_requests: list[NewRequest], copies: list[tuple[int, int]]
    ) -> SchedulerOutput:
        """`kept`: rows that were in the batch before and compute something, with the length their tables had."""
        state, batch, config, told = self.state, self.state.batch, self.config, self.state.notices
        rows = kept
        if new_requests:
            rows = np.concatenate([kept, np.array([new.row for new in new_requests], dtype=np.int32)])
        num_new = state.budget.by_row[rows]
        after = batch.num_computed[rows]
        output = SchedulerOutput(
            step_id=state.stats.steps,
            rows=rows,
            epochs=batch.epoch[rows],
            request_ids=batch.ids[rows].tolist(),
            num_computed=after - num_new,
            num_new=num_new,
            samples=after >= batch.num_tokens[rows] + batch.num_placeholders[rows],
            total_num_scheduled_tokens=config.max_num_batched_tokens - state.budget.remaining,
            new_requests=new_requests,
            new_blocks=self._new_blocks(kept, blocks_before),
            blocks_to_copy=copies,
            finished_req_ids=told.finished_ids,
            finished_rows=told.finished_rows,
            preempted_req_ids=told.preempted_ids,
            preempted_rows=told.preempted_rows,
            ignored_req_ids=told.ignored_ids,
            num_lookahead_slots=config.num_speculative_tokens,
            running_queue_size=len(batch),
        )
        state.notices = Notices()
        if config.num_speculative_tokens:
            self._write_drafts(output)
        if config.async_scheduling:
            sampling = rows[output.samples]
            batch.num_placeholders[sampling] += 1 + batch.num_drafts[sampling]
            batch.num_drafts[sampling] = 0
        state.stats.steps += 1
        state.stats.scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def _new_blocks(self, rows: Int32, before: Int32) -> NewBlocks:
        grown = self.state.batch.num_blocks[rows] - before
        if not grown.any():
            return NewBlocks.none()
        owners = np.repeat(rows, grown)
        first = np.repeat(np.cumsum(grown) - grown, grown)
        index = np.repeat(before, grown) + np.arange(len(owners), dtype=np.int32) - first
        return NewBlocks(owners, index, self.state.batch.block_table[owners, index])

    def _write_drafts(self, output: SchedulerOutput) -> None:
        """Drafts that found no room in the budget are dropped, the first ones are kept."""
        batch, rows = self.state.batch, output.rows
        for row in rows[batch.num_drafts[rows] > 0].tolist():
            known, end = int(batch.num_tokens[row]), int(batch.num_computed[row])
            batch.num_drafts[row] = max(0, end - known)
            if end > known:
                output.draft_tokens[row] = batch.token_ids[row, known:end].tolist()

    # ---- questions

    def has_work(self) -> bool:
        """Whether there is a live request, or an ending that update_from_output() has not told yet."""
        return bool(self.state.requests or self.state.ended)

    @property
    def requests(self) -> dict[str, Request]:
        """Every live request, by id."""
        return self.state.requests

    @property
    def stats(self) -> SchedulerStats:
        return self.state.stats

    @property
    def num_running(self) -> int:
        return len(self.state.batch)

    @property
    def num_waiting(self) -> int:
        return len(self.state.waiting)

    @property
    def num_free_blocks(self) -> int:
        return self.state.cache.num_free_blocks

    def running(self) -> list[Request]:
        """Running requests, in running order."""
        return self.state.batch.requests_in_order()

    def waiting(self) -> list[Request]:
        """Waiting requests, in the order in which they will be tried."""
        return list(self.state.waiting)

    def waiting_by_reason(self) -> dict[BlockedBy, int]:
        return self.admission.waiting_by_reason()

    def view(self, request: Request) -> RequestView:
        """The present state of a request, live or ended, as plain data."""
        return view_of(request, self.state.batch, self.admission.blocked_by(request))

    def check_invariants(self) -> None:
        """Raise AssertionError, with what is wrong, if the state contradicts itself. O(everything)."""
        from kvern.scheduler.invariants import check

        check(self.state, self.admission)
