"""Everything at once, at random: each seed draws a configuration from all features of the scheduler and a workload, and
plays it with mischief (aborts, pins, forks, forced preemption, another policy, transfers that fail or never report,
steps planned ahead, drafts right and wrong). Whatever happens: every text is the one the toy model gives without any
cache, the invariants hold after each step, everything drains, and nothing is left over.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import reduce
from typing import Any

import numpy as np
import pytest
from workloads import leftovers

from kvern.cache.groups import make_group
from kvern.request import Request, RequestStatus
from kvern.sampling_params import InvalidRequest
from kvern.scheduler.policies import Policy, RequestInfo
from kvern.step import ModelRunnerOutput, SchedulerOutput
from kvern.testing import SchedulerHarness
from kvern.testing.faults import FakeConnector
from kvern.testing.harness import own_tokens
from kvern.testing.toy import next_state, next_token

MAX_STEPS = 4000
FAMILY = own_tokens("family", 200)
POLICIES = ["fcfs", "priority", "fair", "shortest", "prefix", "deadline", f"{__name__}:Unreliable"]
GROUPS = [("full",), ("full",), ("full",), ("window:20",), ("full", "window:16"), ("full", "window:5", "window:16")]
GROUPS += [("chunked_local:24",), ("full", "chunked_local:7"), ("mamba",), ("full", "mamba", "chunked_local:16")]


class Unreliable(Policy):
    """A different opinion each time, now and then an exception or nonsense."""

    name = "unreliable"
    dynamic = True

    def __init__(self) -> None:
        self.random = random.Random(7)

    def _fails(self) -> None:
        if self.random.random() < 0.1:
            raise RuntimeError("no opinion")

    def rank(self, request: RequestInfo, now: float) -> Any:
        self._fails()
        return self.random.choice([0, 1.5, (1, 2), float("nan"), "soon"]) if self.random.random() < 0.1 else 1

    def pick_victim(self, running: Any, now: float) -> RequestInfo:
        self._fails()
        choice: RequestInfo = self.random.choice([*running, None])
        return choice

    def may_preempt(self, waiting: RequestInfo, running: RequestInfo, now: float) -> bool:
        self._fails()
        return waiting.priority < running.priority and self.random.random() < 0.5

    def cap_tokens(self, request: RequestInfo, num_tokens: int, now: float) -> int:
        self._fails()
        return self.random.randint(-1, num_tokens + 2)

    def on_served(self, served: Any, now: float) -> None:
        self._fails()


class LossyConnector(FakeConnector):
    """Now and then one block of a load comes as garbage; `lost` knows which. Some answers are late."""

    def __init__(self, rng: random.Random, matched_tokens: int, load_async: bool, block_size: int) -> None:
        super().__init__(matched_tokens, load_async)
        self.rng, self.block_size = rng, block_size
        self.loss, self.doubt = rng.choice([0.0, 0.3]), rng.choice([0.0, 0.2])
        self.keep_finished = rng.random() < 0.3
        self.lost: dict[str, list[int]] = {}

    def matched_tokens(self, request: Request, num_computed: int) -> Any:
        if self.rng.random() < self.doubt:
            return None
        return super().matched_tokens(request, num_computed)

    def allocated(self, request: Request, tables: list[list[int]], start: int, end: int) -> None:
        super().allocated(request, tables, start, end)
        self.lost.pop(request.id, None)
        if self.rng.random() < self.loss:
            place = self.rng.randint(start // self.block_size, (end - 1) // self.block_size)
            tokens = self._loads[-1]["token_ids"]
            for position in range(max(start, place * self.block_size), min(end, (place + 1) * self.block_size)):
                tokens[position - start] = -7
            self.lost[request.id] = [place]


def text_of(
    prompt: list[int], num_tokens: int, groups: tuple[str, ...], block_size: int, branches: dict[int, int]
) -> list[int]:
    """The toy model's text after `prompt`: what each group reads, computed without any cache. branches: {place in the
    text: token that stands there instead}, which the model goes on from."""
    reads = [make_group(group, block_size) for group in groups]
    ids = list(prompt)
    for place in range(num_tokens):
        if place in branches:
            ids.append(branches[place])
            continue
        history = np.asarray(ids, dtype=np.int64) + (np.arange(len(ids), dtype=np.int64) << 32)
        parts = [
            np.array([reduce(lambda s, i: next_state(s, ids[i], i), range(len(ids)), 0)])
            if group.recurrent
            else history[group.first_needed(len(ids) - 1) * block_size :]
            for group in reads
        ]
        ids.append(next_token(np.concatenate(parts)))
    return ids[len(prompt) :]


class Fuzz:
    def __init__(self, seed: int, fork_probability: float = 0.08, **fixed: Any) -> None:
        """fixed: overrides parts of the configuration."""
        self.fork_probability = fork_probability
        self.rng = rng = random.Random(seed)
        self.groups = rng.choice(GROUPS)
        self.size = rng.choice([1, 2, 4, 16])
        self.connector: LossyConnector | None = None
        if rng.random() < 0.3 and "mamba" not in self.groups:
            self.connector = LossyConnector(rng, rng.randint(0, 40), rng.random() < 0.6, self.size)
        self.images = rng.random() < 0.25
        self.drafts = 0 if "mamba" in self.groups else rng.choice([0, 0, 1, 2, 4])
        self.ahead = rng.choice([1, 1, 2, 3])
        if self.connector is not None and not self.connector.load_async and self.connector.loss:
            self.ahead = 1  # that a load within the step failed must be known before the next is planned
        self.adapters = rng.choice([0, 0, 1, 2])
        self.config: dict[str, Any] = {
            "num_blocks": rng.randint(8, 60) * len(self.groups),
            "block_size": self.size,
            "kv_groups": self.groups,
            "max_num_seqs": rng.randint(1, 8),
            "max_num_batched_tokens": rng.choice([3, 16, 64, 1000]),
            "max_model_len": rng.choice([40, 100, 200]),
            "policy": rng.choice(POLICIES),
            "batching": rng.choice(["mixed", "mixed", "prefill_first"]),
            "delay_factor": rng.choice([0, 0.5]),
            "preemption": rng.choice(["recompute", "swap", "auto"]),
            "host_blocks": rng.choice([0, 5, 100]),
            "victim": rng.choice(["policy", "newest", "least_computed"]),
            "enable_prefix_caching": rng.random() < 0.7,
            "enable_chunked_prefill": rng.random() < 0.8,
            "long_prefill_token_threshold": rng.choice([0, 0, 5]),
            "watermark": rng.choice([0, 0, 0.1]),
            "max_bypass": rng.choice([0, 3]),
            "preempt_probability": rng.choice([0, 0, 0.3]),
            "max_loras": self.adapters,
            "num_speculative_tokens": self.drafts,
            "async_scheduling": self.ahead > 1 or rng.random() < 0.1,
            "encoder_budget": rng.choice([8, 20]) if self.images else 0,
            "encoder_cache_size": rng.choice([8, 30]) if self.images else 0,
            "transfer_lease": rng.choice([0.2, 100.0]),
            "disk_blocks": rng.choice([0, 0, 6, 100]),
            "eviction": rng.choice(["lru", "lru", "priority"]),
            "max_pinned_blocks": rng.choice([None, 4, 1000]),
            "seed": seed,
        } | fixed
        self.h = SchedulerHarness(**self.config, connector=self.connector)
        self.h.scheduler.set_preemption_costs(0.001, rng.choice([0.0001, 0.01]))
        self.execute = self.h.executor.execute
        self.h.executor.execute = self.execute_with_losses  # type: ignore[method-assign]
        self.todo = [self.draw_request(i) for i in range(rng.randint(1, 14))]
        self.asked: dict[str, dict[str, Any]] = {}
        self.pending_grammars: list[str] = []
        self.pins: list[str] = []
        self.flight: list[SchedulerOutput] = []
        self.texts: dict[str, list[int]] = {}
        self.branches: dict[str, dict[int, int]] = defaultdict(dict)  # request -> {place in its text: token}

    def draw_request(self, i: int) -> dict[str, Any]:
        rng = self.rng
        length = rng.choice([rng.randint(1, 60), self.size * rng.randint(1, 3)])
        shared = rng.randint(0, length) if rng.random() < 0.6 else 0
        asked: dict[str, Any] = {
            "prompt": FAMILY[:shared] + own_tokens(f"x{i}", length - shared),
            "max_tokens": rng.randint(1, 20),
            "priority": rng.randint(0, 3),
            "tenant": rng.choice("abc"),
            "cache_salt": rng.choice([None, None, "s"]),
            "lora": rng.choice([None, "a", "b", "c"]) if self.adapters else None,
            "grammar": rng.choice([None, None, None, None, "pending"]),
            "stop_token_ids": rng.sample(range(35, 130), rng.choice([0, 0, 0, 3])),
        }
        if self.images and rng.random() < 0.7:
            asked["images"] = self.draw_images(length)
        return asked

    def draw_images(self, length: int) -> list[dict[str, Any]]:
        images, at = [], self.rng.randint(0, 5)
        while at < length and len(images) < 3:
            size = self.rng.randint(1, 9)
            if at + size <= length:
                images.append({"offset": at, "length": size, "id": f"{self.rng.choice('XYZ')}{size}"})
            at += size + self.rng.randint(0, 10)
        return images

    def execute_with_losses(self, output: SchedulerOutput, _: Any = None) -> ModelRunnerOutput:
        """Forks go ways of their own. Now and then a file on disk is damaged; that must be known before the next step
        is planned."""
        known = {row: len(state.tokens) for row, state in self.h.executor._rows.items()}
        known |= {new.row: len(new.token_ids) for new in output.new_requests}
        forced = {}
        for row, rid, samples in zip(output.rows.tolist(), output.request_ids, output.samples.tolist(), strict=True):
            place = known[row] - len(self.asked[rid]["prompt"])
            if samples and place in self.branches[rid]:
                forced[row] = [self.branches[rid][place]]
        lost = [f for f in output.blocks_from_disk if self.ahead == 1 and self.rng.random() < 0.3]
        for name, _ in lost:
            self.h.executor.disk[name] = np.full(self.size, -7, dtype=np.int64)
        result = self.execute(output, forced)
        result.lost = lost
        return result

    # ---- the play

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            self.arrive()
            self.mischief()
            self.flight.append(self.h.schedule())
            self.check()
            self.check_images(self.flight[-1])
            if self.rng.random() < 0.1:
                self.abort_somebody()
            while len(self.flight) >= self.ahead or (self.flight and self.rng.random() < 0.3):
                self.update(self.flight.pop(0))
            self.h.clock.advance(0.01)
            transfers = self.h.scheduler.state.transfers
            if not (self.todo or self.flight or self.h.scheduler.has_work() or transfers.under_way()):
                break
        else:
            waiting = {rid: self.h.request(rid).blocked_by for rid in self.h.scheduler.requests}
            raise AssertionError(f"not drained after {MAX_STEPS} steps: {waiting}")
        self.check_end()

    def arrive(self) -> None:
        while self.todo and self.rng.random() < 0.5:
            asked = self.todo.pop()
            rid = self.h.add(at=self.h.clock.now(), **asked)
            self.asked[rid] = asked
            if asked["grammar"]:
                self.pending_grammars.append(rid)
            if self.rng.random() < 0.3:
                sibling = asked | {"grammar": None}
                self.branch(self.h.add(at=self.h.clock.now(), fork_of=rid, **sibling), rid)

    def mischief(self) -> None:
        rng = self.rng
        if rng.random() < 0.05:
            self.abort_somebody()
        if self.pending_grammars and rng.random() < 0.3:
            self.h.grammar_ready(self.pending_grammars.pop(rng.randrange(len(self.pending_grammars))))
        if rng.random() < 0.03:
            self.h.scheduler.set_policy(rng.choice(POLICIES))
        if rng.random() < self.fork_probability and len(self.asked) < 24 and self.h.scheduler.requests:
            parent = rng.choice(sorted(self.h.scheduler.requests))
            if parent not in self.pending_grammars:
                self.branch(self.h.fork(parent), parent)
        if rng.random() < 0.1:
            self.pin_something()
        if self.pins and rng.random() < 0.03:
            self.h.unpin(self.pins.pop())
        self.check()

    def pin_something(self) -> None:
        """Too much, or nothing at all, now and then."""
        length, ttl = self.rng.randint(1, 60), self.rng.choice([0.02, 0.5, 1e9])
        try:
            self.pins.append(self.h.pin(FAMILY[:length], ttl, self.rng.choice([None, "s"])))
        except InvalidRequest:
            return

    def branch(self, child: str, parent: str) -> None:
        """The next token of `child` is not the one that `parent` says there."""
        known = len(self.h.request(child).output_token_ids)
        self.asked[child] = self.asked[parent] | {"grammar": None}
        inherited = {place: token for place, token in self.branches[parent].items() if place < known}
        self.branches[child] = inherited | {known: self.rng.randint(3, 30)}

    def abort_somebody(self) -> None:
        if self.asked:
            self.h.abort(self.rng.choice(sorted(self.asked)))

    def update(self, output: SchedulerOutput) -> None:
        arrived, failed = [], {}
        transfers = self.h.scheduler.state.transfers
        if self.connector is not None:
            for rid in list(transfers.loading):
                if self.rng.random() < 0.3:
                    lost = self.connector.lost.pop(rid, None)
                    if lost is None:
                        arrived.append(rid)
                    else:
                        failed[rid] = lost
            if not self.connector.load_async:
                failed = {new.request_id: lost for new in output.new_requests if (lost := self.lost_in(new.request_id))}
        sent = [rid for rid in transfers.sending if self.rng.random() < 0.3]
        drafts = {rid: self.propose(rid, output) for rid in output.request_ids if self.rng.random() < 0.7}
        self.h.update(output, drafts=drafts, kv_arrived=arrived, kv_failed=failed, kv_sent=sent)
        self.check()

    def lost_in(self, rid: str) -> list[int] | None:
        assert self.connector is not None
        return self.connector.lost.pop(rid, None)

    def propose(self, rid: str, output: SchedulerOutput) -> list[int]:
        """Drafts for the step after `output`: the model's own text, often with a mistake in it."""
        if not self.drafts:
            return []
        said = self.h.request(rid).num_tokens
        # What `output` samples comes first: one token, or more if it verifies drafts.
        row = dict(zip(output.request_ids, output.rows.tolist(), strict=True))[rid]
        start = said - len(self.asked[rid]["prompt"]) + 1 + len(output.draft_tokens.get(row, []))
        proposal = self.text(rid)[start : start + self.rng.randint(1, self.drafts)]
        if proposal and self.rng.random() < 0.4:
            proposal[self.rng.randrange(len(proposal))] = 5
        return proposal

    def text(self, rid: str) -> list[int]:
        asked = self.asked[rid]
        key = str((asked["prompt"], asked["max_tokens"], self.branches[rid]))
        if key not in self.texts:
            prompt, most = asked["prompt"], asked["max_tokens"]
            self.texts[key] = text_of(prompt, most, self.groups, self.size, self.branches[rid])
        return self.texts[key]

    # ---- what must hold

    def check(self) -> None:
        self.h.check_invariants()
        running = self.h.scheduler.running()
        adapters = {request.lora for request in running} - {None}
        assert not self.adapters or len(adapters) <= self.adapters

    def check_images(self, output: SchedulerOutput) -> None:
        """An image is computed whole or not at all, and is there for who computes its tokens."""
        encoder = self.h.scheduler.state.encoder
        starts = output.num_computed.tolist()
        for rid, start, n in zip(output.request_ids, starts, output.num_new.tolist(), strict=True):
            for image in self.h.requests[rid].images:
                if start < image.offset + image.length and image.offset < start + n:
                    assert image.offset + image.length <= start + n, f"the image of {rid} is split"
                    assert rid in encoder._readers.get(image.id, {}), f"the image of {rid} is not held for it"

    def check_end(self) -> None:
        for rid, asked in self.asked.items():
            view, text = self.h.request(rid), self.text(rid)
            said = view.output_token_ids
            assert said == text[: len(said)], f"{rid}: {said}, alone {text}"
            assert self.h.delivered[rid] == said, f"{rid} was told {self.h.delivered[rid]}, has {said}"
            most = min(asked["max_tokens"], self.config["max_model_len"] - len(asked["prompt"]))
            stops = [i for i, token in enumerate(said) if token in asked["stop_token_ids"]]
            assert not stops or stops == [len(said) - 1], f"{rid} went on after a stop token"
            if view.status is RequestStatus.FINISHED_LENGTH and view.error is None:
                assert len(said) == most and not stops, f"{rid} has {len(said)} of {most} tokens"
            elif view.status is RequestStatus.FINISHED_STOPPED:
                assert stops, f"{rid} stopped at {said[-1:]}"
            else:
                assert view.error or view.status is RequestStatus.FINISHED_ABORTED, f"{rid}: {view.status}"
        for pin in self.pins:
            self.h.unpin(pin)
        self.h.step()  # tells of the last endings
        state = self.h.scheduler.state
        assert leftovers(self.h) == []
        assert state.loras == {} and len(state.swapped) == len(state.transfers.arrived) == 0
        host = state.cache.host
        assert host is None or host.pool.num_free == host.pool.num_usable
        assert state.encoder._readers == {} and state.encoder._used <= state.encoder.capacity


def play(seed: int, **options: Any) -> Fuzz:
    fuzz = Fuzz(seed, **options)
    try:
        fuzz.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\n{fuzz.config}\nahead {fuzz.ahead}") from error
    return fuzz


def test_all_features_at_random() -> None:
    for seed in range(20):
        play(seed)


def test_siblings_leave_and_come_back_together_at_random() -> None:
    """Nothing but forks, a small pool and a host with room: no token that was kept is computed twice."""
    moved = 0
    for seed in range(1000, 1015):
        fuzz = play(seed, fork_probability=0.4, preemption="swap", host_blocks=100, batching="mixed")
        moved += fuzz.h.scheduler.stats.swapped_out_blocks
    assert moved > 400


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 360, 60))
def test_more_of_all_features_at_random(first: int) -> None:
    for seed in range(first, first + 60):
        play(seed)
