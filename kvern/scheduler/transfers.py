"""Requests whose keys and values are on their way, and blocks that wait for a transfer to end.

    waiting --load begins--> loading --arrived--> arrived --row, budget--> running
                                |  aborted
                                v
                            (ended; its blocks stay held until the transfer reports)

A loading or arrived request holds its tables and no row. What it will still need is reserved against admissions, so
that many loads at once cannot wedge each other. Every hold has a lease: when it expires the transfer counts as failed,
and the blocks are free again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvern.cache.block_pool import NULL_BLOCK
from kvern.request import Request, RequestStatus
from kvern.scheduler.waiting_queue import WaitingQueue
from kvern.step import Int32, SchedulerOutput

if TYPE_CHECKING:
    from kvern.cache.connectors import SchedulerConnector
    from kvern.scheduler.state import SchedulerState


@dataclass(slots=True)
class Hold:
    """Blocks held for a transfer."""

    request: Request
    tables: Int32  # [groups, n]
    num_computed: int  # tokens that will be there when it has ended
    expires: float


class Transfers:
    def __init__(self, state: SchedulerState, connector: SchedulerConnector | None) -> None:
        self.state = state
        self.connector = connector
        self.untold = False  # whether the executor has to be told of something, be there a live request or not
        self.loading: dict[str, Hold] = {}
        self.sending: dict[str, Hold] = {}
        self.arrived = WaitingQueue(state.rank)

    def under_way(self) -> bool:
        """Whether some transfer has still to report."""
        return bool(self.loading or self.sending)

    def begin_step(self, now: float) -> None:
        """End what has taken longer than its lease."""
        for hold in [hold for hold in self.loading.values() if hold.expires <= now]:
            self.load_ended(hold.request.id, failed=list(range(hold.tables.shape[1])))
        for hold in [hold for hold in self.sending.values() if hold.expires <= now]:
            self.sent(hold.request.id)

    # ---- loads

    def begin_load(self, request: Request, tables: list[list[int]], num_computed: int) -> None:
        """A waiting request's blocks are being filled by somebody else; it is parked with them."""
        expires = self.state.policy.now + self.state.config.transfer_lease
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self.state.waiting.park(request)
        self.loading[request.id] = Hold(request, np.array(tables, dtype=np.int32), num_computed, expires)

    def load_ended(self, request_id: str, failed: list[int] | None = None) -> None:
        """The transfer has reported. `failed`: places in the table whose block did not come. Unknown ids are fine."""
        hold = self.loading.pop(request_id, None)
        if hold is None:
            return
        request = hold.request
        if self.state.requests.get(request_id) is not request:  # aborted meanwhile
            self.state.cache.free(hold.request, hold.tables)
            return
        self.state.waiting.remove(request)
        request.tables = hold.tables
        request.num_computed_tokens = hold.num_computed
        if failed and self.state.config.kv_load_failure == "fail":
            self.state.end(
                request, RequestStatus.FINISHED_ERROR, error="its remote keys and values could not be loaded"
            )
            return
        request.status = RequestStatus.WAITING
        if failed:
            request.num_computed_tokens = min(hold.num_computed, min(failed) * self.state.config.block_size)
            request.ask_connector = False
        if self.state.cache.holds_all(request.tables, request.num_computed_tokens):
            self.arrived.add(request)
        else:
            self._start_over(request)

    def _start_over(self, request: Request) -> None:
        self.state.cache.free(request, request.tables)
        request.tables = None
        request.num_computed_tokens = 0
        self.state.waiting.add(request)

    def reclaim(self) -> bool:
        """Take the blocks from the last arrived request, which then has to be loaded or computed again. False if
        there is none."""
        waiting = list(self.arrived)
        if not waiting:
            return False
        request = waiting[-1]
        self.arrived.remove(request)
        self._start_over(request)
        return True

    # ---- sends

    def hold_for_sending(self, request: Request, tables: Int32, num_computed: int) -> bool:
        """Called when a request ends. True: the connector keeps its blocks until sent() or the lease ends."""
        if self.connector is None or not self.connector.finished(request, tables.tolist(), num_computed):
            return False
        expires = self.state.policy.now + self.state.config.transfer_lease
        self.sending[request.id] = Hold(request, tables, num_computed, expires)
        self.untold = True
        return True

    def sent(self, request_id: str) -> None:
        """Unknown ids are fine."""
        hold = self.sending.pop(request_id, None)
        if hold is not None:
            self.state.cache.free(hold.request, hold.tables)

    # ---- accounts

    def reserved(self) -> int:
        """Blocks that loading and arrived requests will still take for the tokens they have."""
        if not self.loading and not len(self.arrived):
            return 0
        cache, total = self.state.cache, 0
        held = [(hold.request, hold.tables) for hold in self.loading.values()]
        held += [(request, request.tables) for request in self.arrived if request.tables is not None]
        for request, tables in held:
            total += max(cache.most_held(request.num_tokens) - int(np.count_nonzero(tables)), 0)
        return total

    def tables(self) -> list[Int32]:
        """Every table that is held here."""
        holds = [hold.tables for hold in (*self.loading.values(), *self.sending.values())]
        return holds + [request.tables for request in self.arrived if request.tables is not None]

    # ---- loads within a step

    def load_failed(self, output: SchedulerOutput, request_id: str, places: list[int]) -> None:
        """Blocks, at these places of the request's tables, that `output` said to load did not come."""
        for new in output.new_requests:
            if new.request_id == request_id:
                if request_id in self.state.requests:
                    self.state.requests[request_id].ask_connector = False
                self.blocks_lost(output, [table[place] for table in new.tables for place in places])

    def blocks_lost(self, output: SchedulerOutput, blocks: list[int]) -> None:
        """The content of blocks that `output` said to load did not come: everybody who reads them computes again from
        there on, and what they have sampled, in this step or in later ones under way, is void: they get another
        epoch. What was computed from them cannot be hit, whoever has left meanwhile."""
        state, batch = self.state, self.state.batch
        bad = [block for block in blocks if block != NULL_BLOCK]

        def first_lost(tables: Int32) -> int | None:
            lost = np.isin(tables, bad).any(axis=0)
            if not lost.any():
                return None
            state.cache.distrust(tables[:, int(lost.argmax()) :])
            return int(lost.argmax())

        for new in output.new_requests:
            request = state.requests.get(new.request_id)
            lost = first_lost(np.array(new.tables, dtype=np.int32)) is not None
            if lost and request is not None and request.row < 0:
                request.epoch = batch.new_epoch()
                state.forget_host_copy(request)
        for row in batch.order.tolist():
            first = first_lost(batch.tables_of(row))
            if first is not None:
                batch.num_published[row] = min(int(batch.num_published[row]), first)
                self._compute_again(batch.request_at(row), first * state.config.block_size)
        for hold in self.loading.values():
            first = first_lost(hold.tables)
            if first is not None:
                hold.num_computed = min(hold.num_computed, first * state.config.block_size)

    def _compute_again(self, request: Request, num_computed: int) -> None:
        tables = self.state.batch.tables_of(request.row)
        if self.state.cache.holds_all(tables, num_computed):
            self.state.compute_again(request, num_computed)
        else:  # some of what it would read has been given back: from the beginning, in other blocks
            self.state.compute_again(request, 0)
            self.state.preempt(request)
