"""Gemma 3 270M: fifteen layers with a window of 512 tokens, three without, one pool of blocks for all."""

import pytest

from kvern.llm import LLM
from kvern.sampling_params import SamplingParams
from tests.models import fetch

pytestmark = [pytest.mark.slow, pytest.mark.model]

WINDOW, SIZE = 512, 16
STORY = "The river ran past the mill, and the miller counted the sacks that came and went. "
LONG = "".join(f"Day {i}. {STORY}" for i in range(40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(fetch("gemma270m")), max_model_len=2048, max_num_batched_tokens=256, check_invariants=True) as model:
        yield model


def said(output):
    (completion,) = output.outputs
    return list(completion.token_ids), completion.logprobs


def test_window_blocks_are_given_back_and_prefixes_are_hit_in_all_groups(llm):
    scheduler = llm._client.core.scheduler
    assert sorted(scheduler.config.kv_groups) == ["full", *[f"window:{WINDOW}"] * 5]
    prompt = llm.get_tokenizer().encode(LONG)
    assert len(prompt) > 800
    held = [
        scheduler.config.num_blocks - 1 - scheduler.num_free_blocks
        for delta in llm.stream({"prompt_token_ids": prompt}, GREEDY)
        if delta.token_ids and delta.finish_reason is None
    ]
    whole = -(-len(prompt) // SIZE)
    assert len(held) > 5
    assert whole + 5 * (WINDOW // SIZE) <= held[-1] <= whole + 2 + 5 * (WINDOW // SIZE + 1)

    (first,) = llm.generate([prompt], GREEDY)
    (again,) = llm.generate([prompt], GREEDY)
    assert first.metrics.num_cached_tokens >= len(prompt) // SIZE * SIZE - SIZE
    assert again.metrics.num_cached_tokens == first.metrics.num_cached_tokens
    with_another_end = [*prompt[:-40], 1000, 1001]
    (hit,) = llm.generate([with_another_end], GREEDY)
    assert hit.metrics.num_cached_tokens > len(prompt) - 40 - 2 * SIZE
    salted = [prompt[0], 999, *prompt[2:]]
    assert llm.generate([salted], GREEDY)[0].metrics.num_cached_tokens == 0
    assert said(again) == said(first)


def test_alone_as_in_company_cached_or_not(llm):
    prompts = [LONG, "The capital of France is", LONG[: len(LONG) // 2]]
    alone = []
    for prompt in prompts:
        llm._client.core.scheduler.state.cache.reset()
        (output,) = llm.generate([prompt], GREEDY)
        alone.append(said(output))
    llm._client.core.scheduler.state.cache.reset()
    for _ in range(2):
        assert [said(output) for output in llm.generate(prompts, GREEDY)] == alone
