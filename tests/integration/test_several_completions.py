"""n > 1: one prompt, computed once, and n texts that are those of n independent requests; best_of."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvern import LLM, SamplingParams
from kvern.config import SchedulerConfig
from kvern.engine.core import EngineCore
from kvern.engine.messages import AddRequest
from kvern.outputs import RequestOutput
from kvern.sampling_params import InvalidRequest, child_seed
from kvern.scheduler.scheduler import Scheduler
from kvern.testing.server import ServerProcess
from kvern.testing.toy import HistoryHashExecutor

PROMPT = "a prompt that fills several blocks of the cache, and not the last one"


def make_llm(**options: Any) -> LLM:
    given = {"max_model_len": 400, "num_blocks": 100, "check_invariants": True} | options
    return LLM("toy:history-hash", **given)


def computed(llm: LLM) -> int:
    return llm._client.core.stats().scheduled_tokens


def alone(n: int, seed: int, **params: Any) -> list[list[int]]:
    """The tokens of n independent requests, with the seeds of n completions."""
    with make_llm() as llm:
        each = [SamplingParams(seed=child_seed(seed, i), **params) for i in range(n)]
        return [output.outputs[0].token_ids for output in llm.generate([PROMPT] * n, each)]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 16}, {"async_scheduling": "on"}, {"preempt_probability": 0.2}], ids=str
)
def test_the_prompt_is_computed_once(cached: bool, options: dict[str, Any]) -> None:
    n, length = 5, 12
    expected = alone(n, 3, max_tokens=length, ignore_eos=True)
    with make_llm(enable_prefix_caching=cached, **options) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(n=n, seed=3, max_tokens=length, ignore_eos=True))
        assert tokens_of(output) == expected
        # Each completion but the first computes the last token of the prompt itself, to sample from it.
        if "preempt_probability" not in options:
            assert computed(llm) == len(PROMPT) + n * (length - 1) + (n - 1)


@pytest.mark.parametrize("cached", [True, False])
def test_prompt_logprobs_are_asked_of_the_first_only(cached: bool) -> None:
    n = 3
    expected = alone(n, 1, max_tokens=4, ignore_eos=True)
    with make_llm(enable_prefix_caching=cached) as llm:
        params = SamplingParams(n=n, seed=1, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
        (output,) = llm.generate(PROMPT, params)
        assert tokens_of(output) == expected
        assert len(output.prompt_logprobs or []) == len(PROMPT)
        assert computed(llm) == len(PROMPT) + n * 3 + (n - 1)


@pytest.mark.parametrize("cached", [True, False])
def test_the_first_ends_before_the_others_begin(cached: bool) -> None:
    """With one token each, or one row for all, nobody is there to share with; the texts are the same."""
    with make_llm(enable_prefix_caching=cached, max_num_seqs=1) as llm:
        for max_tokens in (1, 6):
            (output,) = llm.generate(PROMPT, SamplingParams(n=4, seed=8, max_tokens=max_tokens, ignore_eos=True))
            assert tokens_of(output) == alone(4, 8, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_the_first_is_aborted(steps: int) -> None:
    config = SchedulerConfig(
        num_blocks=64, block_size=4, max_model_len=200, max_num_batched_tokens=20, enable_prefix_caching=False
    )
    core = EngineCore(HistoryHashExecutor(config), Scheduler(config), check_invariants=True)
    prompt = [3 + ord(char) for char in PROMPT]
    for i in range(3):
        sampling = SamplingParams(seed=child_seed(5, i), max_tokens=6, ignore_eos=True)
        fork_of = "r_0" if i else None
        core.add(
            AddRequest(
                request_id=f"r_{i}", prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0, fork_of=fork_of
            )
        )
    got: dict[str, list[int]] = {"r_1": [], "r_2": []}
    for step in range(40):
        if step == steps:
            core.abort(["r_0"])
        if core.has_work():
            report = core.step()
            for request_id, new in zip(report.request_ids, report.token_ids, strict=True):
                got.setdefault(request_id, []).extend(new)
    assert not core.has_work()
    assert [got["r_1"], got["r_2"]] == alone(3, 5, max_tokens=6, ignore_eos=True)[1:]
    if steps < 4:  # the second takes its place, so the prompt is computed by those two at most
        assert core.stats().scheduled_tokens == 20 * steps + len(PROMPT) + 2 * 5 + 1
    assert not core.scheduler.state.siblings


def test_best_of() -> None:
    params: dict[str, Any] = {"seed": 2, "max_tokens": 5, "ignore_eos": True}
    with make_llm() as llm:
        (every,) = llm.generate(PROMPT, SamplingParams(n=6, logprobs=0, **params))
        (output,) = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, **params))
        totals = {tuple(c.token_ids): c.cumulative_logprob or 0.0 for c in every.outputs}
        best = sorted(totals, key=lambda tokens: -totals[tokens])[:2]
        assert [tuple(c.token_ids) for c in output.outputs] == best
        assert [c.index for c in output.outputs] == [0, 1]
        assert [c.cumulative_logprob for c in output.outputs] == [pytest.approx(totals[tokens]) for tokens in best]
        assert all(c.logprobs is None for c in output.outputs), "they were not asked for"
        (output,) = llm.generate(PROMPT, SamplingParams(best_of=6, logprobs=1, prompt_logprobs=0, **params))
        assert len(output.outputs[0].logprobs or []) == 5
        assert len(output.prompt_logprobs or []) == len(PROMPT)
        with pytest.raises(InvalidRequest, match="cannot be streamed"):
            next(llm.stream(PROMPT, SamplingParams(best_of=2)))


def test_over_http() -> None:
    with ServerProcess(num_blocks=300, max_model_len=400, no_enable_prefix_caching=True) as server:
        post = httpx.Client(base_url=server.url, timeout=30).post
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 4, "max_tokens": 5, "ignore_eos": True}
        every = post("/v1/completions", json=body | {"n": 6, "logprobs": 0}).json()
        assert server.metrics()["kvern_scheduled_tokens_total"] == len(PROMPT) + 6 * 4 + 5
        singles = [
            post("/v1/completions", json=body | {"seed": child_seed(4, i)}).json()["choices"][0]["text"]
            for i in range(6)
        ]
        assert [choice["text"] for choice in every["choices"]] == singles

        totals = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]}
        best = post("/v1/completions", json=body | {"prompt": [PROMPT, PROMPT], "best_of": 6, "n": 2}).json()
        expected = sorted(totals, key=lambda text: -totals[text])[:2] * 2
        assert len({*totals}) == 6 and [choice["text"] for choice in best["choices"][:2]] == expected[:2]
        assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
        assert [choice["logprobs"] for choice in best["choices"]] == [None] * 4
        assert best["usage"]["completion_tokens"] == 2 * 6 * 5
        assert best["usage"]["prompt_tokens"] == 2 * len(PROMPT)
        echoed = post("/v1/completions", json=body | {"best_of": 6, "echo": True, "logprobs": 1}).json()["choices"]
        assert echoed[0]["text"] == PROMPT + expected[0]
        assert len(echoed[0]["logprobs"]["tokens"]) == len(PROMPT) + 5

        beams = post("/v1/completions", json=body | {"use_beam_search": True, "beam_width": 4, "n": 2, "logprobs": 0})
        assert beams.status_code == 200, beams.text
        scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in beams.json()["choices"]]
        assert len(scores) == 2 and scores[0] > scores[1] > max(totals.values()) - 1e-6
        assert server.wait_idle()
