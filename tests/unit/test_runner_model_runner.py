"""The runner: the same bits however a request is computed, and failures that stay with their row."""

import msgspec
import numpy as np
import pytest

from kvern.sampling_params import SamplingParams
from tests.tiny_model import GREEDY, Driver, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 101, length).tolist()


def alone(model, tokens, count, sampling=GREEDY, chunk=10**6):
    """(tokens sampled, logits by position) of a request that has the runner to itself."""
    driver = Driver(model)
    driver.add(0, tokens, sampling)
    sampled = driver.run(0, count, chunk)
    return sampled, {position: line for (_, position), line in driver.logits.items()}


def assert_same_logits(driver, row, want):
    got = {position: line for (r, position), line in driver.logits.items() if r == row}
    assert got.keys() <= want.keys()
    assert got
    for position, line in got.items():
        assert np.array_equal(line, want[position]), f"row {row}, position {position}"


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_bits(model, chunk):
    """CASES B038."""
    want = alone(model, prompt(150), 5)
    got = alone(model, prompt(150), 5, chunk=chunk)
    assert got[0] == want[0]
    assert all(np.array_equal(got[1][p], want[1][p]) for p in want[1])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_31_neighbours_change_no_bits(architecture, dtype):
    """Decodes, whole prompts and chunks of prompts mixed in every step, rows ending and being reused meanwhile."""
    model = tiny_model(dtype, architecture=architecture, sliding_window=60 if architecture == "mistral" else None)
    lengths = [200, 1, 17, 128, 129, 64, 3, 90] * 4
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths)]
    want = {i: alone(model, prompts[i], 12) for i in range(8)}
    rng = np.random.default_rng(5)
    driver = Driver(model, num_blocks=600)
    sampled = {row: [] for row in range(32)}
    waiting = list(range(32))
    for _ in range(60):
        if waiting:
            for row in waiting[:5]:
                driver.add(row, prompts[row])
            waiting = waiting[5:]
        amounts = {}
        for row, (computed, known, _) in driver.rows.items():
            missing = known - computed
            amounts[row] = missing if missing == 1 else int(rng.integers(1, missing + 1))
        order = rng.permutation(list(amounts)).tolist()
        result = driver.step({row: amounts[row] for row in order})
        for i, row in enumerate(order):
            sampled[row] += result.token_ids[i, : result.count[i]].tolist()
            if len(sampled[row]) == 12:
                driver.drop(row)
        if not driver.rows:
            break
    assert not driver.rows
    for row in range(8):
        assert sampled[row] == want[row][0]
        assert_same_logits(driver, row, want[row][1])


def test_rows_are_reused_and_nothing_of_the_last_occupant_is_seen(model):
    want = alone(model, prompt(40, 1), 8)
    driver = Driver(model, num_blocks=8)
    driver.add(0, prompt(90, 2))
    driver.run(0, 3)
    driver.drop(0)
    driver.logits.clear()
    driver.add(0, prompt(40, 1))
    assert driver.run(0, 8) == want[0]
    assert_same_logits(driver, 0, want[1])


def test_a_cached_prefix_changes_no_bits(model):
    tokens = prompt(100)
    want = alone(model, tokens, 6)
    driver = Driver(model)
    driver.add(0, tokens)
    driver.run(0, 1)
    driver.add(1, tokens, computed=96, blocks=driver.rows[0][2][:6])
    assert driver.run(1, 6) == want[0]
    assert_same_logits(driver, 1, want[1])


def test_equal_prompts_share_blocks_within_a_step(model):
    tokens = prompt(100)
    want = alone(model, tokens, 6)
    driver = Driver(model)
    driver.add(1, tokens)
    driver.rows[1][2][:] = [driver.free.pop(0) for _ in range(6)]
    driver.add(0, tokens, computed=96, blocks=driver.rows[1][2])
    driver.step({0: 4, 1: 100})
    assert driver.run(0, 5) == want[0][1:]
    assert driver.run(1, 5) == want[0][1:]
    assert_same_logits(driver, 0, want[1])


def test_a_copied_block_is_as_good_as_the_first(model):
    tokens = prompt(32)
    want = alone(model, tokens, 6)
    driver = Driver(model)
    driver.add(0, tokens)
    driver.run(0, 1)
    source, copy = driver.rows[0][2][1], driver.free.pop(0)
    driver.add(1, tokens, computed=31, blocks=[driver.rows[0][2][0], copy])
    driver.step({1: 1}, blocks_to_copy=[(source, copy)])
    assert driver.run(1, 5) == want[0][1:]
    assert_same_logits(driver, 1, want[1])


def test_a_request_that_comes_back_goes_on_where_it_was(model):
    """Preempted, recomputed with its output: the same tokens, and penalties that know the prompt from the output."""
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4)
    want = alone(model, prompt(50), 12, sampling)
    driver = Driver(model)
    driver.add(3, prompt(50), sampling)
    first = driver.run(3, 5)
    driver.rows.pop(3)
    driver.add(2, prompt(50), sampling, output=first)
    driver.step({2: 30}, preempted_rows=[3])
    assert first + driver.run(2, 7) == want[0]
    assert_same_logits(driver, 2, want[1])


def test_penalties_know_every_token_sampled(model):
    """Two tokens far above the rest take turns as each is made less likely."""
    bias = {5: 100.0, 6: 100.0}
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, logit_bias=bias)
    sampled, logits = alone(model, prompt(20), 12, sampling)
    for i, token in enumerate(sampled):
        counts = np.array([sampled[:i].count(t) for t in bias])
        scores = logits[20 + i][list(bias)] - 2.0 * counts - 2.0 * (counts > 0)
        assert token == list(bias)[int(scores.argmax())]
    plain, _ = alone(model, prompt(20), 12, SamplingParams(temperature=0.0, logit_bias=bias))
    assert plain != sampled


def test_sampling_depends_on_seed_and_position_only(model):
    sampling = SamplingParams(temperature=1.0, seed=7)
    want = alone(model, prompt(20), 10, sampling)[0]
    driver = Driver(model)
    driver.add(5, prompt(9, 3), SamplingParams(temperature=1.0, seed=8))
    driver.run(5, 4)
    driver.add(9, prompt(20), sampling)
    got = []
    for _ in range(10):
        result = driver.step({5: 1, 9: driver.rows[9][1] - driver.rows[9][0]})
        got.append(int(result.token_ids[1, 0]))
    assert got == want


def test_logprobs_are_of_the_raw_logits(model):
    driver = Driver(model)
    driver.add(0, prompt(10), msgspec.structs.replace(GREEDY, logprobs=3))
    driver.add(1, prompt(10, 1))
    result = driver.step({0: 10, 1: 10})
    assert result.logprobs.keys() == {0}
    logits = driver.logits[0, 10].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    (entry,) = result.logprobs[0]
    assert entry.token_ids[0] == result.token_ids[0, 0] == logits.argmax()
    assert entry.token_ids[1:] == np.argsort(-logits)[:3].tolist()
    np.testing.assert_allclose(entry.logprobs, logprobs[entry.token_ids], atol=1e-5)


def test_prompt_logprobs_are_the_same_in_any_chunks(model):
    """CASES B043: every prompt token but the first, each once, whatever the chunks."""
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    tokens = prompt(70)

    def scored(chunk):
        driver = Driver(model)
        driver.add(4, prompt(30, 1))
        driver.run(4, 1)
        driver.add(0, tokens, sampling)
        found = []
        while driver.rows[0][0] < 70:
            result = driver.step({4: 1, 0: min(chunk, 70 - driver.rows[0][0])})
            if 0 in result.prompt_logprobs:
                first, entries = result.prompt_logprobs[0]
                assert first == len(found) + 1
                found += entries
        assert not driver.step({4: 1, 0: 1}).prompt_logprobs
        return found

    whole = scored(70)
    assert [entry.token_ids[0] for entry in whole] == tokens[1:]
    assert all(len(entry.token_ids) == 3 for entry in whole)
    assert scored(1) == scored(7) == scored(69) == whole
    # The last entry comes from the logits that a prompt shorter by one token samples from.
    logits = alone(model, tokens[:-1], 1)[1][69].astype(np.float64)
    assert whole[-1].logprobs[0] == pytest.approx(logits[tokens[-1]] - np.log(np.exp(logits).sum()), abs=1e-5)


def test_the_next_occupant_of_a_row_is_not_scored(model):
    driver = Driver(model)
    driver.add(0, prompt(40), msgspec.structs.replace(GREEDY, prompt_logprobs=0))
    assert driver.step({0: 20}).prompt_logprobs
    driver.drop(0)
    driver.add(0, prompt(40))
    assert not driver.step({0: 20}).prompt_logprobs


def test_a_prompt_of_one_token_has_nothing_to_score(model):
    driver = Driver(model)
    driver.add(0, [7], msgspec.structs.replace(GREEDY, prompt_logprobs=0))
    result = driver.step({0: 1})
    assert not result.prompt_logprobs
    assert result.count.tolist() == [1]


def test_a_request_that_comes_back_with_output_is_not_scored_again(model):
    driver = Driver(model)
    driver.add(0, prompt(20), msgspec.structs.replace(GREEDY, prompt_logprobs=0), output=[5])
    assert not driver.step({0: 21}).prompt_logprobs


def test_logits_that_are_not_finite_fail_their_row_alone():
    """CASES B067. A token whose embedding is broken spoils its own request, and nobody who gets its blocks."""
    model = tiny_model()
    want = alone(model, prompt(40, 3), 6)
    model.embedding.table[100] = float("nan")
    good = [t % 100 for t in prompt(40, 3)]
    assert good == prompt(40, 3), "the good prompt must not hold the broken token"
    driver = Driver(model)
    driver.add(0, [1, 2, 100] * 9)
    driver.add(1, good)
    driver.add(2, [1, 100, 3], msgspec.structs.replace(GREEDY, prompt_logprobs=1))
    result = driver.step({0: 27, 1: 40, 2: 3})
    assert result.errors.keys() == {0, 2}
    assert result.count.tolist() == [0, 1, 0]
    assert not result.prompt_logprobs
    driver.drop(0)
    driver.drop(2)
    assert [int(result.token_ids[1, 0]), *driver.run(1, 5)] == want[0]
    del driver.logits[0, 27]
    driver.add(0, good)
    assert driver.run(0, 6) == want[0]
    assert_same_logits(driver, 0, want[1])
    assert_same_logits(driver, 1, want[1])


def test_an_output_without_tokens_is_applied(model):
    driver = Driver(model)
    driver.add(0, prompt(16))
    driver.run(0, 1)
    driver.drop(0)
    result = driver.step({}, blocks_to_copy=[(1, 2)], blocks_to_zero=[1])
    assert result.token_ids.shape == (0, 1)
    arena = driver.runner.caches[0].arena
    assert not arena[:, 1].any()
    assert arena[:, 2].any()


@pytest.mark.parametrize("moves", ["blocks_to_swap_in", "blocks_to_swap_out"])
def test_swapping_without_a_host_tier_is_refused(model, moves):
    with pytest.raises(ValueError, match="host tier"):
        Driver(model).step({}, **{moves: [(1, 1)]})


def test_many_rows_of_logits_come_in_slices(model, monkeypatch):
    driver = Driver(model)
    for row in range(10):
        driver.add(row, prompt(5, row))
    want = driver.step(dict.fromkeys(range(10), 5))
    monkeypatch.setattr("kvern.runner.model_runner._LOGITS_ROWS", 3)
    again = Driver(model)
    for row in range(10):
        again.add(row, prompt(5, row))
    got = again.step(dict.fromkeys(range(10), 5))
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.count.tolist() == [1] * 10
