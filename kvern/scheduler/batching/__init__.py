"""How prompts and decodes share a step. Each is one function that runs the phases of a step in its own order."""

from __future__ import annotations

from kvern.scheduler.batching.mixed import Mixed
from kvern.scheduler.batching.phases import Batching, Phases
from kvern.scheduler.batching.prefill_first import PrefillFirst

__all__ = ["Batching", "Mixed", "Phases", "PrefillFirst", "make_batching"]


def make_batching(name: str, delay_factor: float) -> Batching:
    return PrefillFirst(delay_factor) if name == "prefill_first" else Mixed()
