"""Faults on purpose, for tests: forced preemption, failing and slow steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from kvern.cache.connectors import Matched, SchedulerConnector
from kvern.executor.base import Executor
from kvern.request import Request
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


class FakeConnector:
    """Every request finds its first `matched_tokens` tokens remotely. The toy executor makes them up when it is told
    to, so what is loaded is right unless a test says that it failed."""

    def __init__(self, matched_tokens: int, load_async: bool) -> None:
        self.matched = matched_tokens
        self.load_async = load_async
        self.keep_finished = False  # whether blocks of ended requests stay until they are reported as sent
        self.undecided: list[str] = []  # ids of requests for which the answer is not known yet
        self._loads: list[dict[str, Any]] = []

    def matched_tokens(self, request: Request, num_computed: int) -> Matched | None:
        if request.id in self.undecided:
            return None
        return Matched(max(0, min(self.matched, request.num_prompt_tokens) - num_computed), self.load_async)

    def allocated(self, request: Request, tables: list[list[int]], start: int, end: int) -> None:
        tokens = request.token_ids[start:end].tolist()
        self._loads.append({"tables": [list(t) for t in tables], "start": start, "token_ids": tokens})

    def finished(self, request: Request, tables: list[list[int]], num_computed: int) -> bool:
        return self.keep_finished

    def metadata(self) -> list[dict[str, Any]] | None:
        loads, self._loads = self._loads, []
        return loads or None


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

    def use_idle_time(self) -> bool:
        return self.inner.use_idle_time()

    def costs(self) -> tuple[float, float] | None:
        return self.inner.costs()

    def stored_blocks(self) -> list[str]:
        return self.inner.stored_blocks()

    def scheduler_connector(self) -> SchedulerConnector | None:
        return self.inner.scheduler_connector()

    def shutdown(self) -> None:
        self.inner.shutdown()
