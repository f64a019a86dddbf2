"""What the engine needs of whoever computes a step."""

from __future__ import annotations

from typing import Protocol

from kvern.cache.connectors import SchedulerConnector
from kvern.step import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Computes steps. Inline in this process, in other processes, on other machines, or only in a model of time."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Apply `output` (see kvern.step for the order) and return what it gave. Called in order of step_id,
        for every output with `has_work`."""
        ...

    def use_idle_time(self) -> bool:
        """Called again and again while there is nothing to compute: do a little, of at most a few milliseconds, of
        what makes later steps faster. False if there is nothing to do until the next one."""
        ...

    def costs(self) -> tuple[float, float] | None:
        """Measured seconds to copy a block between device and host, and to compute a prompt token; None if there is
        no host to copy to. Called before the first step, if at all."""
        ...

    def stored_blocks(self) -> list[str]:
        """File names of the blocks that an earlier run left on disk, the longest unused first."""
        ...

    def scheduler_connector(self) -> SchedulerConnector | None:
        """The scheduler's half of the connector whose other half this executor has."""
        ...

    def shutdown(self) -> None:
        """Release what is held. Idempotent."""
        ...
