"""Urgent requests first."""

from __future__ import annotations

from typing import Any

from kvern.request import Request
from kvern.scheduler.policies.base import Policy


class Priority(Policy):
    """Lower `priority` first, then order of arrival. A more urgent request that lacks a row or blocks takes them from
    the least urgent running one."""

    name = "priority"

    def rank(self, request: Request) -> Any:
        return request.priority

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority
