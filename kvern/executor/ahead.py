"""Steps computed in a thread of their own, while the engine's thread takes in the last result and plans the next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvern.executor.base import Executor
from kvern.step import ModelRunnerOutput, SchedulerOutput


class StepThread:
    """One thread, so steps are computed in the order in which they are submitted. Nobody else may call `execute` of
    its executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    def submit(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Returns at once. What is returned waits for the result, and raises what `execute` raised."""
        return self._thread.submit(self._executor.execute, output).result

    def shutdown(self) -> None:
        """Let go of steps that have not begun, wait for the one that has. Idempotent."""
        self._thread.shutdown(cancel_futures=True)
