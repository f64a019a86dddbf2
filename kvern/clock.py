"""Time as an argument. The scheduler never asks for the time; whoever drives it passes `now`, in seconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes back. Only differences mean something."""
        ...


class MonotonicClock:
    """The machine's monotonic clock; equal in all processes of one machine."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is told to move: for tests, replay and simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock does not go back: advance({seconds})")
        self._now += seconds
