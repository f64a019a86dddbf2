"""What the engine needs of whoever computes a step."""

from __future__ import annotations

from typing import Protocol

from kvern.step import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Computes steps. Inline in this process, in other processes, on other machines, or only in a model of time."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Apply `output` (see kvern.step for the order) and return what it gave. Called in order of step_id,
        for every output with `has_work`."""
        ...

    def shutdown(self) -> None:
        """Release what is held. Idempotent."""
        ...
