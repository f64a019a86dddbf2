"""Drafts change the time a text takes and nothing else: verification, the runner, the scheduler's handling of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvern.sampling.sampler import Sampler
from kvern.sampling_params import SamplingParams
from kvern.speculative.ngram import NgramProposer
from kvern.speculative.verify import sample_and_verify
from kvern.step import ModelRunnerOutput, TokenLogprobs
from kvern.testing import SchedulerHarness
from tests.tiny_model import Driver, tiny_model

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 40


def int32(values: Any) -> Any:
    return np.array(values, dtype=np.int32)


def lines(*tokens: int) -> Any:
    """Logits whose argmax are these tokens."""
    logits = np.random.default_rng(len(tokens)).standard_normal((len(tokens), VOCAB)).astype(np.float32)
    logits[np.arange(len(tokens)), list(tokens)] = 9.0
    return logits


class TestVerify:
    @pytest.mark.parametrize("accepted", [0, 1, 2, 3])
    def test_none_some_or_all_are_accepted(self, accepted: int) -> None:
        """B058: one token more than was accepted, whatever that is."""
        text, drafts = [5, 6, 7, 8], [5, 6, 7]
        if accepted < 3:
            drafts[accepted] = 0
        sampler = Sampler(VOCAB)
        sampler.add_row(3, GREEDY, int32([1]), 1)
        result = sample_and_verify(sampler, lines(*text), int32([3]), int32([1]), {3: drafts})
        assert result.count.tolist() == [accepted + 1]
        assert result.token_ids[0, : accepted + 1].tolist() == text[: accepted + 1]

    def test_rows_with_and_without_drafts(self) -> None:
        sampler = Sampler(VOCAB)
        for row in (0, 1, 2):
            sampler.add_row(row, GREEDY, int32([1]), 1)
        logits = np.concatenate([lines(5), lines(6, 7, 8), lines(9, 10)])
        result = sample_and_verify(sampler, logits, int32([2, 0, 1]), int32([1, 1, 1]), {0: [6, 7], 1: [4]})
        assert result.count.tolist() == [1, 3, 1]
        assert [row[:n].tolist() for row, n in zip(result.token_ids, result.count, strict=True)] == [
            [5],
            [6, 7, 8],
            [9],
        ]

    def test_nothing_to_sample(self) -> None:
        result = sample_and_verify(Sampler(VOCAB), np.zeros((0, VOCAB), np.float32), int32([]), int32([]), {})
        assert result.token_ids.shape == (0, 1)

    def test_a_failure_at_a_draft_ends_the_run_before_it(self) -> None:
        """Without drafts the tokens before it would have been delivered; the failure is met again in the next step."""
        logits = np.concatenate([lines(5, 6, 7), lines(5, 6, 7)])
        logits[1] = logits[3] = np.nan
        sampler = Sampler(VOCAB)
        sampler.add_row(0, GREEDY, int32([1]), 1)
        sampler.add_row(1, GREEDY, int32([1]), 1)
        result = sample_and_verify(sampler, logits, int32([0, 1]), int32([1, 1]), {0: [5, 6], 1: [5, 6]})
        assert result.count.tolist() == [1, 0] and list(result.errors) == [1]

    @pytest.mark.parametrize(
        "params",
        [
            {"frequency_penalty": 2.0},
            {"frequency_penalty": -2.0},
            {"presence_penalty": 1.5, "repetition_penalty": 1.3},
            {"logit_bias": {5: -100.0}},
            {"min_tokens": 3, "stop_token_ids": (6,)},
            {"temperature": 0.8, "seed": 3},
            {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 7, "frequency_penalty": 1.0},
        ],
        ids=lambda p: next(iter(p)),
    )
    def test_each_position_is_sampled_with_its_own_history(self, params: dict[str, Any]) -> None:
        """B054. Logits that hardly change, so that penalties decide; drafts right in part; logprobs asked."""
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 50, "logprobs": 2, **params})
        base = np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32)
        base[[5, 6, 7]] += 2.5
        prompt = [5, 9, 7]

        def logits_at(position: int) -> Any:
            return base + 0.3 * np.random.default_rng(position).standard_normal(VOCAB).astype(np.float32)

        plain = Sampler(VOCAB)
        plain.add_row(0, sampling, int32(prompt), len(prompt))
        text, entries = [], []
        for position in range(3, 43):
            out = plain.sample(logits_at(position)[None], int32([0]), int32([position]))
            text.append(int(out.token_ids[0]))
            entries.append(out.logprobs[0])
            plain.append(int32([0]), out.token_ids)

        drafting, rng = Sampler(VOCAB), np.random.default_rng(7)
        drafting.add_row(0, sampling, int32(prompt), len(prompt))
        got: list[int] = []
        told: list[Any] = []
        steps = 0
        while len(got) < 35:
            drafts = text[len(got) : len(got) + int(rng.integers(0, 5))]
            if drafts and rng.random() < 0.6:
                drafts[int(rng.integers(len(drafts)))] = int(rng.integers(VOCAB))
            start = 3 + len(got)
            logits = np.stack([logits_at(p) for p in range(start, start + len(drafts) + 1)])
            result = sample_and_verify(drafting, logits, int32([0]), int32([start]), {0: drafts} if drafts else {})
            got += result.token_ids[0, : result.count[0]].tolist()
            assert len(result.logprobs[0]) == result.count[0]
            told += result.logprobs[0]
            steps += 1
        assert got == text[: len(got)] and told == entries[: len(got)]
        assert steps < len(got)


class TestRunner:
    @pytest.fixture(scope="class")
    def model(self) -> Any:
        return tiny_model()

    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=5, logprobs=1)])
    def test_tokens_logits_and_logprobs_with_any_drafts(self, model: Any, sampling: SamplingParams) -> None:
        prompt = np.random.default_rng(0).integers(0, 101, 30).tolist()
        plain = Driver(model)
        plain.add(0, prompt, sampling)
        text = plain.run(0, 40)
        driver, rng = Driver(model), np.random.default_rng(1)
        driver.add(0, prompt, sampling)
        got = driver.run(0, 1)
        while len(got) < 30:
            drafts = text[len(got) : len(got) + int(rng.integers(1, 5))]
            if rng.random() < 0.5:
                drafts[int(rng.integers(len(drafts)))] += 1
            driver.rows[0][1] += len(drafts)
            result = driver.step({0: 1 + len(drafts)}, draft_tokens={0: drafts})
            count = int(result.count[0])
            driver.rows[0][0] -= len(drafts) + 1 - count
            driver.rows[0][1] -= len(drafts) + 1 - count
            got += result.token_ids[0, :count].tolist()
            assert (len(result.logprobs[0]) == count) if sampling.logprobs is not None else not result.logprobs
        assert got == text[: len(got)]
        for key, line in driver.logits.items():
            assert np.array_equal(line, plain.logits[key]), f"(row, position) {key}"

    def test_proposals_come_with_the_tokens(self, model: Any) -> None:
        driver = Driver(model)
        driver.runner.proposer = NgramProposer(3)
        prompt = [4, 8, 15] * 6
        driver.add(0, prompt)
        assert not driver.step({0: 9}).drafts  # the prompt is not whole yet: nothing was sampled
        result = driver.step({0: 9})
        known = [*prompt, int(result.token_ids[0, 0])]
        assert result.drafts.get(0, []) == NgramProposer(3).propose(int32(known))


class TestScheduler:
    def test_blocks_for_drafts_preempt_nobody(self) -> None:
        """Two requests fill the pool to the last block; their drafts would need two more."""
        h = SchedulerHarness(num_blocks=5, block_size=4, num_speculative_tokens=3, enable_prefix_caching=False)
        a, b = h.add(7, max_tokens=20), h.add(7, max_tokens=20)
        h.update(h.schedule(), tokens={a: [5], b: [6]}, drafts={a: [1, 2, 3], b: [1, 2, 3]})
        out = h.schedule()
        assert out.num_scheduled_tokens == {a: 1, b: 1} and not out.draft_tokens and not out.preempted_req_ids

    @pytest.mark.parametrize("k", [0, 3])
    def test_drafts_do_not_make_a_request_end_earlier_for_lack_of_blocks(self, k: int) -> None:
        h = SchedulerHarness(num_blocks=4, block_size=4, num_speculative_tokens=k, enable_prefix_caching=False)
        rid = h.add(5, max_tokens=50)
        while h.scheduler.has_work():
            h.update(h.schedule(), drafts={rid: [9] * k} if k else None)
            h.check_invariants()
        assert len(h.delivered[rid]) == 8  # 12 slots: 5 + 7 computed, and the token after them

    def test_logprobs_end_where_the_tokens_end(self) -> None:
        """B053: a stop id among accepted drafts; the runner had gone on."""
        h = SchedulerHarness(num_speculative_tokens=3)
        rid = h.add(5, max_tokens=20, stop_token_ids=(7,))
        h.update(h.schedule(), tokens={rid: [5]}, drafts={rid: [6, 7, 8]})
        out = h.schedule()
        result = ModelRunnerOutput.of([[6, 7, 8, 9]])
        result.logprobs = {int(out.rows[0]): [TokenLogprobs([t], [-0.5], 1) for t in (6, 7, 8, 9)]}
        outputs = h.scheduler.update_from_output(out, result, 0.0)
        assert outputs.tokens() == {rid: [6, 7]}
        assert [entry.token_ids for entry in outputs.logprobs[rid]] == [[6], [7]]

    def test_totals(self) -> None:
        h = SchedulerHarness(num_speculative_tokens=3)
        rid = h.add(5, max_tokens=20)
        h.update(h.schedule(), tokens={rid: [5]}, drafts={rid: [6, 7, 8]})
        h.update(h.schedule(), tokens={rid: [6, 7, 1]}, drafts={rid: [9]})
        h.update(h.schedule(), tokens={rid: [2]})
        stats = h.scheduler.stats
        assert (stats.drafted_tokens, stats.accepted_tokens) == (4, 2)
