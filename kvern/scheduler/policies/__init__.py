"""Scheduling policies, one small file each, and the interface to write another."""

from __future__ import annotations

from kvern.scheduler.policies.base import Policy, RequestInfo, Served
from kvern.scheduler.policies.deadline import Deadline
from kvern.scheduler.policies.fair import Fair
from kvern.scheduler.policies.fcfs import FCFS
from kvern.scheduler.policies.prefix import Prefix
from kvern.scheduler.policies.priority import Priority
from kvern.scheduler.policies.registry import POLICIES, make_policy
from kvern.scheduler.policies.shortest import Shortest

__all__ = [
    "FCFS",
    "POLICIES",
    "Deadline",
    "Fair",
    "Policy",
    "Prefix",
    "Priority",
    "RequestInfo",
    "Served",
    "Shortest",
    "make_policy",
]
