"""EngineCore with the toy model: the loop, in one process."""

from __future__ import annotations

import gc
import logging
import random
import resource
from typing import Any

import numpy as np
import pytest

from kvern.clock import VirtualClock
from kvern.config import EngineConfig, SchedulerConfig
from kvern.engine.client import InprocClient
from kvern.engine.core import MAX_EMPTY_STEPS, EngineCore, load_core
from kvern.engine.messages import AddRequest, EngineDeadError, StepReport
from kvern.request import Request
from kvern.sampling_params import InvalidRequest, SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.step import ModelRunnerOutput, SchedulerOutput
from kvern.testing.faults import FaultyExecutor, RandomPreemption
from kvern.testing.toy import HistoryHashExecutor, reference_tokens


def make_core(executor: Any = None, faults: Any = None, **limits: Any) -> EngineCore:
    config = SchedulerConfig(**{"num_blocks": 64, "block_size": 4, "max_model_len": 256, **limits})
    return EngineCore(
        executor or HistoryHashExecutor(config),
        Scheduler(config),
        VirtualClock(),
        check_invariants=True,
        before_step=faults,
    )


def add(name: str, prompt: list[int], max_tokens: int, **options: Any) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0, **options)


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [3 + (start + i) % 200 for i in range(length)]


class Ledger:
    """Collects the reports of a core."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.errors: dict[str, str | None] = {}

    def take(self, report: StepReport) -> None:
        for request_id, tokens in zip(report.request_ids, report.token_ids, strict=True):
            assert request_id not in self.ends, f"{request_id} got tokens after its end"
            self.tokens.setdefault(request_id, []).extend(tokens)
        for request_id, update in report.updates.items():
            if update.finish_reason is not None:
                self.ends.setdefault(request_id, []).append(update.finish_reason)
                self.errors[request_id] = update.error

    def run(self, core: EngineCore) -> None:
        while core.has_work():
            self.take(core.step())


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"num_blocks": 12, "max_num_seqs": 5},
        {"enable_prefix_caching": False, "max_num_seqs": 2},
    ],
    ids=["roomy", "chunked", "preempting", "uncached"],
)
@pytest.mark.parametrize("preempt", [0.0, 0.4])
def test_in_company_as_alone(limits: dict[str, Any], preempt: float) -> None:
    core = make_core(faults=RandomPreemption(preempt, 7).before_step if preempt else None, **limits)
    requests = [add(f"r{i}", prompt_of(3 + 3 * i, start=i % 2), 4 + i) for i in range(8)]
    ledger = Ledger()
    for request in requests:
        core.add(request)
        ledger.take(core.step())
    ledger.run(core)
    for request in requests:
        expected = reference_tokens(request.prompt_token_ids, request.sampling.max_tokens or 0)
        assert ledger.tokens[request.request_id] == expected
        assert ledger.ends[request.request_id] == ["length"]
    if preempt:
        assert core.stats().preemptions > 0


def test_times_and_counts_come_with_the_first_token_and_at_the_end() -> None:
    core = make_core()
    core.add(add("a", prompt_of(8), 3))
    reports = [core.step() for _ in range(3)]
    assert [set(report.updates) for report in reports] == [{"a"}, set(), {"a"}]
    assert reports[0].updates["a"].first_scheduled_time == 0.0
    core.add(add("b", prompt_of(8), 1))
    update = core.step().updates["b"]
    assert (update.num_cached_tokens, update.finish_reason) == (7, "length")


class Interloper:
    """An executor that does something in the middle of a step: after schedule(), before update_from_output()."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.inner = HistoryHashExecutor(config)
        self.interlude: Any = None

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self.interlude is not None:
            self.interlude()
        return self.inner.execute(output)

    def shutdown(self) -> None:
        self.inner.shutdown()


@pytest.mark.parametrize(
    "phase", ["unscheduled", "waiting", "prefill", "decode", "mid_step", "last_step", "finished", "unknown"]
)
def test_abort_in_each_phase(phase: str) -> None:
    """B114: exactly one end for the aborted, and nothing for the neighbour."""
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=256, max_num_batched_tokens=8, max_num_seqs=2)
    executor = Interloper(config)
    core = EngineCore(executor, Scheduler(config), check_invariants=True)
    ledger = Ledger()
    core.add(add("neighbour", prompt_of(6), 30))
    if phase == "waiting":
        core.add(add("another", prompt_of(6), 30))
    ledger.take(core.step())
    core.add(add("victim", prompt_of(20, start=50), 5))
    steps_before = {"unscheduled": 0, "waiting": 1, "prefill": 2, "decode": 5, "mid_step": 5, "last_step": 6}
    for _ in range(steps_before.get(phase, 9)):
        ledger.take(core.step())
    if phase in ("mid_step", "last_step"):
        executor.interlude = lambda: core.abort(["victim"])
    else:
        core.abort(["victim"] if phase != "unknown" else ["nobody"])
        core.abort(["victim"] if phase != "unknown" else ["nobody"])
    ledger.run(core)
    assert ledger.ends["victim"] == (["length"] if phase in ("finished", "unknown") else ["abort"])
    assert ledger.tokens["neighbour"] == reference_tokens(prompt_of(6), 30)
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert not core._without_token


def test_a_second_request_with_a_live_id_is_refused_alone() -> None:
    """B107."""
    core = make_core()
    core.add(add("a", prompt_of(5), 6))
    core.step()
    with pytest.raises(InvalidRequest, match="'a'"):
        core.add(add("a", prompt_of(9), 2))
    ledger = Ledger()
    ledger.run(core)
    assert ledger.ends == {"a": ["length"]}


def test_what_can_never_fit_ends_with_an_error_and_blocks_nobody() -> None:
    core = make_core(num_blocks=4)
    core.add(add("big", prompt_of(40), 2))
    core.add(add("small", prompt_of(4), 2))
    ledger = Ledger()
    ledger.run(core)
    assert ledger.ends == {"big": ["error"], "small": ["length"]}
    assert ledger.errors["big"] and "12" in ledger.errors["big"]


def test_a_row_that_fails_ends_alone() -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=256)

    def error(request_id: str, step: int) -> str | None:
        return "NaN in the logits" if request_id == "bad" and step == 3 else None

    core = make_core(FaultyExecutor(HistoryHashExecutor(config), row_error=error))
    for name in ("good", "bad", "fine"):
        core.add(add(name, prompt_of(5), 6))
    ledger = Ledger()
    ledger.run(core)
    assert ledger.ends == {"good": ["length"], "bad": ["error"], "fine": ["length"]}
    assert ledger.errors["bad"] == "NaN in the logits"
    assert ledger.tokens["good"] == reference_tokens(prompt_of(5), 6)


def test_an_executor_that_raises_ends_the_core(caplog: pytest.LogCaptureFixture) -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=256)
    core = make_core(FaultyExecutor(HistoryHashExecutor(config), fail_at=2))
    core.add(add("a", prompt_of(5), 6))
    core.step()
    with pytest.raises(EngineDeadError, match="injected fault in step 2"):
        core.step()
    assert "'request_id': 'a'" in caplog.text  # the dump says who was there
    assert not core.has_work()
    for use in (core.step, lambda: core.add(add("b", prompt_of(5), 6))):
        with pytest.raises(EngineDeadError, match="earlier"):
            use()


def test_a_scheduler_that_cannot_move_is_reported_and_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B007."""
    core = make_core()
    nothing = np.zeros(0, dtype=np.int32)
    empty = SchedulerOutput(0, nothing, nothing.astype(np.int64), [], nothing, nothing, nothing.astype(bool), 0)
    monkeypatch.setattr(core.scheduler, "schedule", lambda now: empty)
    core.add(add("stuck", prompt_of(5), 6))
    steps = 0
    with pytest.raises(EngineDeadError, match=r"no progress in .*\n.*\n.*'request_id': 'stuck'.*'blocked_by': '"):
        for _ in range(1000):
            steps += 1
            core.step()
    assert steps == MAX_EMPTY_STEPS
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1


def broken() -> None:
    raise AssertionError("block 5 is in two tables and has one reference")


def test_a_broken_invariant_ends_the_core_when_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    core.add(add("a", prompt_of(5), 6))
    core.step()
    monkeypatch.setattr(core.scheduler, "check_invariants", broken)
    with pytest.raises(EngineDeadError, match="AssertionError: block 5"):
        core.step()


def test_a_broken_invariant_is_reported_when_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=256)
    clock = VirtualClock()
    core = EngineCore(HistoryHashExecutor(config), Scheduler(config), clock)
    core.add(add("a", prompt_of(5), 1))
    monkeypatch.setattr(core.scheduler, "check_invariants", broken)
    clock.advance(60)
    core.step()
    assert "although the engine is idle" in caplog.text and "block 5" in caplog.text


def test_arrivals_beyond_capacity_drain_without_empty_steps() -> None:
    """B007: 200 arrivals on a pool of 32 blocks; no two empty steps in a row, everybody finishes."""
    rng = random.Random(3)
    core = make_core(num_blocks=33, max_num_batched_tokens=32, max_num_seqs=12)
    core._check_invariants = False  # after every step it is slow; once at the end is enough here
    requests = [add(f"r{i}", prompt_of(rng.randint(1, 40), i), rng.randint(1, 24)) for i in range(200)]
    ledger = Ledger()
    pending = list(requests)
    while pending or core.has_work():
        for _ in range(rng.randint(0, 2)):
            if pending:
                core.add(pending.pop())
        if core.has_work():
            ledger.take(core.step())
            assert core._empty_steps <= 1
    core.scheduler.check_invariants()
    assert {name: ends for name, ends in ledger.ends.items() if ends != ["length"]} == {}
    assert len(ledger.ends) == 200


def _one_token_requests(count: int) -> int:
    """Serve `count` one-token requests; by how many bytes the process has grown since the first fifth of them."""
    client = InprocClient(EngineConfig(model="toy:history-hash", num_blocks=300, max_num_seqs=64))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, stop=("\x00",))
    base = 0
    for start in range(0, count, 50):
        for i in range(start, start + 50):
            children = client.input_processor.process(f"r{i}", [3 + i % 250, 3 + i // 250 % 250, 7], sampling)
            client.add(f"r{i}", children)
        while client.has_unfinished():
            client.step()
        if start <= count // 5:
            base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024
    del children
    gc.collect()
    assert sum(isinstance(found, Request) for found in gc.get_objects()) == 0
    assert not client.core._without_token and not client.core.scheduler.requests and len(client._output) == 0
    return grown


def test_nothing_is_kept_of_finished_requests() -> None:
    """B123."""
    _one_token_requests(1000)


@pytest.mark.slow
def test_twenty_thousand_requests_do_not_grow_the_process() -> None:
    """B123."""
    assert _one_token_requests(20_000) < 20 * 2**20


def test_load_core_takes_the_options() -> None:
    core, _ = load_core(
        EngineConfig(model="toy:history-hash", num_blocks=300, check_invariants=True, preempt_probability=0.5)
    )
    core.add(add("a", prompt_of(40), 40))
    ledger = Ledger()
    ledger.run(core)
    assert ledger.tokens["a"] == reference_tokens(prompt_of(40), 40)
    assert core.stats().preemptions > 0


def test_statistics_come_with_the_first_step_after_a_rest_and_with_the_last() -> None:
    """However little time has passed: who asks must not be told that a busy engine rests."""
    core = make_core()
    for turn in range(2):
        core.add(add(f"r{turn}", prompt_of(5), max_tokens=4))
        reports = []
        while core.has_work():
            reports.append(core.step())
        first, *between, last = reports
        assert first.stats is not None and first.stats.num_running == 1
        assert last.stats is not None and last.stats.num_running == 0
        assert between and all(report.stats is None for report in between)
