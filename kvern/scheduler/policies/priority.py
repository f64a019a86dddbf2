"""Urgent requests first."""

from __future__ import annotations

from typing import Any

from kvern.scheduler.policies.base import Policy, RequestInfo


class Priority(Policy):
    """Lower `priority` first, then order of arrival. A more urgent request that lacks a row, blocks or an adapter slot
    takes them from the least urgent running ones. The token budget is not taken from anybody."""

    name = "priority"

    def rank(self, request: RequestInfo, now: float) -> Any:
        return request.priority

    def may_preempt(self, waiting: RequestInfo, running: RequestInfo, now: float) -> bool:
        return waiting.priority < running.priority
