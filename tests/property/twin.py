"""The scheduler once more, as plainly as it can be written: the oracle of the scheduler's property tests.

Written from the rules alone, with a list for every queue, a dict for every block table and a loop over the requests
for every question. A block's content is named by what it holds (salt and all tokens up to its end), so there are no
hashes; the free list is two lists. It decides; it computes nothing: the caller tells it which tokens were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvern.config import SchedulerConfig
from kvern.request import BlockedBy, RequestStatus

MAX_PASSED = 32  # requests short of blocks that one step looks past
WAITING, RUNNING, PREEMPTED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED
ROWS, BUDGET, BLOCKS, POLICY = (
    BlockedBy.MAX_NUM_SEQS,
    BlockedBy.TOKEN_BUDGET,
    BlockedBy.NO_FREE_BLOCKS,
    BlockedBy.POLICY,
)


@dataclass(eq=False)
class TwinRequest:
    id: str
    tokens: list[int]
    num_prompt: int
    max_total: int  # prompt + output
    stop: frozenset[int]
    priority: int
    arrival: float
    salt: str | None
    serial: int
    status: RequestStatus = WAITING
    table: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0  # leading full blocks that are hittable, or were equal to one that was
    placeholders: int = 0  # tokens that planned steps will bring
    drafts: list[int] = field(default_factory=list)
    reserved_tokens: int = 0  # what its admission promised to hold
    num_cached: int | None = None
    preemptions: int = 0
    admissions: int = 0
    overtaken: int = 0
    blocked_by: set[BlockedBy] = field(default_factory=set)  # any of these would be true


@dataclass
class TwinStep:
    n: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[int]] = field(default_factory=dict)  # id -> drafts that are judged with the sample
    admissions: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)  # sources of copies


class Twin:
    def __init__(self, config: SchedulerConfig) -> None:
        self.c = config
        self.live: dict[str, TwinRequest] = {}
        self.ended: dict[str, TwinRequest] = {}
        self.num_added = 0
        self.holders: dict[int, int] = dict.fromkeys(range(1, config.num_blocks), 0)
        self.free_plain = list(self.holders)  # no content that could be hit: reused first
        self.free_hashed: list[int] = []  # least recently used first
        self.content: dict[int, tuple[object, ...]] = {}  # block -> what it holds, if it can be hit
        self.fresh: set[int] = set()  # filled by the step that is being planned

    # ---- events

    def add(
        self,
        rid: str,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        at: float = 0.0,
        salt: str | None = None,
        stop: tuple[int, ...] = (),
    ) -> None:
        total = min(len(prompt) + max_tokens, self.c.max_model_len)
        self.live[rid] = r = TwinRequest(
            rid, list(prompt), len(prompt), total, frozenset(stop), priority, at, salt, self.num_added
        )
        self.num_added += 1
        self.end_if_it_never_fits(r)

    def abort(self, rid: str) -> None:
        if rid in self.live:
            self.end(self.live[rid], RequestStatus.FINISHED_ABORTED)

    def preempt(self, rid: str) -> None:
        self.put_back(self.live[rid], None)

    def update(self, step: TwinStep, sampled: dict[str, list[int]], drafts: dict[str, list[int]] | None = None) -> None:
        """`sampled`: what the model gave, accepted drafts included, whether the request still wants it or not."""
        for rid, judged in step.samples.items():
            r = self.live.get(rid)
            if r is None or r.admissions != step.admissions[rid]:
                continue
            new = sampled[rid]
            if r.status is RUNNING:
                r.placeholders = max(0, r.placeholders - 1 - len(judged))
                r.computed -= len(judged) + 1 - len(new)
            for token in new:
                r.tokens.append(token)
                if token in r.stop:
                    self.end(r, RequestStatus.FINISHED_STOPPED)
                elif len(r.tokens) >= r.max_total:
                    self.end(r, RequestStatus.FINISHED_LENGTH)
                if r.status.finished:
                    break
            if r.status is RUNNING and not r.placeholders:
                r.drafts = (drafts or {}).get(rid, [])[: r.max_total - 1 - len(r.tokens)]

    # ---- the step

    def schedule(self) -> TwinStep:
        step = TwinStep()
        self.fresh = set()
        if not self.drafts_fit():
            for r in self.running():
                r.drafts = []
        for r in self.running():
            if r.status is RUNNING:  # it may have been preempted by one before it
                self.schedule_running(r, step)
        for r in self.running():
            self.publish(r)
        if step.preempted:
            for r in self.waiting():
                r.blocked_by = {BLOCKS}
        else:
            self.schedule_waiting(step)
        return step

    def drafts_fit(self) -> bool:
        """Whether every running request gets its blocks, drafts included, without anybody going."""
        trial, need = TwinStep(), 0
        for r in self.running():
            trial.n[r.id] = n = self.cut(r, r.computed, trial)
            need += max(0, self.blocks_for(r.computed + n) - len(r.table))
        return need <= self.num_free

    def schedule_running(self, r: TwinRequest, step: TwinStep) -> None:
        n = self.cut(r, r.computed, step)
        if n == 0:
            return
        while self.blocks_for(r.computed + n) - len(r.table) > self.num_free:
            if len(self.running()) == 1:
                if r.placeholders:  # what is under way will still be delivered
                    return
                self.end(r, self.too_big(r))
                return
            # Nobody goes twice without a token in between, as long as there is somebody else.
            spared = [v for v in self.running() if v.preemptions and len(v.tokens) == v.reserved_tokens]
            victim = ([v for v in self.running() if v not in spared] or self.running())[-1]
            self.put_back(victim, step)
            if victim is r:
                return
        self.give(r, n, step)

    def schedule_waiting(self, step: TwinStep) -> None:
        passed: list[TwinRequest] = []  # who lacks blocks and was looked at
        while queue := [r for r in self.waiting() if r not in passed]:
            r = queue[0]
            if self.end_if_it_never_fits(r):
                continue
            why = self.try_admit(r, step)
            if not why:
                for other in passed:
                    other.overtaken += 1
            else:
                r.blocked_by = why
                passed.append(r)
            if not why <= {BLOCKS}:
                self.others_wait(passed, why)
                return
            if len(passed) >= MAX_PASSED or any(other.overtaken >= self.c.max_bypass for other in passed):
                self.others_wait(passed, {BLOCKS, POLICY})
                return

    def others_wait(self, passed: list[TwinRequest], why: set[BlockedBy]) -> None:
        for r in self.waiting():
            if r not in passed:
                r.blocked_by = why

    def try_admit(self, r: TwinRequest, step: TwinStep) -> set[BlockedBy]:
        """Start `r` in this step, or say why not."""
        full = len(self.running()) >= self.c.max_num_seqs
        if self.budget(step) == 0:
            return {BUDGET, ROWS} if full else {BUDGET}
        victims = self.victims_for(r)
        if victims is None:
            return {ROWS} if full else {BLOCKS}
        for victim in victims:
            self.put_back(victim, step)
        hits, copy = self.lookup(r)
        start = len(r.tokens) - 1 if copy else len(hits[: self.max_hits(r)]) * self.c.block_size
        n = self.cut(r, start, step)
        for block in hits[: self.max_hits(r)]:
            self.hold(block)
            r.table.append(block)
        if r.num_cached is None:
            r.num_cached = start
        r.status, r.computed, r.reserved_tokens = RUNNING, start, len(r.tokens)
        r.published = start // self.c.block_size
        r.admissions += 1
        r.blocked_by = set()
        self.give(r, n, step)
        if copy and hits[-1] not in r.table:  # the source may be given away at once: copies come first
            step.copied.append(hits[-1])
        if copy and hits[-1] in self.free_hashed:  # it was used
            self.free_hashed.remove(hits[-1])
            self.free_hashed.append(hits[-1])
        self.publish(r)
        return set()

    def victims_for(self, r: TwinRequest) -> list[TwinRequest] | None:
        """The fewest running requests, last first, that must go so that `r` has a row and blocks; None: not to be had.
        Nobody goes whose work of this step somebody reads: another request, or `r` itself."""
        hits, _ = self.lookup(r)
        allowed = [
            v
            for v in reversed(self.running())
            if self.c.policy == "priority"
            and v.priority > r.priority
            and not any(self.holders[b] > 1 or b in hits for b in self.fresh & set(v.table))
        ]
        for count in range(len(allowed) + 1):
            if len(self.running()) - count < self.c.max_num_seqs and self.fits(r, allowed[:count]):
                return allowed[:count]
        return None

    def fits(self, r: TwinRequest, gone: list[TwinRequest]) -> bool:
        hits, _ = self.lookup(r)
        free = {b for b in self.holders if self.holders[b] == sum(b in v.table for v in gone)}
        return self.cost(r, hits[: self.max_hits(r)], free) <= len(free) - self.spoken_for(gone)

    def cost(self, r: TwinRequest, hits: list[int], free: set[int]) -> int:
        """Free blocks it takes to hold all of r's tokens: new ones, and free ones among the hits."""
        new = self.blocks_for(len(r.tokens)) - len(hits[: self.max_hits(r)])
        return new + sum(b in free for b in hits[: self.max_hits(r)])

    def spoken_for(self, gone: list[TwinRequest]) -> int:
        """Free blocks that are not for newcomers: reserved for running prompts, and the watermark."""
        stay = [v for v in self.running() if v not in gone]
        reserved = sum(max(0, self.blocks_for(v.reserved_tokens) - len(v.table)) for v in stay)
        return reserved + (int(self.c.watermark * (self.c.num_blocks - 1)) if stay else 0)

    # ---- the small questions

    def order(self, r: TwinRequest) -> tuple[object, ...]:
        resumed_first = (r.status is not PREEMPTED,) if r.status is not RUNNING else ()
        rank = (r.priority,) if self.c.policy == "priority" else ()
        return (*rank, *resumed_first, r.arrival, r.serial)

    def running(self) -> list[TwinRequest]:
        return sorted((r for r in self.live.values() if r.status is RUNNING), key=self.order)

    def waiting(self) -> list[TwinRequest]:
        return sorted((r for r in self.live.values() if r.status is not RUNNING), key=self.order)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.c.block_size)

    def budget(self, step: TwinStep) -> int:
        return self.c.max_num_batched_tokens - sum(step.n.values())

    @property
    def free(self) -> set[int]:
        return {b for b, count in self.holders.items() if count == 0}

    @property
    def num_free(self) -> int:
        return len(self.free)

    def cut(self, r: TwinRequest, start: int, step: TwinStep) -> int:
        """How many tokens after position `start` this step computes."""
        n = len(r.tokens) + r.placeholders + len(r.drafts) - start
        if self.c.long_prefill_token_threshold and len(self.live) > 1:
            n = min(n, self.c.long_prefill_token_threshold)
        return max(0, min(n, self.budget(step), r.max_total - 1 - start))

    def give(self, r: TwinRequest, n: int, step: TwinStep) -> None:
        """Schedule n tokens of a running request; the blocks are there."""
        while len(r.table) < self.blocks_for(r.computed + n):
            block = self.free_plain.pop() if self.free_plain else self.free_hashed.pop(0)
            self.content.pop(block, None)
            self.holders[block] = 1
            r.table.append(block)
        r.computed += n
        step.n[r.id], step.starts[r.id], step.admissions[r.id] = n, r.computed - n, r.admissions
        judged = r.drafts[: max(0, r.computed - len(r.tokens))]
        r.drafts = []
        if r.computed - len(judged) == len(r.tokens) + r.placeholders:
            step.samples[r.id] = judged
            if self.c.async_scheduling:
                r.placeholders += 1 + len(judged)

    def put_back(self, r: TwinRequest, step: TwinStep | None) -> None:
        if step is not None:
            step.preempted.append(r.id)
            for given in (step.n, step.starts, step.samples, step.admissions):
                given.pop(r.id, None)
            for block in self.fresh & set(r.table):
                del self.content[block]
        self.release(r)
        r.status, r.computed, r.placeholders, r.drafts = PREEMPTED, 0, 0, []
        r.preemptions += 1
        r.blocked_by = {BLOCKS, ROWS, POLICY}

    def end(self, r: TwinRequest, status: RequestStatus) -> None:
        self.release(r)
        r.status = status
        self.ended[r.id] = self.live.pop(r.id)

    def end_if_it_never_fits(self, r: TwinRequest) -> bool:
        if r.num_prompt > self.c.max_model_len - 1 or self.blocks_for(len(r.tokens)) > self.c.num_blocks - 1:
            self.end(r, self.too_big(r))
        return r.status.finished

    def too_big(self, r: TwinRequest) -> RequestStatus:
        has_output = len(r.tokens) > r.num_prompt
        return RequestStatus.FINISHED_LENGTH if has_output else RequestStatus.FINISHED_IGNORED

    # ---- blocks

    def key(self, r: TwinRequest, i: int) -> tuple[object, ...]:
        return (r.salt, *r.tokens[: (i + 1) * self.c.block_size])

    def max_hits(self, r: TwinRequest) -> int:
        """Whole blocks that can be shared while at least one token is left to compute."""
        return (len(r.tokens) - 1) // self.c.block_size

    def lookup(self, r: TwinRequest) -> tuple[list[int], bool]:
        """Cached blocks of a waiting request, and whether the last of them is to be copied, not shared: then they
        are the whole of its tokens, and one token is computed anew."""
        hits: list[int] = []
        where = {content: block for block, content in self.content.items()}
        while (len(hits) + 1) * self.c.block_size <= len(r.tokens) and self.key(r, len(hits)) in where:
            hits.append(where[self.key(r, len(hits))])
        copy = len(hits) > self.max_hits(r)
        if copy and hits[-1] in self.fresh:  # not there yet when copies are made
            return hits[:-1], False
        return hits, copy

    def publish(self, r: TwinRequest) -> None:
        if self.c.enable_prefix_caching:
            for i in range(r.published, min(r.computed, len(r.tokens)) // self.c.block_size):
                block, r.published = r.table[i], i + 1
                if self.key(r, i) not in self.content.values():
                    self.content[block] = self.key(r, i)
                    self.fresh.add(block)

    def hold(self, block: int) -> None:
        if self.holders[block] == 0:
            self.free_hashed.remove(block)
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        self.holders[block] -= 1
        if self.holders[block] == 0:
            (self.free_hashed if block in self.content else self.free_plain).append(block)

    def release(self, r: TwinRequest) -> None:
        for block in reversed(r.table):
            self.drop(block)
        r.table = []
