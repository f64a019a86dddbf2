"""Any order of events: hypothesis drives the scheduler, with its twin and the toy model's oracle beside it."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from workloads import Arrival, Play, Workload, said_after

STEM = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33]
MOST_IN_FLIGHT = 4


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps planned ahead, results taken in late, aborts and preemptions at any moment."""

    play: Play

    @initialize(
        pool=st.tuples(st.sampled_from([2, 4]), st.integers(1, 10)),
        rows=st.integers(1, 4),
        budget=st.sampled_from([1, 3, 8, 64]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        mode=st.sampled_from(["plain", "ahead", "drafts"]),
        threshold=st.sampled_from([0, 3]),
        bypass=st.integers(0, 2),
        watermark=st.sampled_from([0.0, 0.25]),
    )
    def start(
        self,
        pool: tuple[int, int],
        rows: int,
        budget: int,
        policy: str,
        caching: bool,
        mode: str,
        threshold: int,
        bypass: int,
        watermark: float,
    ) -> None:
        config: dict[str, Any] = {
            "block_size": pool[0],
            "num_blocks": 1 + pool[1],
            "max_num_seqs": rows,
            "max_num_batched_tokens": budget,
            "max_model_len": 40,
            "policy": policy,
            "enable_prefix_caching": caching,
            "async_scheduling": mode == "ahead",
            "num_speculative_tokens": 3 if mode == "drafts" else 0,
            "long_prefill_token_threshold": threshold,
            "max_bypass": bypass,
            "watermark": watermark,
            "eos_token_id": 40,
        }
        self.play = Play(Workload(config, [], draft_probability=0.7 if mode == "drafts" else 0.0), random.Random(0))
        self.num_added = 0

    @rule(
        shared=st.integers(0, len(STEM)),
        own=st.lists(st.integers(100, 103), max_size=5),
        turn=st.integers(0, 4),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        stop=st.booleans(),
        delay=st.sampled_from([0.0, 3.0]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        turn: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        stop: bool,
        delay: float,
    ) -> None:
        """`turn`: so many tokens of what the toy model says after the shared part, as in a conversation."""
        prompt = STEM[:shared]
        if prompt and turn:
            prompt = prompt + said_after(tuple(prompt), turn)
        prompt = prompt + own or [7]
        stop_ids = (said_after(tuple(prompt), 3)[2],) if stop else ()
        rid, step = f"r{self.num_added}", self.play.num_steps
        self.play.add(Arrival(step, rid, prompt, max_tokens, priority, salt, stop_ids, not stop, delay))
        self.num_added += 1

    @precondition(lambda self: len(self.play.flight) < MOST_IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        self.play.schedule()

    @precondition(lambda self: self.play.flight)
    @rule()
    def update(self) -> None:
        self.play.update()

    @rule(steps=st.integers(1, 5))
    def several_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.play.schedule()
            self.play.update()

    @precondition(lambda self: self.play.twin.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.play.twin.live)))
        self.play.abort(rid)
        self.play.abort(rid)  # idempotent

    @precondition(lambda self: self.play.preemptible())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.play.preempt(data.draw(st.sampled_from(sorted(self.play.preemptible()))))

    def teardown(self) -> None:
        if not hasattr(self, "play"):
            return
        while self.play.flight:
            self.play.update()
        while self.play.busy:
            self.play.schedule()
            self.play.update()
        self.play.check_end()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase
