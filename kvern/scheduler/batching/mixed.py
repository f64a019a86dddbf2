"""One budget for all: running requests first, what is left goes to prompts."""

from __future__ import annotations

from kvern.request import BlockedBy
from kvern.scheduler.batching.phases import Phases


class Mixed:
    """As vLLM V1 does it, and Sarathi-Serve (Agrawal et al., OSDI 2024) before it: decodes never wait for a prompt,
    prompts are computed in chunks beside them."""

    def plan(self, phases: Phases, now: float) -> None:
        if phases.run(phases.running):
            phases.admit_nobody(BlockedBy.NO_FREE_BLOCKS)
        elif phases.swap_in():
            phases.admit(now)
        else:
            phases.admit_urgent(now)
