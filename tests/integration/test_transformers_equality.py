"""Real weights: greedy tokens and logits equal those of transformers in float32.

kvern generates the prompts' continuations together, in one batch with chunked prompts. transformers then computes
each prompt with its continuation in one pass: its argmax after every token must be the token kvern chose, which by
induction is what its own greedy decoding gives.
"""

import numpy as np
import pytest

from kvern.config import EngineConfig
from kvern.executor.inline import load_executor
from kvern.tokenizer.load import load_tokenizer
from kvern.weights.hub import resolve_model
from tests.models import fetch
from tests.tiny_model import Driver

pytestmark = [pytest.mark.slow, pytest.mark.model]

NUM_TOKENS = 64
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
CODE = 'def quicksort(items):\n    """Sort a list."""\n    if len(items) <= 1:\n        return items\n'
STORY = "The river ran past the mill, and the miller counted the sacks that came and went. "
PROMPTS = {
    "chat": CHAT,
    "code": CODE,
    "one token": "The",
    "long": "".join(f"Day {i}. {STORY}" for i in range(48)),
    "japanese": "日本の首都は東京です。東京には、",
    "arabic": "مرحبا، كيف حالك اليوم؟",
    "emoji": "🎉🎂 Happy birthday 👩‍👩‍👧! 🥳",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
}


def continuations(path, prompts):
    """{name: prompt + NUM_TOKENS greedy tokens, logits [NUM_TOKENS, vocab] they were chosen from}."""
    executor, limits, _ = load_executor(
        EngineConfig(model=str(path), dtype="float32", max_model_len=2048, num_blocks=800, max_num_seqs=len(prompts))
    )
    tokenizer = load_tokenizer(resolve_model(str(path)))
    driver = Driver(executor._runner.model, **{name: getattr(limits, name) for name in ("num_blocks", "max_model_len")})
    tokens = {}
    for row, text in enumerate(prompts.values()):
        tokens[row] = tokenizer.encode(text)
        driver.add(row, tokens[row])
    starts = {row: len(ids) for row, ids in tokens.items()}
    assert max(starts.values()) > 1000
    assert min(starts.values()) == 1 + tokenizer.add_bos
    while any(len(tokens[row]) < starts[row] + NUM_TOKENS for row in tokens):
        amounts = {}
        for row, (computed, known, _) in driver.rows.items():
            if len(tokens[row]) < starts[row] + NUM_TOKENS:
                amounts[row] = min(known - computed, 300)
        result = driver.step(amounts)
        assert not result.errors
        for i, row in enumerate(amounts):
            tokens[row] += result.token_ids[i, : result.count[i]].tolist()
    found = {}
    for row, name in enumerate(prompts):
        logits = np.stack([driver.logits[row, starts[row] + i] for i in range(NUM_TOKENS)])
        found[name] = (tokens[row], logits)
    return found


def reference_model(path):
    import torch
    import transformers

    quantization = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=quantization
    ).eval()


@pytest.mark.parametrize(
    ("model", "names"), [("smollm2", [*PROMPTS]), ("qwen0.5b", [*PROMPTS]), ("gemma270m", ["one token", "long"])]
)
def test_greedy_tokens_and_logits_equal_those_of_transformers(model, names):
    import torch

    path = fetch(model)
    ours = continuations(path, {name: PROMPTS[name] for name in names})
    theirs = reference_model(path)
    for name, (tokens, logits) in ours.items():
        with torch.no_grad():
            out = theirs(torch.tensor([tokens[:-1]]), logits_to_keep=NUM_TOKENS)
        want = out.logits[0].numpy()
        assert want.argmax(-1).tolist() == tokens[-NUM_TOKENS:], name
        assert np.abs(logits - want).max() < 1e-3 * np.abs(want).max(), name
