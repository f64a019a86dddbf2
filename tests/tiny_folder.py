"""Tiny random models as folders, weights, tokenizer and all: for tests that go through the whole engine."""

import json

from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_model import RandomCheckpoint, tiny_config

VOCAB = 258  # bytes, <s> and </s>
_WINDOW = 24
_KINDS = {
    "llama": ("LlamaForCausalLM", {}, {}),
    # Every layer with a window, most layers with one, no layer with one.
    "mistral": ("MistralForCausalLM", {"sliding_window": _WINDOW}, {"sliding_window": _WINDOW}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"sliding_window": _WINDOW, "sliding_window_pattern": 3, "num_hidden_layers": 3, "query_pre_attn_scalar": 8},
        {"num_layers": 3},
    ),
}


# What the native kernels can compute, also with weights in blocks of 32.
NATIVE_SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def write_model(folder, kind, **shape):
    """A model of kind llama, mistral or gemma3 in `folder`; returns its path as a string."""
    name, changes, config_changes = _KINDS[kind]
    tied = kind == "gemma3"
    config = tiny_config(architecture=kind, vocab_size=VOCAB, tie_word_embeddings=tied, **config_changes, **shape)
    written = {
        "architectures": [name],
        "vocab_size": VOCAB,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "bos_token_id": VOCAB - 2,
        "eos_token_id": VOCAB - 1,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written | changes))
    save_file(RandomCheckpoint(config).tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
