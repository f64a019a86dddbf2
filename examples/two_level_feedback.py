"""A scheduling policy from docs/policies.md: a two-level feedback queue."""

from __future__ import annotations

from typing import Any

from kvern.scheduler.policies import Policy, RequestInfo


class TwoLevelFeedback(Policy):
    """Requests that have had `quantum` output tokens go after those that have not."""

    name = "two-level-feedback"
    dynamic = True  # a request's level changes while it runs

    def __init__(self, quantum: int = 64) -> None:
        self.quantum = quantum

    def level(self, request: RequestInfo) -> int:
        return 0 if request.num_output_tokens < self.quantum else 1

    def rank(self, request: RequestInfo, now: float) -> Any:
        return self.level(request)

    def may_preempt(self, waiting: RequestInfo, running: RequestInfo, now: float) -> bool:
        return self.level(waiting) < self.level(running)
