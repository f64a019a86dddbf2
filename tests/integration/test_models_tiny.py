"""Each architecture against transformers: tiny random checkpoints, written by it and read by kvern."""

import numpy as np
import pytest

from kvern.kernels.ops import load_ops
from kvern.models.registry import load_model
from kvern.weights.checkpoint import open_checkpoint
from kvern.weights.config import read_model_config
from kvern.weights.files import ModelFiles
from tests.tiny_model import Driver, all_logits

pytestmark = pytest.mark.slow

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # far from uniform attention and logits, so that a wrong angle or mask shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
CASES = {
    "llama": ("LlamaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", {"head_dim": 16, "attention_bias": True}),
    "llama3-rope": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "linear-rope": (
        "LlamaConfig",
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 20}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9},
    ),
    "qwen2-window-in-some-layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 8,
            "sliding_window": 20,
            "query_pre_attn_scalar": 9,
            "rope_parameters": GEMMA_ROPES,
            "initializer_range": 0.1,
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


def reference(case, folder, seed=0):
    """The transformers model of a case, in float32, saved to `folder`."""
    import torch
    import transformers

    name, changes = CASES[case]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**(COMMON | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers starts biases at zero and norms at one, which would hide that they are left out.
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5) if "norm" in parameter_name else parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    return model


def ours(folder, dtype="float32"):
    files = ModelFiles("hf", folder, "tiny")
    config = read_model_config(files)
    return load_model(config, open_checkpoint(files), load_ops(dtype=dtype, threads=2))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(case, tmp_path):
    import torch

    theirs = reference(case, tmp_path)
    model = ours(tmp_path)
    tokens = np.random.default_rng(0).integers(3, VOCAB, 200).tolist()
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0].numpy()
        generated = theirs.generate(
            torch.tensor([tokens[:60]]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    got = all_logits(model, tokens)
    assert np.abs(got - want).max() < 1e-3 * want.std()
    driver = Driver(model)
    driver.add(0, tokens[:60])
    assert driver.run(0, 40, chunk=13) == generated[0, 60:].tolist()


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(case, tmp_path):
    import torch

    theirs = reference(case, tmp_path)
    tokens = np.random.default_rng(0).integers(3, VOCAB, 200).tolist()
    with torch.no_grad():
        exact, rounded = (model(torch.tensor([tokens])).logits[0].float().numpy() for model in both_dtypes(theirs))
    want, got = (all_logits(ours(tmp_path, dtype), tokens) for dtype in ("float32", "bfloat16"))
    assert 0 < np.abs(got - want).mean() < 1.1 * np.abs(rounded - exact).mean()


def both_dtypes(model):
    import torch

    yield model
    yield model.to(torch.bfloat16)
