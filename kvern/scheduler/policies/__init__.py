"""Scheduling policies, one small file each, and the interface to write another."""

from __future__ import annotations

from kvern.scheduler.policies.base import Policy, RequestInfo, Served
from kvern.scheduler.policies.registry import POLICIES, make_policy

__all__ = ["POLICIES", "Policy", "RequestInfo", "Served", "make_policy"]
