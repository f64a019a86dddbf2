"""Scheduling policies, one small file each."""

from __future__ import annotations

from kvern.config import InvalidConfig
from kvern.scheduler.policies.base import Policy
from kvern.scheduler.policies.fcfs import FCFS
from kvern.scheduler.policies.priority import Priority

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (FCFS, Priority)}

__all__ = ["FCFS", "POLICIES", "Policy", "Priority", "make_policy"]


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises InvalidConfig naming those there are."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise InvalidConfig(f"policy must be one of {', '.join(POLICIES)}, got {name!r}") from None
