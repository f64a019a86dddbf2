"""A step planned before the last one is known: the same words, each of them once, whatever happens in between."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from typing import Any

import pytest

from kvern.config import EngineConfig
from kvern.engine.core import EngineCore, load_core
from kvern.engine.messages import AddRequest, EngineDeadError
from kvern.llm import LLM
from kvern.request import Request
from kvern.sampling_params import SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.testing.faults import FaultyExecutor
from kvern.testing.toy import HistoryHashExecutor, reference_tokens
from tests.runs import Said, make_core, requests_of_all_kinds, run

VOCAB = {"toy": 259, "llama": 101, "mistral": 101}
CONDITIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 10, "max_num_seqs": 4},
    "crowded": {"num_blocks": 22},
    "preempted": {"preempt": 0.5, "enable_prefix_caching": False},
    "preempted, cached": {"preempt": 0.5},
    "swapped": {"preempt": 0.4, "preemption": "swap", "host_blocks": 60},
    "prefill first": {"batching": "prefill_first", "num_blocks": 30, "policy": "priority"},
}


@functools.cache
def one_by_one(kind: str) -> dict[str, Said]:
    return run(make_core(kind), requests_of_all_kinds(VOCAB[kind]))


def greedy(name: str, prompt: list[int], max_tokens: int) -> AddRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0)


def ahead(kind: str = "toy", **options: Any) -> EngineCore:
    return make_core(kind, async_scheduling=True, **options)


@pytest.mark.parametrize(
    ("kind", "condition"), [*itertools.product(["toy", "llama"], CONDITIONS), ("mistral", "preempted")]
)
def test_the_same_words(kind: str, condition: str) -> None:
    """Tokens, logprobs, prompt logprobs and endings; B046: nothing that is under way is computed for ever again."""
    core = ahead(kind, **CONDITIONS[condition])
    assert run(core, requests_of_all_kinds(VOCAB[kind])) == one_by_one(kind)
    if "preempt" in condition or condition == "crowded":
        assert core.stats().preemptions > 0
    assert not core.has_work()


@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_any_time(seed: int) -> None:
    """B114: an aborted request ends once and has said a beginning of its text; the others say theirs."""
    rng, gone = random.Random(seed), set[str]()

    def mischief(core: EngineCore, step: int) -> None:
        live = [rid for rid in core.scheduler.requests if rid not in gone]
        if live and rng.random() < 0.15:
            gone.add(rng.choice(live))
            core.abort(list(gone))

    said = run(ahead(preempt=0.3, num_blocks=26), requests_of_all_kinds(259), mischief)
    assert gone
    for rid, want in one_by_one("toy").items():
        if rid in gone and said[rid].end == "abort":
            got = said[rid]
            assert got.tokens == want.tokens[: len(got.tokens)]
            assert got.logprobs == want.logprobs[: len(got.logprobs)]
        else:
            assert said[rid] == want


def test_the_last_word_of_a_request_that_was_preempted_meanwhile() -> None:
    """Its only token comes when it waits again, and ends it: the logprobs of token and prompt come along, once."""
    asked = greedy("a", [5, 6, 7, 8], 1)
    asked.sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    want = run(make_core("toy"), [asked])["a"]
    core, plans = ahead(max_num_seqs=1, policy="priority"), 0

    def something_urgent(scheduler: Scheduler) -> None:
        nonlocal plans
        plans += 1
        if plans == 2:
            scheduler.add_request(Request("urgent", [5, 6], SamplingParams(max_tokens=5, seed=1), priority=-1))

    core._before_step = something_urgent
    core.add(asked)
    report = core.step()
    assert core.stats().preemptions == 1 and core.scheduler.num_running == 1
    assert report.request_ids == ["a"] and report.token_ids == [want.tokens]
    update = report.updates["a"]
    assert (update.finish_reason, update.logprobs, update.prompt_logprobs) == ("length", *want[1:3])
    assert len(want.logprobs) == 1 and len(want.prompt_logprobs) == 3
    while core.has_work():
        assert "a" not in core.step().request_ids
    core.shutdown()


class Gate(HistoryHashExecutor):
    """Steps that wait for permission, to look at what happens meanwhile."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.permits = threading.Semaphore(0)
        self.begun: list[int] = []

    def execute(self, output: Any, forced: Any = None) -> Any:
        self.begun.append(output.step_id)
        assert self.permits.acquire(timeout=10)
        return super().execute(output, forced)


def test_the_next_step_is_planned_while_one_is_computed() -> None:
    core = ahead()
    gate = Gate(core.scheduler.config)
    core = EngineCore(gate, core.scheduler)
    core.add(greedy("a", [5, 6, 7], 3))
    stepping = threading.Thread(target=core.step)
    stepping.start()
    deadline = time.monotonic() + 10
    while core.scheduler.stats.steps < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gate.begun == [0] and core.scheduler.stats.steps == 2 and stepping.is_alive()
    for _ in range(10):
        gate.permits.release()
    stepping.join(10)
    tokens: list[int] = reference_tokens([5, 6, 7], 1)
    while core.has_work():
        for new in core.step().token_ids:
            tokens += new
    assert tokens == reference_tokens([5, 6, 7], 3)
    assert gate.begun == [0, 1, 2]  # the last token is never computed, so nothing is planned past it
    core.shutdown()


def test_a_step_that_fails_ends_the_core_and_the_steps_behind_it() -> None:
    core = ahead()
    executor = FaultyExecutor(HistoryHashExecutor(core.scheduler.config), fail_at=3)
    core = EngineCore(executor, core.scheduler)
    core.add(greedy("a", [5, 6, 7], 9))
    with pytest.raises(EngineDeadError, match="injected fault"):
        for _ in range(5):
            core.step()
    assert not core.has_work()
    core.shutdown()
    core.shutdown()
    assert not [t for t in threading.enumerate() if t.name.startswith("steps")]


def test_a_row_that_fails_alone_while_its_next_step_is_under_way() -> None:
    plain = ahead()
    executor = FaultyExecutor(
        HistoryHashExecutor(plain.scheduler.config),
        row_error=lambda rid, step: "no number" if rid == "bad" and step == 4 else None,
    )
    core = EngineCore(executor, Scheduler(plain.scheduler.config), check_invariants=True)
    said = run(core, [greedy(rid, [5, 6, 7], 12) for rid in ("good", "bad")])
    assert said["bad"].end == "error" and said["bad"].tokens == reference_tokens([5, 6, 7], 3)
    assert said["good"].tokens == reference_tokens([5, 6, 7], 12)


def test_waiting_for_what_is_under_way_is_no_standstill(caplog: pytest.LogCaptureFixture) -> None:
    """One token a request: every second plan is empty."""
    core = ahead(max_num_seqs=1)
    said = run(core, [greedy(f"r{i}", [5, 6, 7 + i], 1) for i in range(60)])
    assert all(entry.end == "length" and len(entry.tokens) == 1 for entry in said.values())
    assert not caplog.records


def test_the_option() -> None:
    core, _ = load_core(EngineConfig(model="toy:history-hash", num_blocks=50, async_scheduling="on"))
    assert core.scheduler.config.async_scheduling
    core.shutdown()
    prompts = ["to be or not", "a", "one two three"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, stop=("e",), logprobs=1),
        SamplingParams(seed=1, max_tokens=20, n=3),
        SamplingParams(seed=2, max_tokens=20, stop=("a", "b", "c"), min_tokens=3),
    ]
    outputs = []
    for mode in ("on", "off"):
        options = {"async_scheduling": mode, "preempt_probability": 0.3, "check_invariants": True}
        with LLM("toy:history-hash", num_blocks=50, block_size=4, max_model_len=100, **options) as llm:
            outputs.append([o.outputs for _ in range(2) for o in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]
