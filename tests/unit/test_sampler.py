"""The sampler: greedy, penalties, cuts, draws, logprobs; and that no row sees its neighbours."""

from functools import cache

import numpy as np
import pytest

from kvern.kernels.cpu.library import KernelsMissing
from kvern.kernels.cpu.ops import NativeOps
from kvern.sampling.logprobs import LOGPROB_FLOOR, token_logprobs
from kvern.sampling.native import native_rows
from kvern.sampling.penalties import TokenHistory
from kvern.sampling.sampler import Sampler, _first_above, sample_rows
from kvern.sampling.topk import top
from kvern.sampling_params import SamplingParams

EOS = 2

_sample_rows = sample_rows


@pytest.fixture(params=["numpy", "native"], autouse=True)
def _either(request):
    """Every test is run with both ways to compute rows."""
    global _sample_rows
    _sample_rows = native_rows(ops()) if request.param == "native" else sample_rows
    yield
    _sample_rows = sample_rows


@cache
def ops():
    try:
        return NativeOps(2)
    except KernelsMissing as exc:
        pytest.skip(str(exc))


def make_sampler(vocab_size, eos_token_ids=()):
    return Sampler(vocab_size, eos_token_ids, _sample_rows)


def sample_one(logits, sampling, position=None, tokens=(), num_prompt=None):
    logits = np.asarray(logits, dtype=np.float32)
    tokens = np.array(tokens, dtype=np.int32)
    position = len(tokens) if position is None else position
    sampler = make_sampler(len(logits), (EOS,))
    sampler.add_row(3, sampling, tokens, len(tokens) if num_prompt is None else num_prompt)
    return sampler.sample(logits[None], np.array([3], dtype=np.int32), np.array([position], dtype=np.int32))


def frequencies(logits, draws=4000, **params):
    sampler = make_sampler(len(logits), (EOS,))
    sampler.add_row(0, SamplingParams(seed=11, **params), np.zeros(1, dtype=np.int32), 1)
    block = np.tile(np.asarray(logits, dtype=np.float32), (draws, 1))
    # One row cannot stand twice in a real batch, but the result must be a function of the position alone.
    out = sampler.sample(block, np.zeros(draws, dtype=np.int32), np.arange(draws, dtype=np.int32))
    assert not out.errors
    return np.bincount(out.token_ids, minlength=len(logits))


def naive_probabilities(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """The documented order, with whole sorts."""
    x = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(x - x.max())
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k > 0:
        p[order[top_k:]] = 0
    p /= p.sum()
    running = 0.0
    for i in order:
        if running >= top_p:
            p[i] = 0
        running += p[i]
    return p / p.sum()


# ---- greedy


def test_greedy_is_the_argmax_and_the_lowest_id_on_a_tie():
    logits = np.array([[0, 3, 3, 1], [5, 5, 5, 5], [-1, -2, -1, 0]], dtype=np.float32)
    sampler = make_sampler(4)
    for row in (4, 0, 9):
        sampler.add_row(row, SamplingParams(temperature=0), np.zeros(1, dtype=np.int32), 1)
    before = logits.copy()
    out = sampler.sample(logits, np.array([4, 0, 9], dtype=np.int32), np.array([1, 1, 1], dtype=np.int32))
    assert out.token_ids.tolist() == [1, 0, 3]
    assert out.token_ids.dtype == np.int32
    assert not out.logprobs and not out.errors
    assert np.array_equal(logits, before)


def test_greedy_rows_cost_no_state():
    sampler = make_sampler(4)
    sampler.add_row(0, SamplingParams(temperature=0), np.zeros(1, dtype=np.int32), 1)
    assert not sampler._rows and not sampler._logprobs


def test_top_k_1_equals_greedy_also_on_a_tie():
    logits = [0.0, 2.0, 2.0, 2.0]
    for position in range(50):
        assert sample_one(logits, SamplingParams(seed=1, top_k=1), position).token_ids[0] == 1


# ---- bias, min_tokens, penalties


def test_logit_bias_moves_the_argmax():
    assert sample_one([1, 2, 0, 0], SamplingParams(temperature=0, logit_bias={0: 100.0, 1: -100.0})).token_ids[0] == 0


def test_min_tokens_masks_eos_and_stop_ids_until_reached():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    logits = [0, 1, 9, 8]  # EOS, then the stop id, are the likeliest
    assert sample_one(logits, params, position=1, tokens=[0]).token_ids[0] == 1
    assert sample_one(logits, params, position=2, tokens=[0, 1], num_prompt=1).token_ids[0] == 1
    assert sample_one(logits, params, position=3, tokens=[0, 1, 1], num_prompt=1).token_ids[0] == EOS


def test_min_tokens_leaves_eos_alone_when_it_would_not_end_the_request():
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert sample_one([0, 1, 9, 8], params, position=1, tokens=[0]).token_ids[0] == EOS


def test_everything_masked_fails_the_row_alone():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[0, 1])
    out = sample_one([0, 1, 2], params, position=1, tokens=[0])
    assert list(out.errors) == [3] and "masked" in out.errors[3]


def naive_penalties(logits, prompt, output, s):
    out = np.array(logits, dtype=np.float64)
    for token in set(prompt) | set(output):
        r = s.repetition_penalty
        out[token] = out[token] / r if out[token] > 0 else out[token] * r
    for token in set(output):
        out[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    return out


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"repetition_penalty": 1e-4},
        {"repetition_penalty": 100.0},
    ],
)
def test_penalties_against_the_naive_reference(params, monkeypatch):
    """B064, B108: repetition sees prompt and output, presence and frequency only the output."""
    rng = np.random.default_rng(5)
    seen = {}
    monkeypatch.setattr(
        "kvern.sampling.sampler._draw", lambda logits, sampling, number: seen.setdefault("x", logits.copy()) is None
    )
    for _ in range(20):
        logits = rng.normal(size=30).astype(np.float32) * 3
        prompt, output = rng.integers(0, 30, 12).tolist(), rng.integers(0, 30, 9).tolist()
        s = SamplingParams(seed=0, **params)
        expected = naive_penalties(logits, prompt, output, s)
        expected -= expected.max()
        tokens, num_prompt = prompt + output, len(prompt)
        greedy = sample_one(logits, SamplingParams(temperature=0, **params), tokens=tokens, num_prompt=num_prompt)
        assert expected[greedy.token_ids[0]] >= -2e-5 * np.abs(expected).max()
        if _sample_rows is not sample_rows:
            continue
        seen.clear()
        sample_one(logits, s, tokens=tokens, num_prompt=num_prompt)
        np.testing.assert_allclose(seen["x"], expected, rtol=2e-6, atol=2e-5 * np.abs(expected).max())


def test_history_grown_token_by_token_equals_history_given_at_once():
    """B064: a request that comes back after a preemption has the same prompt boundary."""
    rng = np.random.default_rng(1)
    vocab = 500
    params = SamplingParams(seed=9, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1)
    prompt = rng.integers(0, vocab, 7).astype(np.int32)
    grown = make_sampler(vocab)
    grown.add_row(5, params, prompt, 7)
    sequence = prompt.tolist()
    for step in range(300):
        logits = rng.normal(size=(1, vocab)).astype(np.float32)
        rows, positions = np.array([5], dtype=np.int32), np.array([7 + step], dtype=np.int32)
        token = grown.sample(logits, rows, positions).token_ids
        fresh = make_sampler(vocab)
        fresh.add_row(5, params, np.array(sequence, dtype=np.int32), 7)
        assert fresh.sample(logits, rows, positions).token_ids == token
        grown.append(rows, token)
        sequence.append(int(token[0]))


def test_history_holds_each_token_once_with_its_count():
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 400, 10).astype(np.int32)
    output = rng.integers(0, 400, 1000).astype(np.int32)
    history = TokenHistory(prompt, output[:100])
    for token in output[100:].tolist():
        history.extend((token,))
    expected = dict.fromkeys(prompt.tolist(), 0)
    for token in output.tolist():
        expected[token] = expected.get(token, 0) + 1
    assert dict(zip(history.ids.tolist(), history.output_counts.tolist(), strict=True)) == expected


def test_a_row_used_again_remembers_nothing():
    sampler = make_sampler(4)
    tokens = np.array([1, 1], dtype=np.int32)
    sampler.add_row(0, SamplingParams(temperature=0, presence_penalty=2.0, logprobs=1), tokens, 1)
    one = np.zeros(1, dtype=np.int32)
    logits = np.array([[0, 1, 0, 0]], dtype=np.float32)
    assert sampler.sample(logits, one, one).token_ids[0] == 0
    sampler.add_row(0, SamplingParams(temperature=0), tokens, 1)
    out = sampler.sample(logits, one, one)
    assert out.token_ids[0] == 1 and not out.logprobs
    sampler.remove_row(0)
    sampler.remove_row(0)
    sampler.append(one, one)


# ---- cuts and draws

CUTS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": -1},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "min_p": 0.05, "top_k": 5, "top_p": 0.8},
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_draws_follow_the_distribution(cuts):
    logits = np.array([1.0, 0.2, -1.5, 2.0, 2.0, -0.3, 0.9, -4.0])
    counts = frequencies(logits, **cuts)
    p = naive_probabilities(logits, **cuts)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    expected = p[kept] * counts.sum()
    chi2 = float(((counts[kept] - expected) ** 2 / expected).sum())
    limits = {0: 0.0, 1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}  # p = 0.001
    assert chi2 <= limits[int(kept.sum()) - 1]


@pytest.mark.parametrize("vocab", [5, 256, 257, 1000, 49_152])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_token_is_where_the_running_sum_passes_the_number(vocab, cuts):
    """Against whole sorts and one running sum in float64, where no border is nearer than float32 can see."""
    from kvern.sampling.rng import uniform

    rng = np.random.default_rng(vocab)
    compared = 0
    for position in range(6):
        logits = np.round(rng.normal(size=vocab) * 2, 1 if vocab < 300 else 6).astype(np.float32)  # with ties
        p = naive_probabilities(logits, **cuts)
        running = np.cumsum(p)
        number = uniform(77, position)
        expected = int(np.searchsorted(running, number, side="right"))
        if np.abs(running - number).min() < 1e-5 * min(1.0, 10 * p[expected]):
            continue
        compared += 1
        assert sample_one(logits, SamplingParams(seed=77, **cuts), position).token_ids[0] == expected
    assert compared >= 3


def test_top_p_of_a_flat_row_keeps_the_lowest_ids():
    counts = frequencies(np.zeros(1000), draws=3000, top_p=0.1)
    assert set(np.flatnonzero(counts)) <= set(range(100)) and (counts[:100] > 0).all()


def test_masked_tokens_are_never_drawn():
    logits = np.full(600, -np.inf, dtype=np.float32)
    logits[[5, 300, 599]] = 1.0
    counts = frequencies(logits, draws=2000)
    assert set(np.flatnonzero(counts)) == {5, 300, 599}


def test_rounding_never_leads_to_a_token_without_weight():
    cumulative = np.array([1.0, 3.0, 3.0])
    assert [_first_above(cumulative, target) for target in (0.0, 1.0, 2.9, 3.0, 3.1)] == [0, 1, 1, 1, 1]


def test_extreme_numbers_pick_the_first_and_the_last_token_with_weight(monkeypatch):
    logits = np.full(1000, -1e9, dtype=np.float32)
    logits[[3, 700]] = 0.0
    monkeypatch.setattr(f"{__name__}._sample_rows", sample_rows)  # the native kernel has its own `uniform`
    monkeypatch.setattr("kvern.sampling.sampler.uniform", lambda seed, position: 0.0)
    assert sample_one(logits, SamplingParams(seed=0)).token_ids[0] == 3
    monkeypatch.setattr("kvern.sampling.sampler.uniform", lambda seed, position: 1 - 2.0**-53)
    assert sample_one(logits, SamplingParams(seed=0)).token_ids[0] == 700


@pytest.mark.parametrize("k", [1, 2, 50, 64, 700, 4999, 5000, 9000])
def test_top_equals_a_stable_sort(k):
    rng = np.random.default_rng(k)
    for values in (rng.normal(size=5000), rng.integers(0, 9, 5000), np.zeros(5000), np.arange(5000), -np.arange(5000)):
        values = values.astype(np.float32)
        assert top(values, k).tolist() == np.argsort(-values, kind="stable")[:k].tolist()


# ---- seeds and neighbours


def test_equal_seeds_equal_draws_and_children_differ():
    """B061."""
    logits = np.zeros(1000, dtype=np.float32)
    parent = SamplingParams(seed=1, n=4)

    def run(sampling):
        return [int(sample_one(logits, sampling, p).token_ids[0]) for p in range(10)]

    assert run(SamplingParams(seed=1)) == run(SamplingParams(seed=1)) == run(parent.child(0))
    assert len({tuple(run(parent.child(i))) for i in range(4)}) == 4
    assert run(SamplingParams(seed=-1)) == run(SamplingParams(seed=2**64 - 1))


def test_sampling_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed"):
        make_sampler(4).add_row(0, SamplingParams(temperature=1.0), np.zeros(1, dtype=np.int32), 1)


def mixed_requests(vocab, n=64):
    rng = np.random.default_rng(3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.8, "top_k": 20, "logprobs": 0},
        {"temperature": 1.0},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.02, "frequency_penalty": 0.5, "logprobs": 3},
        {"temperature": 2.0, "logit_bias": {3: 5.0}, "min_tokens": 16, "presence_penalty": 1.0},
    ]
    return [
        (
            SamplingParams(seed=i, **kinds[i % len(kinds)]),
            rng.integers(0, vocab, rng.integers(2, 20)).astype(np.int32),
            (rng.normal(size=vocab) * 3).astype(np.float32),
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("vocab", [97, 5003])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(vocab):
    """B062, B063: and whatever joined or left before."""
    requests = mixed_requests(vocab)

    def run(order):
        sampler = make_sampler(vocab, (EOS,))
        rows = np.random.default_rng(len(order)).permutation(200)[: len(order)].astype(np.int32)
        for row, i in zip(rows.tolist(), order, strict=True):
            sampling, tokens, _ = requests[i]
            sampler.add_row(row, sampling, tokens, 1)
        logits = np.stack([requests[i][2] for i in order])
        positions = np.array([len(requests[i][1]) for i in order], dtype=np.int32)
        out = sampler.sample(logits, rows, positions)
        assert not out.errors
        return {i: (int(out.token_ids[k]), repr(out.logprobs.get(int(rows[k])))) for k, i in enumerate(order)}

    alone = {i: run([i])[i] for i in range(len(requests))}
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(requests)).tolist()
        assert run(order) == alone
        assert run(order[:7]) == {i: alone[i] for i in order[:7]}


# ---- logprobs and failures


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=1000) * 4).astype(np.float32)
    params = SamplingParams(seed=5, temperature=0.5, top_k=3, logprobs=5, logit_bias={7: 50.0}, repetition_penalty=2.0)
    out = sample_one(logits, params, tokens=[int(logits.argmax())])
    got = out.logprobs[3]
    reference = logits.astype(np.float64)
    reference -= reference.max()
    reference -= np.log(np.exp(reference).sum())
    order = sorted(range(1000), key=lambda i: (-logits[i], i))
    assert out.token_ids[0] == 7 == got.token_ids[0]
    assert got.token_ids[1:] == order[:5]
    np.testing.assert_allclose(got.logprobs, reference[got.token_ids], rtol=0, atol=1e-6)
    assert got.rank == order.index(7) + 1
    assert all(type(x) is float for x in got.logprobs) and all(type(t) is int for t in got.token_ids)


def test_the_token_has_the_same_float_as_its_entry_and_rank_counts_ties():
    logits = np.array([0.1, 3.7, 3.7, -2.0], dtype=np.float32)
    for token, rank in ((1, 1), (2, 2), (0, 3), (3, 4)):
        got = token_logprobs(logits, token, 4)
        assert got.rank == rank
        assert got.token_ids == [token, 1, 2, 0, 3]
        assert got.logprobs[0] == got.logprobs[1:][got.token_ids[1:].index(token)]
    assert token_logprobs(logits, 2, 0) == ([2], [token_logprobs(logits, 2, 4).logprobs[0]], 2)


def test_more_logprobs_than_tokens_gives_them_all():
    assert token_logprobs(np.zeros(3, dtype=np.float32), 1, 20).token_ids == [1, 0, 1, 2]


def test_logprobs_have_a_finite_floor():
    """B067."""
    logits = np.array([1.0, -np.inf, -1e30], dtype=np.float32)
    got = token_logprobs(logits, 1, 3)
    assert got.logprobs[0] == LOGPROB_FLOOR == -9999.0
    assert got.token_ids == [1, 0, 2, 1]
    assert got.logprobs[1:] == [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1, "top_p": 0.9}, {"temperature": 0, "logprobs": 2}])
def test_bad_logits_fail_one_row(bad, params):
    """B067."""
    logits = np.zeros((3, 300), dtype=np.float32)
    logits[1, 250] = bad
    logits[:, 9] = 1.0
    sampler = make_sampler(300)
    for row in range(3):
        sampler.add_row(row, SamplingParams(**params), np.zeros(1, dtype=np.int32), 1)
    out = sampler.sample(logits, np.arange(3, dtype=np.int32), np.full(3, 8, dtype=np.int32))
    assert list(out.errors) == [1]
    assert out.token_ids[1] == 0
    if "seed" not in params:
        assert out.token_ids.tolist() == [9, 0, 9]
    assert 1 not in out.logprobs
    with pytest.raises(ValueError):
        token_logprobs(logits[1], 0, 2)
