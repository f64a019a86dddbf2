"""Batch invariance with real weights, whose matrices are large enough for every path of the matrix library."""

import numpy as np
import pytest
import torch

from kvern.config import EngineConfig
from kvern.executor.inline import load_executor
from tests.models import fetch
from tests.tiny_model import Driver

pytestmark = [pytest.mark.slow, pytest.mark.model]

NUM_TOKENS = 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # of the reference kernels
def test_a_request_alone_and_among_31_others(dtype):
    """CASES B038. Chunks of prompts, whole prompts and decodes in every step; threads change in between."""
    options = {"num_blocks": 800, "max_model_len": 512}
    executor, _, config = load_executor(
        EngineConfig(model=str(fetch("smollm2")), kernels="reference", dtype=dtype, **options)
    )
    model = executor._runner.model
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in [300, 1, 40, 129] + [60, 5, 130, 17] * 7]

    want = {}
    for row in range(4):
        torch.set_num_threads(1 + row % 2)
        driver = Driver(model, **options)
        driver.add(row, prompts[row])
        want[row] = driver.run(row, NUM_TOKENS), driver.logits

    torch.set_num_threads(2)
    driver = Driver(model, **options)
    sampled = {row: [] for row in range(32)}
    for row in reversed(range(32)):
        driver.add(row, prompts[row])
    while driver.rows:
        amounts = {row: min(known - done, int(rng.choice([1, 7, 64]))) for row, (done, known, _) in driver.rows.items()}
        result = driver.step(amounts)
        for i, row in enumerate(amounts):
            sampled[row] += result.token_ids[i, : result.count[i]].tolist()
            if len(sampled[row]) >= NUM_TOKENS:
                driver.drop(row)
    for row, (tokens, logits) in want.items():
        assert sampled[row][:NUM_TOKENS] == tokens
        for key, line in logits.items():
            assert np.array_equal(driver.logits[key], line), f"(row, position) {key}"
