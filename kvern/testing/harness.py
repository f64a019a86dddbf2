"""Drive a scheduler step by step, without a model, a server or a clock of its own.

h = SchedulerHarness(num_blocks=11, block_size=16, max_num_batched_tokens=100)
a = h.add(prompt=40, max_tokens=8)
out = h.schedule()                # a SchedulerOutput
h.update(out)                     # the toy model computes; or tokens={a: [5]} to script it
h.request(a).num_computed_tokens
h.run()                           # until everybody is done -> {id: tokens}
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from kvern.cache.connectors import SchedulerConnector
from kvern.clock import VirtualClock
from kvern.config import SchedulerConfig
from kvern.request import ImageSpan, Request, RequestStatus
from kvern.sampling_params import SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.scheduler.view import RequestView
from kvern.step import SchedulerOutput, StepOutputs
from kvern.testing.faults import FakeConnector, RandomPreemption
from kvern.testing.toy import HistoryHashExecutor


class SchedulerHarness:
    """A Scheduler, the toy executor and a virtual clock. Options mean what they mean in EngineConfig."""

    def __init__(
        self,
        num_blocks: int = 1024,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 1024,
        max_model_len: int = 4096,
        policy: str = "fcfs",
        batching: str = "mixed",
        preemption: str = "recompute",
        enable_prefix_caching: bool = True,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.0,
        max_bypass: int = 0,
        host_blocks: int = 0,
        seed: int = 0,
        preempt_probability: float = 0.0,
        *,
        policy_options: dict[str, Any] | None = None,
        victim: str = "policy",
        enable_chunked_prefill: bool = True,
        delay_factor: float = 0.0,
        max_preemptions: int = 10_000,
        num_speculative_tokens: int = 0,
        async_scheduling: bool = False,
        eos_token_id: int | None = None,
        max_loras: int = 0,
        disk_blocks: int = 0,
        eviction: str = "lru",
        max_pinned_blocks: int | None = None,
        decode_context_parallel_size: int = 1,
        encoder_budget: int = 0,
        encoder_cache_size: int = 0,
        sliding_window: int | None = None,
        kv_groups: Sequence[str] = ("full",),
        connector: dict[str, Any] | SchedulerConnector | None = None,
        transfer_lease: float = 300.0,
        kv_load_failure: str = "recompute",
    ) -> None:
        """connector: {"matched_tokens": n, "load_async": bool}: every request finds its first n tokens remotely; or a
        SchedulerConnector whose metadata the toy executor understands (see FakeConnector)."""
        if sliding_window is not None:
            kv_groups = (f"window:{sliding_window}",)
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=policy,
            batching=batching,
            preemption=preemption,
            enable_prefix_caching=enable_prefix_caching,
            long_prefill_token_threshold=long_prefill_token_threshold,
            watermark=watermark,
            max_bypass=max_bypass,
            host_blocks=host_blocks,
            policy_options=policy_options or {},
            victim=victim,
            enable_chunked_prefill=enable_chunked_prefill,
            delay_factor=delay_factor,
            max_preemptions=max_preemptions,
            max_loras=max_loras,
            disk_blocks=disk_blocks,
            eviction=eviction,
            max_pinned_blocks=max_pinned_blocks,
            decode_context_parallel_size=decode_context_parallel_size,
            encoder_budget=encoder_budget,
            encoder_cache_size=encoder_cache_size,
            transfer_lease=transfer_lease,
            kv_load_failure=kv_load_failure,
            kv_groups=tuple(kv_groups),
            num_speculative_tokens=num_speculative_tokens,
            async_scheduling=async_scheduling,
            eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        )
        self.clock = VirtualClock()
        if isinstance(connector, dict):
            connector = FakeConnector(**connector)
        self.scheduler = Scheduler(config, connector)
        self.executor = HistoryHashExecutor(config)
        self.requests: dict[str, Request] = {}  # everybody ever added
        self.delivered: dict[str, list[int]] = {}  # id -> tokens that came out of update()
        self._faults = RandomPreemption(preempt_probability, seed)
        self._planned: list[SchedulerOutput] = []  # not updated yet, oldest first
        self._names = itertools.count()

    def add(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 16,
        priority: int = 0,
        tenant: str | None = None,
        request_id: str | None = None,
        ignore_eos: bool = True,
        stop_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        at: float = 0.0,
        *,
        lora: str | None = None,
        images: Sequence[dict[str, Any]] = (),
        grammar: str | None = None,
        fork_of: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
    ) -> str:
        """Let a request arrive at time `at`. Returns its id.

        prompt: token ids, or how many tokens of its own. images: [{"offset", "length", "id"}], in order of offset.
        grammar="pending": it waits for grammar_ready(). fork_of: a request with the same prompt, which is then computed
        once."""
        if grammar not in (None, "pending"):
            raise ValueError(f'grammar must be None or "pending", got {grammar!r}')
        if request_id is None:
            request_id = self._new_name()
        tokens = own_tokens(request_id, prompt) if isinstance(prompt, int) else list(prompt)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=tuple(stop_token_ids)
        )
        request = Request(
            request_id,
            tokens,
            sampling,
            arrival_time=at,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            lora=lora,
            images=tuple(ImageSpan(image["offset"], image["length"], image["id"]) for image in images),
            fork_of=fork_of,
            status=RequestStatus.WAITING if grammar is None else RequestStatus.WAITING_FOR_GRAMMAR,
            ttft_target=ttft_target,
            tpot_target=tpot_target,
        )
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        self.delivered[request_id] = []
        return request_id

    def fork(self, parent: str, request_id: str | None = None) -> str:
        """A sibling that goes on from where `parent` is. Returns its id."""
        if request_id is None:
            request_id = self._new_name()
        of = self.requests[parent]
        child = Request(
            request_id,
            of.token_ids[: of.num_prompt_tokens],
            of.sampling,
            arrival_time=of.arrival_time,
            priority=of.priority,
            tenant=of.tenant,
            cache_salt=of.cache_salt,
            lora=of.lora,
        )
        self.scheduler.fork(parent, child)
        self.requests[request_id] = child
        self.delivered[request_id] = list(self.delivered[parent])
        return request_id

    def pin(self, prefix: Sequence[int], ttl: float, cache_salt: str | None = None, lora: str | None = None) -> str:
        """Keep a prefix from eviction for `ttl` seconds from now. Returns the pin's id."""
        return self.scheduler.pin(prefix, ttl, self.clock.now(), cache_salt, lora)

    def unpin(self, pin_id: str) -> bool:
        return self.scheduler.unpin(pin_id)

    def grammar_ready(self, request_id: str) -> None:
        self.scheduler.grammar_ready(request_id)

    def _new_name(self) -> str:
        return next(name for i in self._names if (name := f"r{i}") not in self.requests)

    def schedule(self) -> SchedulerOutput:
        """Plan a step at the clock's time. Several may be planned before the first is updated."""
        self._faults.before_step(self.scheduler)
        output = self.scheduler.schedule(self.clock.now())
        self._planned.append(output)
        return output

    def update(
        self,
        output: SchedulerOutput,
        tokens: dict[str, list[int]] | None = None,
        drafts: dict[str, list[int]] | None = None,
        kv_arrived: Sequence[str] = (),
        kv_failed: dict[str, list[int]] | None = None,
        kv_sent: Sequence[str] = (),
    ) -> StepOutputs:
        """Compute a planned step and take in its result. tokens: what was sampled, {id: [token, ...]}; None: the toy
        model decides. drafts: proposals for the next step, {id: [token, ...]}. kv_arrived, kv_sent: requests whose
        transfers have ended; kv_failed: {id: places in its table whose block did not come}."""
        if not any(planned is output for planned in self._planned):
            raise ValueError(f"step {output.step_id} is not planned, or was updated before")
        self._planned = [planned for planned in self._planned if planned is not output]
        rows = dict(zip(output.request_ids, output.rows.tolist(), strict=True))
        forced = None if tokens is None else {row: tokens.get(rid, []) for rid, row in rows.items()}
        result = self.executor.execute(output, forced)
        result.drafts = {rows[rid]: list(proposal) for rid, proposal in (drafts or {}).items() if rid in rows}
        result.kv_arrived, result.kv_sent = list(kv_arrived), list(kv_sent)
        result.kv_failed = {rid: list(places) for rid, places in (kv_failed or {}).items()}
        outputs = self.scheduler.update_from_output(output, result, self.clock.now())
        for rid, new in outputs.tokens().items():
            self.delivered[rid] += new
        return outputs

    def step(self) -> StepOutputs:
        return self.update(self.schedule())

    def abort(self, request_id: str) -> None:
        """Idempotent."""
        self.scheduler.abort(request_id)

    def run(self, max_steps: int = 10_000) -> dict[str, list[int]]:
        """Step until everybody is done. {id: tokens} of all requests ever added. Raises RuntimeError if it does not
        drain in `max_steps`."""
        while self._planned:
            self.update(self._planned[0])
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
            self.check_invariants()
        else:
            left = {rid: str(self.request(rid).blocked_by) for rid in self.scheduler.requests}
            raise RuntimeError(f"not drained after {max_steps} steps; live requests and why they wait: {left}")
        return {rid: request.output_token_ids for rid, request in self.requests.items()}

    def request(self, request_id: str) -> RequestView:
        """The present state of a request, live or ended."""
        return self.scheduler.view(self.requests[request_id])

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.num_free_blocks

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()


def own_tokens(name: str, length: int) -> list[int]:
    """`length` token ids, 3..242, that only `name` has."""
    return [3 + sha256(f"{name}/{i}".encode()).digest()[0] % 240 for i in range(length)]
