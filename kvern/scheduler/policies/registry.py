"""From a name to a policy: one of kvern's own, `module:Class`, or an entry point of another package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvern.config import InvalidConfig
from kvern.scheduler.policies.base import Policy
from kvern.scheduler.policies.deadline import Deadline
from kvern.scheduler.policies.fair import Fair
from kvern.scheduler.policies.fcfs import FCFS
from kvern.scheduler.policies.prefix import Prefix
from kvern.scheduler.policies.priority import Priority
from kvern.scheduler.policies.shortest import Shortest

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (FCFS, Priority, Fair, Deadline, Shortest, Prefix)}
ENTRY_POINT_GROUP = "kvern.policies"


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """A policy by name, with its options. Raises InvalidConfig that says what is wrong and what there is."""
    found = _find(name)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InvalidConfig(f"policy: {name} is not a subclass of kvern.scheduler.policies.Policy")
    if found.version != Policy.version:
        raise InvalidConfig(
            f"policy: {name} is written for interface version {found.version}, this is {Policy.version}"
        )
    try:
        return found(**dict(options or {}))
    except (TypeError, ValueError) as exc:
        raise InvalidConfig(f"policy_options of {name}: {exc}") from None


def _find(name: str) -> Any:
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name:
        return _load(name)
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return entry.load()
    raise InvalidConfig(f"policy must be one of {', '.join(POLICIES)}, or module:Class, got {name!r}")


def _load(name: str) -> Any:
    import importlib

    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise InvalidConfig(f"policy: cannot load {name}: {exc}") from None
