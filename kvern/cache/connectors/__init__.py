"""Moving keys and values between engines."""

from __future__ import annotations

from kvern.cache.connectors.base import Matched, SchedulerConnector, Transferred, WorkerConnector

__all__ = ["Matched", "SchedulerConnector", "Transferred", "WorkerConnector"]
