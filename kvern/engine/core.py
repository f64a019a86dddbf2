"""The engine's loop. One step is three verbs: schedule, execute, update_from_output; all else here is bookkeeping.

With async scheduling a step is planned before the result of the one before it is known, and a thread computes them in
their order.

Whoever owns the loop (the engine process, LLM, a simulation) calls `add`, `abort` and `step` from one thread.
Failure: what concerns one request ends that request alone, inside the scheduler. What escapes from a step (an executor
that raises, a broken invariant, a scheduler that cannot move) leaves the step half done, and with it blocks that are
published but not computed; so the core refuses all further use, and its owner ends every live request.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvern.clock import Clock, MonotonicClock
from kvern.config import EngineConfig, InvalidConfig, ModelConfig
from kvern.engine.admin import Admin
from kvern.engine.beam_search import BeamSearches
from kvern.engine.messages import AddRequest, EngineDeadError, EngineStats, RequestUpdate, StepReport, WireLogprobs
from kvern.executor.ahead import StepThread
from kvern.executor.base import Executor
from kvern.request import BlockedBy, Request
from kvern.scheduler.scheduler import Scheduler
from kvern.step import ModelRunnerOutput, SchedulerOutput, StepOutputs

if TYPE_CHECKING:
    from kvern.engine.kv_events import KVEventPublisher

logger = logging.getLogger(__name__)

MAX_EMPTY_STEPS = 16  # in a row, with unfinished work: then the engine is stuck and says so
_IDLE_CHECK_SECONDS = 30.0  # the invariants are checked when idle, but not after every lone request
_DUMPED_REQUESTS = 20
_STATS_SECONDS = 0.05  # between reports of the engine's state while steps follow each other
_EXTERNAL = (BlockedBy.GRAMMAR, BlockedBy.REMOTE_KV, BlockedBy.PAUSED)  # what only somebody outside can end


class EngineCore:
    """Scheduler and executor, driven step by step.

    check_invariants: check the scheduler's whole state after each step and fail on the first fault.
    before_step: called with the scheduler before each step, to inject faults.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        clock: Clock | None = None,
        *,
        check_invariants: bool = False,
        before_step: Callable[[Scheduler], object] | None = None,
        event_publisher: KVEventPublisher | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.clock: Clock = clock or MonotonicClock()
        self.admin = Admin(scheduler, self.clock)
        self.beams = BeamSearches(scheduler)
        self.failure: str | None = None  # why this core is dead
        self._check_invariants = check_invariants
        self._before_step = before_step
        self._event_publisher = event_publisher
        self._thread = StepThread(executor) if scheduler.config.async_scheduling else None
        self._depth = 1 if self._thread is None else 2  # steps planned before the first of them is known
        self._planned: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()  # oldest first
        self._without_token: dict[str, Request] = {}  # live requests that have not got their first token yet
        self._empty_steps = 0
        self._last_step_seconds = 0.0
        self._last_idle_check = self.clock.now()
        self._last_stats = -math.inf

    def step(self) -> StepReport:
        """Advance every request that can be advanced. Raises EngineDeadError; the core is then of no further use."""
        self._require_alive()
        now = self.clock.now()
        try:
            self._plan(now)
            output, result = self._planned.popleft()
            outputs = self.scheduler.update_from_output(output, result(), now)
            self._watch_progress(output, outputs)
            outputs = self.beams.take_in(outputs)
            self.admin.after_step()
            if self._event_publisher is not None:
                self._event_publisher.publish(self.scheduler.take_cache_events(), now)
            if self._check_invariants:
                self.scheduler.check_invariants()
        except BaseException as exc:
            self.failure = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, Exception) and not isinstance(exc, EngineDeadError):
                logger.exception("the engine failed in a step\n%s", self.dump())
                raise EngineDeadError(f"the engine failed: {self.failure}") from exc
            raise
        self._last_step_seconds = self.clock.now() - now
        report = self._report(outputs)
        if not self.scheduler.has_work():
            self._check_when_idle()
        return report

    def _plan(self, now: float) -> None:
        """Plan a step; with async scheduling also the one after it, so that there is always one to compute. While beams
        live there is none: which of them go on depends on the result."""
        depth = 1 if self.beams.active else self._depth
        while not self._planned or (len(self._planned) < depth and self.scheduler.has_work()):
            if self._before_step is not None:
                self._before_step(self.scheduler)
            output = self.scheduler.schedule(now)
            self._planned.append((output, self._submit(output)))
            if output.empty:
                return  # nothing can go on before the results that are under way

    def _submit(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """What gives the step's result: computed in the meantime, or when asked."""
        if not output.has_work:
            return ModelRunnerOutput.nothing
        if self._thread is not None:
            return self._thread.submit(output)
        return partial(self.executor.execute, output)

    def add(self, add: AddRequest) -> None:
        """Queue a request. Raises InvalidRequest, for this one alone, if its id is live or its prompt is empty."""
        self._require_alive()
        request = Request(
            add.request_id,
            add.prompt_token_ids,
            add.sampling,
            arrival_time=add.arrival_time,
            priority=add.priority,
            tenant=add.tenant,
            cache_salt=add.cache_salt,
            fork_of=add.fork_of,
            ttft_target=add.ttft_target,
            tpot_target=add.tpot_target,
        )
        if request.sampling.use_beam_search:
            self.beams.add(request)
            return
        self.scheduler.add_request(request)
        self._without_token[request.id] = request

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; the next step reports them as finished. Idempotent, unknown ids are fine."""
        for request_id in request_ids:
            if not self.beams.abort(request_id):
                self.scheduler.abort(request_id)

    def abort_all(self) -> None:
        self.beams.abort_all()
        self.abort(list(self.scheduler.requests))

    def __contains__(self, request_id: str) -> bool:
        """Whether there is a live request with this id."""
        return request_id in self.scheduler.requests or request_id in self.beams

    def has_work(self) -> bool:
        """True while a step would do or report something."""
        under_way = bool(self._planned) or self.scheduler.has_work() or self.beams.has_work()
        return self.failure is None and under_way

    def use_idle_time(self) -> bool:
        """Called while there is no work: see Executor."""
        return self.failure is None and self.executor.use_idle_time()

    def stats(self) -> EngineStats:
        scheduler, totals = self.scheduler, self.scheduler.stats
        reasons = {reason.value: n for reason, n in scheduler.waiting_by_reason().items()}
        if self.beams.num_waiting:  # they are not the scheduler's yet
            rows = BlockedBy.MAX_NUM_SEQS.value
            reasons[rows] = reasons.get(rows, 0) + self.beams.num_waiting
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self.beams.num_waiting,
            waiting_by_reason=reasons,
            num_blocks=scheduler.config.num_blocks - 1,  # the null block is nobody's
            num_free_blocks=scheduler.num_free_blocks,
            num_pinned_blocks=scheduler.num_pinned_blocks,
            num_host_blocks=scheduler.config.host_blocks,
            num_free_host_blocks=scheduler.num_free_host_blocks,
            swapped_out_blocks=totals.swapped_out_blocks,
            swapped_in_blocks=totals.swapped_in_blocks,
            policy_errors=totals.policy_errors,
            policy_changes=self.admin.policy_changes,
            steps=totals.steps,
            scheduled_tokens=totals.scheduled_tokens,
            generated_tokens=totals.generated_tokens,
            drafted_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            prefix_queried_tokens=totals.prefix_queried_tokens,
            prefix_hit_tokens=totals.prefix_hit_tokens,
            preemptions=totals.preemptions,
            recomputed_tokens=totals.recomputed_tokens,
            last_step_seconds=self._last_step_seconds,
        )

    def dump(self) -> str:
        """The state in words, for the log of a failure; so it never raises, whatever is broken."""
        try:
            requests = list(self.scheduler.requests.values())
            lines = [f"state: {self.stats()}"]
            lines += [f"  {self.admin.describe(request)}" for request in requests[:_DUMPED_REQUESTS]]
            if len(requests) > _DUMPED_REQUESTS:
                lines.append(f"  ... and {len(requests) - _DUMPED_REQUESTS} more")
            return "\n".join(lines)
        except Exception as exc:
            return f"the state cannot be read: {exc!r}"

    def shutdown(self) -> None:
        """End what runs, and leave the cached prefixes on disk, if there is such a tier. Idempotent."""
        if self.failure is None and self.scheduler.config.disk_blocks:
            self.abort_all()
            while self._planned:
                self.step()
            self.scheduler.persist()
            self.step()
        self.failure = self.failure or "it was shut down"
        if self._event_publisher is not None:
            self._event_publisher.close()
        if self._thread is not None:
            self._thread.shutdown()
        self.executor.shutdown()

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineDeadError(f"the engine failed earlier: {self.failure}")

    def _watch_progress(self, output: SchedulerOutput, outputs: StepOutputs) -> None:
        """An empty step with unfinished work is a bug unless somebody outside is awaited: say so, then give up."""
        under_way = any(not planned.empty for planned, _ in self._planned)
        if not output.empty or outputs.finished or under_way or not self.scheduler.requests:
            self._empty_steps = 0
            return
        if any(reason in _EXTERNAL for reason in self.scheduler.waiting_by_reason()):
            return
        self._empty_steps += 1
        # One planned ahead may be empty because what it could hold came later.
        if self._empty_steps == self._depth and not output.preempted_req_ids:
            logger.error("a step scheduled nothing although work is unfinished\n%s", self.dump())
        if self._empty_steps >= MAX_EMPTY_STEPS:
            raise EngineDeadError(
                f"no progress in {self._empty_steps} steps with {len(self.scheduler.requests)} unfinished requests\n"
                + self.dump()
            )

    def _check_when_idle(self) -> None:
        now = self.clock.now()
        if now - self._last_idle_check < _IDLE_CHECK_SECONDS:
            return
        self._last_idle_check = now
        try:
            self.scheduler.check_invariants()
        except AssertionError:
            logger.exception("an invariant does not hold although the engine is idle")

    def _report(self, outputs: StepOutputs) -> StepReport:
        updates: dict[str, RequestUpdate] = {}
        for request_id, entries in outputs.logprobs.items():
            wire: list[WireLogprobs] = list(entries)
            _update_of(updates, request_id).logprobs = wire
        for request_id, (first, entries) in outputs.prompt_logprobs.items():
            update = _update_of(updates, request_id)
            update.prompt_logprobs, update.prompt_logprobs_start = list(entries), first
        if self._without_token:
            for request_id in outputs.request_ids:
                request = self._without_token.pop(request_id, None)
                if request is not None:
                    _tell_times(_update_of(updates, request_id), request)
        for ended in outputs.finished:
            self._without_token.pop(ended.request.id, None)
            update = _update_of(updates, ended.request.id)
            update.finish_reason = ended.status.finish_reason
            # The scheduler knows token ids only; stop strings are found where the text is.
            update.stop_reason = ended.stop_reason if isinstance(ended.stop_reason, int) else None
            update.error = ended.error
            _tell_times(update, ended.request)
        return StepReport(
            request_ids=outputs.request_ids,
            token_ids=[ids[:n] for ids, n in zip(outputs.token_ids.tolist(), outputs.count.tolist(), strict=True)],
            updates=updates,
            time=self.clock.now(),
            stats=self._stats_if_due(),
        )

    def _stats_if_due(self) -> EngineStats | None:
        """Not with every step: nobody reads them that often. With the last one before the engine is idle."""
        now = self.clock.now()
        working = self.has_work()
        if working and now - self._last_stats < _STATS_SECONDS:
            return None
        # The first step after a rest tells at once that there is work.
        self._last_stats = now if working else -math.inf
        return self.stats()


def _update_of(updates: dict[str, RequestUpdate], request_id: str) -> RequestUpdate:
    update = updates.get(request_id)
    if update is None:
        update = updates[request_id] = RequestUpdate()
    return update


def _tell_times(update: RequestUpdate, request: Request) -> None:
    update.first_scheduled_time = request.first_scheduled_time
    update.num_cached_tokens = request.num_cached_tokens
    update.num_preemptions = request.num_preemptions


def load_core(config: EngineConfig) -> tuple[EngineCore, ModelConfig]:
    """The engine `config` asks for, loaded. Raises InvalidConfig."""
    from kvern.executor.inline import load_executor

    executor, limits, model_config = load_executor(config)
    before_step = None
    if config.preempt_probability:
        from kvern.testing.faults import RandomPreemption

        before_step = RandomPreemption(config.preempt_probability, config.seed).before_step
    scheduler = Scheduler(limits, executor.scheduler_connector())
    scheduler.found_on_disk(executor.stored_blocks())
    if config.preemption == "auto":
        costs = executor.costs()
        if costs is not None:
            scheduler.set_preemption_costs(*costs)
            logger.info("preemption: %.1f us to copy a block, %.1f us to compute a token", *(1e6 * c for c in costs))
    core = EngineCore(
        executor,
        scheduler,
        check_invariants=config.check_invariants,
        before_step=before_step,
        event_publisher=_event_publisher(config),
    )
    return core, model_config


def _event_publisher(config: EngineConfig) -> KVEventPublisher | None:
    if config.kv_events is None:
        if config.kv_events_replay is not None:
            raise InvalidConfig("kv_events_replay needs kv_events, the address to publish at")
        return None
    from kvern.engine.kv_events import KVEventPublisher

    return KVEventPublisher(config.kv_events, config.kv_events_replay)
