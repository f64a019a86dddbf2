"""Random workloads, and the driver that plays one against the scheduler and its twin at once.

A workload is a configuration and a list of requests with the steps in which they arrive; what happens meanwhile
(aborts, forced preemptions, drafts, steps planned ahead) is drawn as it goes, from the same generator, so that one seed
is one run. Sampled tokens come from the toy model on the scheduler's side and from its oracle on the twin's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from twin import Twin, TwinStep

from kvern.cache.prefix_index import extend_hashes, root_hash
from kvern.request import RequestStatus
from kvern.scheduler.state import SchedulerState
from kvern.step import SchedulerOutput
from kvern.testing import SchedulerHarness
from kvern.testing.toy import next_token

MAX_STEPS = 4000
EOS = 40  # an id the toy model really says, so that EOS happens


@dataclass
class Arrival:
    step: int
    id: str
    prompt: list[int]
    max_tokens: int
    priority: int = 0
    salt: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    delay: float = 0.0  # between its arrival, which counts for its place, and its being added


@dataclass
class Workload:
    config: dict[str, Any]
    arrivals: list[Arrival]
    abort_probability: float = 0.0
    preempt_probability: float = 0.0
    draft_probability: float = 0.0
    steps_ahead: int = 1  # most steps planned and not updated


def random_workload(rng: random.Random, **fixed: Any) -> Workload:
    """Small pools, small budgets, shared prefixes. `fixed` overrides parts of the configuration."""
    size = rng.choice([1, 2, 4, 4, 8, 16])
    asynchronous = rng.random() < 0.3
    config: dict[str, Any] = {
        "block_size": size,
        "num_blocks": 1 + rng.choice([1, 2, 4, 6, 8, 12, 24, 60]),
        "max_num_seqs": rng.choice([1, 2, 3, 4, 8]),
        "max_num_batched_tokens": rng.choice([1, 2, 3, 5, 8, 16, 32, 128]),
        "max_model_len": rng.choice([2, 9, 24, 48, 64, 200]),
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 1, 3, 8, 16]),
        "watermark": rng.choice([0.0, 0.0, 0.1, 0.34, 0.6]),
        "max_bypass": rng.choice([0, 0, 1, 3, 100]),
        "policy": rng.choice(["fcfs", "priority"]),
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": asynchronous,
        "num_speculative_tokens": 0 if asynchronous else rng.choice([0, 0, 1, 3]),
        "eos_token_id": EOS,
    }
    config |= fixed
    families = [[rng.randint(3, 242) for _ in range(64)] for _ in range(2)]
    arrivals: list[Arrival] = []
    step = 0
    for i in range(rng.randint(1, 14)):
        step += rng.choice([0, 0, 0, 1, 2, 5])
        arrivals.append(
            Arrival(
                step,
                f"r{i}",
                _prompt(rng, config, families, arrivals),
                rng.choice([1, 1, 2, 3, 5, 9, 20]),
                priority=rng.choice([0, 0, 1, 2]),
                salt=rng.choice([None, None, None, "a", "b"]),
                stop_token_ids=tuple(rng.sample(range(35, 130), rng.choice([0, 0, 2]))),
                ignore_eos=rng.random() < 0.5,
                delay=rng.choice([0.0, 0.0, 1.5, 6.0]),
            )
        )
    return Workload(
        config,
        arrivals,
        abort_probability=rng.choice([0.0, 0.0, 0.03, 0.1]),
        preempt_probability=rng.choice([0.0, 0.0, 0.1, 0.3]),
        draft_probability=0.7 if config["num_speculative_tokens"] else 0.0,
        steps_ahead=rng.choice([2, 3]) if asynchronous else rng.choice([1, 1, 1, 2]),
    )


def _prompt(rng: random.Random, config: dict[str, Any], families: list[list[int]], earlier: list[Arrival]) -> list[int]:
    """Often a prefix that others have, often a whole number of blocks, sometimes a conversation continued."""
    size = config["block_size"]
    length = max(1, rng.choice([rng.randint(1, 40), rng.randint(1, 8), size * rng.randint(1, 4)]))
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(families)[:length]
    if kind < 0.75 and earlier:
        turn = rng.choice(earlier)
        return turn.prompt + said_after(tuple(turn.prompt), rng.randint(0, 6)) + families[0][: rng.randint(0, 3)]
    if kind < 0.9:
        shared = rng.randint(0, length - 1)
        return rng.choice(families)[:shared] + [rng.randint(3, 242) for _ in range(length - shared)]
    return [rng.randint(3, 242) for _ in range(length)]


_SAID: dict[tuple[int, ...], list[int]] = {}


def said_after(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """The oracle's text, remembered and grown on demand."""
    if len(_SAID) > 2000:
        _SAID.clear()
    said = _SAID.setdefault(prompt, [])
    while len(said) < num_tokens:
        ids = np.array([*prompt, *said], dtype=np.int64)
        said.append(next_token(ids + (np.arange(len(ids), dtype=np.int64) << 32)))
    return said[:num_tokens]


class Mismatch(AssertionError):
    """The scheduler and its twin do not agree."""


@dataclass
class Play:
    """One workload, played against both."""

    workload: Workload
    rng: random.Random
    flight: list[tuple[SchedulerOutput, TwinStep]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)  # by force, not told yet
    told: set[str] = field(default_factory=set)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.h = SchedulerHarness(**self.workload.config)
        self.twin = Twin(self.h.scheduler.config)
        self.arrivals: dict[str, Arrival] = {}

    def run(self) -> SchedulerHarness:
        due = list(self.workload.arrivals)
        while due or self.busy:
            while due and due[0].step <= self.num_steps:
                self.add(due.pop(0))
            self.mischief()
            self.schedule()
            if self.workload.steps_ahead > 1:
                self.mischief()
            while len(self.flight) >= self.workload.steps_ahead or (self.flight and self.rng.random() < 0.3):
                self.update()
        self.check_end()
        return self.h

    @property
    def busy(self) -> bool:
        return bool(self.twin.live or self.flight or self.h.scheduler.has_work())

    # ---- events

    def add(self, a: Arrival) -> None:
        self.arrivals[a.id] = a
        self.h.clock.advance(max(0.0, a.step - self.h.clock.now()))
        self.h.add(
            a.prompt,
            a.max_tokens,
            priority=a.priority,
            request_id=a.id,
            ignore_eos=a.ignore_eos,
            stop_token_ids=a.stop_token_ids,
            cache_salt=a.salt,
            at=a.step - a.delay,
        )
        stop = a.stop_token_ids + (() if a.ignore_eos else (EOS,))
        self.twin.add(a.id, a.prompt, a.max_tokens, priority=a.priority, at=a.step - a.delay, salt=a.salt, stop=stop)

    def mischief(self) -> None:
        """Aborts and preemptions out of the blue."""
        if self.twin.live and self.rng.random() < self.workload.abort_probability:
            self.abort(self.rng.choice(sorted(self.twin.live)))
        ready = self.preemptible()
        if ready and self.rng.random() < self.workload.preempt_probability:
            self.preempt(self.rng.choice(ready))

    def abort(self, rid: str) -> None:
        self.h.abort(rid)
        self.twin.abort(rid)
        self.compare_state()

    def preemptible(self) -> list[str]:
        """Forced preemption may cost time, but never all progress: only who has gained a token may be chosen."""
        return [r.id for r in self.twin.running() if len(r.tokens) > r.num_prompt + r.preemptions]

    def preempt(self, rid: str) -> None:
        assert self.h.scheduler.preempt(rid)
        self.twin.preempt(rid)
        self.preempted.append(rid)
        self.compare_state()

    def schedule(self) -> None:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            self.fail(f"not drained after {MAX_STEPS} steps: {self.twin.live}")
        out, step = self.h.schedule(), self.twin.schedule()
        self.flight.append((out, step))
        self.h.check_invariants()
        self.equal("scheduled", list(out.num_scheduled_tokens.items()), list(step.n.items()))
        starts = dict(zip(out.request_ids, out.num_computed.tolist(), strict=True))
        self.equal("first positions", starts, step.starts)
        samples = {r for r, s in zip(out.request_ids, out.samples.tolist(), strict=True) if s}
        self.equal("samples", samples, set(step.samples))
        rows = dict(zip(out.rows.tolist(), out.request_ids, strict=True))
        self.equal(
            "drafts", {rows[r]: d for r, d in out.draft_tokens.items()}, {r: d for r, d in step.samples.items() if d}
        )
        self.equal("preempted", out.preempted_req_ids, self.preempted + step.preempted)
        self.equal("copies", len(out.blocks_to_copy), len(step.copied))
        self.equal("finished, told", sorted(out.finished_req_ids), sorted(set(self.twin.ended) - self.told))
        self.preempted, self.told = [], set(self.twin.ended)
        self.compare_state()
        self.compare_reasons()

    def update(self) -> None:
        """Take in the oldest planned step."""
        out, step = self.flight.pop(0)
        sampled, proposals = {}, {}
        for rid, drafts in step.samples.items():
            if rid in self.twin.live:
                r = self.twin.live[rid]
                known = len(r.tokens) - r.num_prompt
                text = self.text(rid, known + 20)[known:]
                accepted = next((i for i, d in enumerate(drafts) if d != text[i]), len(drafts))
                sampled[rid] = text[: accepted + 1]
                if self.rng.random() < self.workload.draft_probability:
                    proposals[rid] = self.propose(text[accepted + 1 :])
        before = {rid: len(r.tokens) for rid, r in self.twin.live.items()}
        live = dict(self.twin.live)
        outputs = self.h.update(out, drafts=proposals)
        self.twin.update(step, sampled, proposals)
        self.h.check_invariants()
        new = {rid: r.tokens[before[rid] :] for rid, r in live.items() if len(r.tokens) > before[rid]}
        self.equal("delivered", outputs.tokens(), new)
        self.compare_state()

    def propose(self, text: list[int]) -> list[int]:
        drafts = text[: self.rng.randint(1, self.workload.config["num_speculative_tokens"])]
        if self.rng.random() < 0.4:
            drafts[self.rng.randrange(len(drafts))] += 1
        return drafts

    # ---- comparison

    def compare_state(self) -> None:
        scheduler, twin = self.h.scheduler, self.twin
        self.equal("running", [r.id for r in scheduler.running()], [r.id for r in twin.running()])
        self.equal("waiting", [r.id for r in scheduler.waiting()], [r.id for r in twin.waiting()])
        self.equal("free blocks", scheduler.num_free_blocks, twin.num_free)
        names: dict[int, int] = {}
        for rid, r in (twin.live | twin.ended).items():
            v = self.h.request(rid)
            self.equal(f"status of {rid}", v.status, r.status)
            self.equal(f"tokens of {rid}", v.num_tokens, len(r.tokens))
            self.equal(f"num_cached_tokens of {rid}", v.num_cached_tokens, r.num_cached or 0)
            self.equal(f"preemptions of {rid}", v.num_preemptions, r.preemptions)
            if r.status is RequestStatus.RUNNING:
                self.equal(f"computed of {rid}", v.num_computed_tokens, r.computed)
                self.equal(f"blocks of {rid}", len(v.block_ids), len(r.table))
                for theirs, ours in zip(v.block_ids, r.table, strict=True):
                    self.equal(f"sharing of block {theirs} of {rid}", names.setdefault(theirs, ours), ours)
        self.equal("distinct blocks", len(names), len(set(names.values())))
        self.compare_cache()

    def compare_reasons(self) -> None:
        for r in self.twin.waiting():
            got = self.h.request(r.id).blocked_by
            if got not in r.blocked_by:
                self.fail(f"{r.id} is said to wait for {got}, it waits for {r.blocked_by}")

    def compare_cache(self) -> None:
        """The same prefixes can be hit, and they will be evicted in the same order."""
        cache = self.h.scheduler.state.cache
        held = {h for _, h in cache.index.items()}
        size = self.workload.config["block_size"]
        ours = {prefix_hash(key, size): f"{b}: {key}" for b, key in self.twin.content.items()}
        self.equal("hittable", sorted(ours.get(h, "unknown") for h in held), sorted(ours.values()))
        free = [h for b in cache.pool.free_blocks() if (h := cache.index.hash_of(b)) is not None]
        self.equal("eviction order", free, [prefix_hash(self.twin.content[b], size) for b in self.twin.free_hashed])

    def text(self, rid: str, num_tokens: int) -> list[int]:
        return said_after(tuple(self.arrivals[rid].prompt), num_tokens)

    def check_end(self) -> None:
        """Everybody has ended, with the text of the oracle; nothing is left of them."""
        self.schedule()  # tells of the last endings
        self.update()
        out = self.h.schedule()
        self.equal("last words", (out.has_work, out.finished_req_ids, out.preempted_req_ids), (False, [], []))
        self.equal("left over", leftovers(self.h), [])
        for rid, a in self.arrivals.items():
            view = self.h.request(rid)
            said = view.output_token_ids
            self.equal(f"text of {rid}", said, self.text(rid, len(said)))
            self.equal(f"delivered to {rid}", self.h.delivered[rid], said)
            stop = set(a.stop_token_ids) | (set() if a.ignore_eos else {EOS})
            if any(token in stop for token in said[:-1]):
                self.fail(f"{rid} went on after a stop token")
            most = min(a.max_tokens, self.workload.config["max_model_len"] - len(a.prompt))
            if view.status is RequestStatus.FINISHED_STOPPED and said[-1] not in stop:
                self.fail(f"{rid} stopped at {said[-1]}")
            if view.status is RequestStatus.FINISHED_LENGTH and len(said) != most and view.error is None:
                self.fail(f"{rid} ended after {len(said)} of {most} tokens without saying why")

    def equal(self, what: str, got: object, want: object) -> None:
        if got != want:
            self.fail(f"{what}: the scheduler has {got}, the twin {want}")

    def fail(self, why: str) -> None:
        raise Mismatch(f"step {self.num_steps}: {why}\n{self.workload.config}")


@lru_cache(maxsize=20_000)
def prefix_hash(content: tuple[Any, ...], block_size: int) -> bytes:
    salt, *tokens = content
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(salt), np.array(tokens, dtype=np.int32), len(tokens), block_size)
    return hashes[-1]


def play_seed(seed: int, **fixed: Any) -> SchedulerHarness:
    """Play the workload of a seed against scheduler and twin. Raises Mismatch."""
    rng = random.Random(seed)
    workload = random_workload(rng, **fixed)
    try:
        return Play(workload, rng).run()
    except AssertionError as exc:
        raise Mismatch(f"seed {seed}, {fixed}: {exc}") from exc


def leftovers(h: SchedulerHarness) -> list[str]:
    """What distinguishes a scheduler without requests from a new one, content of the cache aside."""
    new, found = SchedulerState(h.scheduler.config), []
    state = h.scheduler.state

    def same(what: str, got: object, want: object) -> None:
        if got != want:
            found.append(f"{what}: {got}, at first {want}")

    same("requests", state.requests, new.requests)
    same("waiting", list(state.waiting), [])
    same("untold endings", (state.ended, state.notices), (new.ended, new.notices))
    same("remembered lookups", state.cache._memo, {})
    same("blocks of the last step", state.cache._filled_by, {})
    same("reference counts", state.cache.pool.ref_count, new.cache.pool.ref_count)
    same("free blocks", sorted(state.cache.pool.free_blocks()), new.cache.pool.free_blocks())
    same("free rows", sorted(state.batch._free_rows), sorted(new.batch._free_rows))
    same("running order", state.batch.order.tolist(), [])
    same("executor rows", h.executor._rows, {})
    for name in ("num_tokens", "num_drafts", "num_placeholders", "num_computed", "num_blocks", "epoch"):
        same(name, getattr(state.batch, name).tolist(), getattr(new.batch, name).tolist())
    same("reset of the cache", (state.cache.reset(), len(state.cache.index)), (True, 0))
    return found
