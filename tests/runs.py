"""The same requests through engines of different kinds, to compare what each of them said."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvern.config import SchedulerConfig
from kvern.engine.core import EngineCore
from kvern.engine.messages import AddRequest, WireLogprobs
from kvern.executor.inline import InlineExecutor
from kvern.runner.cache_layout import cache_layout
from kvern.runner.model_runner import ModelRunner
from kvern.sampling_params import SamplingParams
from kvern.scheduler.scheduler import Scheduler
from kvern.step import Int32
from kvern.testing.faults import RandomPreemption
from kvern.testing.toy import HistoryHashExecutor, reference_tokens
from tests.tiny_model import tiny_model


class Said(NamedTuple):
    """What a request was told, put together."""

    tokens: list[int]
    logprobs: list[WireLogprobs]
    prompt_logprobs: list[WireLogprobs]
    end: str
    stop_reason: int | None


class ToyProphet:
    """Proposes what the greedy toy model will say, every third time with a mistake."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def propose(self, token_ids: Int32) -> list[int]:
        drafts = reference_tokens(token_ids.tolist(), self.num_tokens)
        if len(token_ids) % 3 == 0:
            drafts[len(token_ids) % self.num_tokens] = 3
        return drafts


def requests_of_all_kinds(vocab_size: int) -> list[AddRequest]:
    """Greedy, sampled, penalised, biased, stopped, with logprobs of the text and the prompt; some share a prefix."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocab_size, 200).tolist()
    loop = (ids[:4] * 6)[:22]
    prompts = [loop, ids[:9], ids[:30], loop[:21], ids[:30], ids[40:41], ids[:27], loop, ids[50:70], loop, ids[:16]]
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 3, "logprobs": 1},
        {"frequency_penalty": 1.5},
        {"presence_penalty": -1.0, "repetition_penalty": 1.2, "logprobs": 0},
        {"temperature": 0.7, "seed": 4, "top_p": 0.8, "frequency_penalty": 0.5},
        {"stop_token_ids": tuple(range(3, vocab_size, 9)), "min_tokens": 5, "logprobs": 1},
        {"logit_bias": {7: 5.0, 11: -100.0}},
        {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 0},
        {"temperature": 1.3, "seed": -1, "stop_token_ids": tuple(range(3, vocab_size, 9))},
        {"max_tokens": None},
    ]
    return [
        AddRequest(
            request_id=f"r{i}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 34, "ignore_eos": True, **kind}),
            arrival_time=0.0,
        )
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def make_core(kind: str, proposer: Any = None, preempt: float = 0.0, **limits: Any) -> EngineCore:
    """kind: "toy", or tiny and random: "llama", or "mistral" that sees 10 tokens back."""
    limits = {"num_blocks": 120, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8, **limits}
    if kind == "toy":
        config = SchedulerConfig(**limits)
        executor: Any = HistoryHashExecutor(config, proposer=proposer)
    else:
        model = tiny_model(architecture=kind, sliding_window=10 if kind == "mistral" else None)
        config = SchedulerConfig(kv_groups=cache_layout(model.config).groups, **limits)
        executor = InlineExecutor(ModelRunner(model, config, proposer))
    faults = RandomPreemption(preempt, 5).before_step if preempt else None
    return EngineCore(executor, Scheduler(config), check_invariants=True, before_step=faults)


def run(core: EngineCore, requests: list[AddRequest], before_step: Any = None) -> dict[str, Said]:
    """Everybody's words; requests arrive two a step. before_step(core, number of the step), for mischief."""
    said: dict[str, Said] = {r.request_id: Said([], [], [], "", None) for r in requests}
    arriving, step = list(requests), 0
    while arriving or core.has_work():
        for request in arriving[:2]:
            core.add(request)
        arriving = arriving[2:]
        if before_step is not None:
            before_step(core, step)
        report = core.step()
        for request_id, tokens in zip(report.request_ids, report.token_ids, strict=True):
            assert not said[request_id].end, f"{request_id} got tokens after its end"
            said[request_id].tokens.extend(tokens)
        for request_id, update in report.updates.items():
            entry = said[request_id]
            entry.logprobs.extend(update.logprobs or [])
            if update.prompt_logprobs is not None:  # after a preemption they may be told again
                have = len(entry.prompt_logprobs) + 1
                entry.prompt_logprobs.extend(update.prompt_logprobs[have - update.prompt_logprobs_start :])
            if update.finish_reason is not None:
                assert not entry.end, f"{request_id} ended twice"
                said[request_id] = entry._replace(end=update.finish_reason, stop_reason=update.stop_reason)
        step += 1
        assert step < 2000
    assert not core._planned, "a step that was planned was left behind"
    core.shutdown()
    return said
