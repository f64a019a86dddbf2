"""A step is all prompts or all decodes, and prompts go first."""

from __future__ import annotations

from kvern.request import BlockedBy
from kvern.scheduler.batching.phases import Phases


class PrefillFirst:
    """As vLLM V0 does it (Kwon et al., SOSP 2023): best time to first token, at the cost of the decodes' rhythm.

    delay_factor: a prompt is held back until the longest-waiting one has waited delay_factor times as long as the last
    prompt step took, so that several prompts go together; not while nothing runs. 0: never held back.
    """

    def __init__(self, delay_factor: float) -> None:
        self.delay_factor = delay_factor
        self._last_step_time = 0.0
        self._last_step_was_prompt = False
        self._prompt_step_seconds = 0.0

    def plan(self, phases: Phases, now: float) -> None:
        may_start = self._may_start(phases, now)
        running = phases.running
        prompts = phases.prefilling(running)
        if not len(phases.state.swapped) and not len(phases.state.transfers.arrived):
            # Prompts that were begun go on before others begin.
            preempted = phases.run(running[prompts]) if prompts.any() else False
            if may_start and not preempted:
                phases.admit(now)
            else:
                phases.admit_nobody(BlockedBy.NO_FREE_BLOCKS if preempted else BlockedBy.POLICY)
            if phases.state.budget.by_row.any():
                self._last_step_was_prompt = True
                return
        elif phases.admit_urgent(now):
            self._last_step_was_prompt = True
            return
        if not phases.run(phases.running):
            phases.swap_in()

    def _may_start(self, phases: Phases, now: float) -> bool:
        if self._last_step_was_prompt:
            self._prompt_step_seconds = now - self._last_step_time
        self._last_step_time, self._last_step_was_prompt = now, False
        waiting = phases.state.waiting
        if not self.delay_factor or not len(phases.running) or not waiting.num_ready:
            return True
        return now - waiting.earliest_arrival() > self.delay_factor * self._prompt_step_seconds
