"""With drafts and without, an engine says the same, whatever else it has to do meanwhile."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from kvern.config import InvalidConfig
from kvern.llm import LLM
from kvern.sampling_params import SamplingParams
from kvern.speculative.ngram import NgramProposer
from tests.models import fetch
from tests.runs import Said, ToyProphet, make_core, requests_of_all_kinds, run

VOCAB = {"toy": 259, "llama": 101, "mistral": 101}
CONDITIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "crowded": {"num_blocks": 22},
    "preempted": {"preempt": 0.4, "enable_prefix_caching": False},
    "swapped": {"preempt": 0.4, "preemption": "swap", "host_blocks": 60},
    "late": {"long_prefill_token_threshold": 3, "policy": "priority"},
}


@functools.cache
def without_drafts(kind: str) -> dict[str, Said]:
    return run(make_core(kind), requests_of_all_kinds(VOCAB[kind]))


def proposer_of(kind: str, k: int) -> Any:
    return ToyProphet(k) if kind == "toy" else NgramProposer(k)


@pytest.mark.parametrize(
    ("kind", "condition"), [*itertools.product(["toy", "llama"], CONDITIONS), ("mistral", "preempted")]
)
def test_the_same_words(kind: str, condition: str) -> None:
    """B052, B054, B058."""
    options = CONDITIONS[condition]
    core = make_core(kind, proposer_of(kind, 3), num_speculative_tokens=3, **options)
    assert run(core, requests_of_all_kinds(VOCAB[kind])) == without_drafts(kind)
    stats = core.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    if "preempt" in options or condition == "crowded":
        assert stats.preemptions > 0


def test_fewer_steps() -> None:
    requests = requests_of_all_kinds(VOCAB["llama"])
    plain, drafting = make_core("llama"), make_core("llama", NgramProposer(4), num_speculative_tokens=4)
    run(plain, requests)
    run(drafting, requests)
    assert drafting.stats().generated_tokens == plain.stats().generated_tokens
    assert drafting.stats().steps < plain.stats().steps


def toy(**options: Any) -> LLM:
    llm = LLM("toy:history-hash", max_model_len=200, num_blocks=120, block_size=4, check_invariants=True, **options)
    if "speculative" in options:
        llm._client.core.executor._proposer = ToyProphet(4)  # type: ignore[attr-defined]
    return llm


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop_at", [4, 7, 11])
def test_a_stop_string_within_accepted_drafts(stop_at: int, n: int) -> None:
    """B053: text, ids, logprobs and counts are cut at the same place."""
    with toy() as plain, toy(speculative="ngram") as drafting:
        free = plain.generate(["ha ha ha ha"], SamplingParams(temperature=0.0, max_tokens=30))[0].outputs[0].text
        stop = free[stop_at : stop_at + 3]
        params = SamplingParams(temperature=0.0, max_tokens=30, stop=(stop,), logprobs=2, n=n)
        want, got = (llm.generate(["ha ha ha ha"], params)[0] for llm in (plain, drafting))
        assert got.outputs == want.outputs and len(got.outputs) == n
        for output in got.outputs:
            assert output.text == free[: free.index(stop)] and output.stop_reason == stop
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
            assert len(output.token_ids) == len(output.text) + len(stop)
        assert drafting._client.core.stats().accepted_tokens > 0


def test_the_option_with_the_toy_model() -> None:
    prompts = ["a b c d a b c d a b", "to be or not to be or not to"]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, frequency_penalty=-1.0)
    with LLM("toy:history-hash", num_blocks=200, speculative="ngram", num_speculative_tokens=2) as drafting:
        got = drafting.generate(prompts, params)
        assert drafting._client.core.stats().drafted_tokens > 0
    with LLM("toy:history-hash", num_blocks=200) as plain:
        assert [o.outputs for o in plain.generate(prompts, params)] == [o.outputs for o in got]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_speculative_tokens": 3}, "speculative is none"),
        ({"speculative": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"speculative": "ngram", "num_speculative_tokens": 33}, "num_speculative_tokens"),
        ({"speculative": "eagle"}, "must be one of none, ngram"),
        ({"speculative": "ngram", "async_scheduling": "on"}, "async_scheduling"),
        ({"speculative": "ngram", "max_num_seqs": 100, "max_num_batched_tokens": 499}, "take 500 tokens a step"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        LLM("toy:history-hash", **options)


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_repeats_a_text_in_fewer_steps() -> None:
    area = "def area(width, height):\n    return width * height\n"
    text = area + "\n\ndef edge(width, height):\n    return 2 * (width + height)\n"
    prompt = f"Here is some code:\n\n{text}\n\nHere is the same code again:\n\ndef area(width"
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.3),
        SamplingParams(temperature=0.8, seed=2, max_tokens=40, n=2),
    ]
    outputs, steps = [], []
    for options in ({}, {"speculative": "ngram"}):
        with LLM(str(fetch("smollm2")), max_model_len=512, num_blocks=200, **options) as llm:
            outputs.append([o.outputs for o in llm.generate([prompt] * 3, params)])
            before = llm._client.core.stats().steps
            llm.generate([prompt], params[0])
            steps.append(llm._client.core.stats().steps - before)
    assert outputs[0] == outputs[1]
    assert steps[1] < 0.6 * steps[0]
