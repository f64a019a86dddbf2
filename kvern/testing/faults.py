"""Faults on purpose, for tests: forced preemption, failing and slow steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from kvern.executor.base import Executor
from kvern.scheduler.scheduler import Scheduler
from kvern.step import ModelRunnerOutput, SchedulerOutput


class RandomPreemption:
    """Before a step, with some probability, preempts one running request chosen at random. Seeded, so a run can be
    repeated. Only requests that have gained a token since their last preemption are chosen: forcing may cost time, but
    never all progress."""

    def __init__(self, probability: float, seed: int = 0) -> None:
        self.probability = probability
        self._random = random.Random(seed)
        self._tokens_then: dict[str, int] = {}

    def before_step(self, scheduler: Scheduler) -> str | None:
        """The id of the request that was preempted, if one was."""
        if not self.probability or self._random.random() >= self.probability:
            return None
        running = [scheduler.view(request) for request in scheduler.running()]
        ready = [view for view in running if view.num_tokens > self._tokens_then.get(view.id, -1)]
        if not ready:
            return None
        victim = self._random.choice(ready)
        self._tokens_then = {rid: n for rid, n in self._tokens_then.items() if rid in scheduler.requests}
        self._tokens_then[victim.id] = victim.num_tokens
        scheduler.preempt(victim.id)
        return victim.id


class FaultyExecutor:
    """An executor with mishaps: `delay` seconds in each step, an exception in step `fail_at`, rows that fail alone
    when `row_error(request id, step)` gives a message."""

    def __init__(
        self,
        inner: Executor,
        *,
        delay: float = 0.0,
        fail_at: int | None = None,
        row_error: Callable[[str, int], str | None] | None = None,
    ) -> None:
        self.inner, self.delay, self.fail_at, self.row_error = inner, delay, fail_at, row_error
        self.steps = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps += 1
        if self.fail_at == self.steps:
            raise RuntimeError(f"injected fault in step {self.steps}")
        if self.delay:
            time.sleep(self.delay)
        result = self.inner.execute(output)
        if self.row_error is not None:
            for i, (row, request_id) in enumerate(zip(output.rows.tolist(), output.request_ids, strict=True)):
                message = self.row_error(request_id, self.steps)
                if message is not None:
                    result.errors[row] = message
                    result.count[i] = 0
        return result

    def shutdown(self) -> None:
        self.inner.shutdown()
