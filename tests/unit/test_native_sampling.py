"""The native sampling kernel gives the tokens that NumPy gives, on every instruction set and number of threads."""

import numpy as np
import pytest

from kvern.kernels.cpu.ops import NativeOps
from kvern.sampling.native import native_rows
from kvern.sampling.sampler import Sampler
from kvern.sampling_params import SamplingParams
from tests.native import ISA_PARAMS, engine

ROWS = 12

PARAMS = [
    {"temperature": 0.8},
    {"temperature": 1.7, "min_p": 0.02},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 2.5, "top_p": 0.999999},
    {"temperature": 0.9, "top_p": 1e-6},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 3.0, "top_k": 1000},  # more than there are blocks
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {
        "temperature": 1.3,
        "repetition_penalty": 0.7,
        "frequency_penalty": 0.3,
        "min_tokens": 500,
        "max_tokens": 600,
        "logit_bias": {5: 3.0, 7: -100.0},
        "top_p": 0.99,
    },
]


@pytest.fixture(params=ISA_PARAMS)
def isa(request):
    engine(request.param, 1)
    return request.param


def tokens(logits, params, sample_rows=None):
    vocab = logits.shape[1]
    sampler = Sampler(vocab, (0,)) if sample_rows is None else Sampler(vocab, (0,), sample_rows)
    rng = np.random.default_rng(1)
    for row in range(len(logits)):
        history = rng.integers(0, vocab, 400).astype(np.int32)
        sampler.add_row(row, SamplingParams(seed=row - 3, **params), history, 300)
    rows = np.arange(len(logits), dtype=np.int32)
    return np.array([sampler.sample(logits, rows, np.full(len(rows), 400 + i, np.int32)).token_ids for i in range(8)])


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: "-".join(params))
@pytest.mark.parametrize("vocab", [9, 300, 9001])
def test_tokens_are_those_of_numpy(isa, params, vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((ROWS, vocab)).astype(np.float32) * 3
    logits[1] = np.round(logits[1])  # ties
    logits[2, 1:] = 0  # all the same but one
    logits[3, rng.integers(0, vocab, vocab // 2)] = -np.inf
    logits[4] *= 100  # one token has it all, the others vanish
    if vocab > 9:
        logits[5] = -np.inf
        logits[5, 3:5] = 1.0
    expected = tokens(logits, params)
    for threads in (1, 2, 3):
        got = tokens(logits, params, native_rows(NativeOps(threads, isa=isa)))
        # Sums are rounded elsewhere: a draw on a border may fall to the neighbour.
        assert (got == expected).mean() > 0.98
        if params["temperature"] == 0 or params.get("top_k") == 1:
            assert (got == expected).all()


def test_a_row_has_the_same_token_alone(isa):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((ROWS, 5000)).astype(np.float32)
    sample_rows = native_rows(NativeOps(2, isa=isa))
    sampler = Sampler(5000, (), sample_rows)
    for row in range(ROWS):
        sampler.add_row(row, SamplingParams(seed=row, top_p=0.9), np.zeros(1, np.int32), 1)
    positions = np.arange(ROWS, dtype=np.int32)
    together = sampler.sample(logits, np.arange(ROWS, dtype=np.int32), positions).token_ids
    for row in range(ROWS):
        place = slice(row, row + 1)
        alone = sampler.sample(logits[place], np.array([row], np.int32), positions[place]).token_ids
        assert alone[0] == together[row]


def test_all_masked_is_an_error_of_the_row_alone(isa):
    sampler = Sampler(4, (1,), native_rows(NativeOps(2, isa=isa)))
    sampler.add_row(0, SamplingParams(temperature=0, min_tokens=3), np.zeros(1, np.int32), 1)
    sampler.add_row(1, SamplingParams(temperature=1.0, seed=1), np.zeros(1, np.int32), 1)
    logits = np.full((2, 4), -np.inf, np.float32)
    logits[:, 1] = 0
    out = sampler.sample(logits, np.array([0, 1], np.int32), np.array([1, 1], np.int32))
    assert list(out.errors) == [0]
    assert out.token_ids[1] == 1
