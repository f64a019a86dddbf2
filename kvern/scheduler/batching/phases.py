"""The phases of a step, for a batching to put into order."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvern.request import BlockedBy
from kvern.scheduler.admission import Admission
from kvern.scheduler.running import schedule_running
from kvern.scheduler.running_batch import Rows
from kvern.scheduler.state import SchedulerState


class Phases:
    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self.state = state
        self.admission = admission

    @property
    def running(self) -> Rows:
        return self.state.batch.order

    def prefilling(self, rows: Rows) -> np.ndarray:
        """Which of these rows are still computing tokens that they had when they entered the batch."""
        batch = self.state.batch
        return batch.num_computed[rows] < batch.num_at_entry[rows]

    def run(self, rows: Rows) -> bool:
        """Hand tokens to these running rows and publish what they fill. Returns whether somebody was preempted."""
        preempted = schedule_running(self.state, rows)
        self.state.publish(rows)
        return preempted

    def swap_in(self) -> bool:
        """Bring back those who hold blocks and no row: swapped requests, and those whose remote load has ended.
        Returns whether all are back."""
        return self.admission.start_arrived() and self.admission.swap_in()

    def admit(self, now: float) -> int:
        """Admit waiting requests; returns how many."""
        return self.admission.admit_waiting(now)

    def admit_urgent(self, now: float) -> int:
        """Somebody who holds blocks cannot come back; admit waiting requests that the policy puts above all of them,
        and nobody else. Returns how many."""
        if not self.state.policy.preempts:
            self.admit_nobody(BlockedBy.NO_FREE_BLOCKS)
            return 0
        queues = (self.state.transfers.arrived, self.state.swapped)
        return self.admission.admit_waiting(now, [queue.at(0) for queue in queues if queue.num_ready])

    def admit_nobody(self, reason: BlockedBy) -> None:
        self.admission.admit_nobody(reason)


class Batching(Protocol):
    def plan(self, phases: Phases, now: float) -> None:
        """Run the phases of one step."""
        ...
