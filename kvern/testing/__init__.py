"""Tools for people who write policies, schedulers or tests: a scheduler harness, a toy model, faults on purpose."""

from __future__ import annotations

from kvern.clock import VirtualClock
from kvern.testing.faults import FaultyExecutor, RandomPreemption
from kvern.testing.harness import SchedulerHarness
from kvern.testing.toy import HistoryHashExecutor, reference_tokens

__all__ = [
    "FaultyExecutor",
    "HistoryHashExecutor",
    "RandomPreemption",
    "SchedulerHarness",
    "VirtualClock",
    "reference_tokens",
]
