"""First come, first served."""

from __future__ import annotations

from kvern.scheduler.policies.base import Policy


class FCFS(Policy):
    """In order of arrival. The newest running request gives way when memory is short."""

    name = "fcfs"
