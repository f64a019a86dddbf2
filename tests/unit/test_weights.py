"""Files to tensors and configuration: every format against the package or the library that writes it."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from kvern.config import InvalidConfig, ModelConfig
from kvern.weights import ModelError, ModelFiles, open_checkpoint, read_model_config
from kvern.weights.dequantize import BLOCK_SIZES, block_size, dequantize
from kvern.weights.gguf import GGUFFile
from tests.models import fetch

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12}
NUMBERS |= {"Q5_K": 13, "Q6_K": 14, "BF16": 30}


def random_rows(name, rng, num_rows, blocks):
    """Rows of random blocks whose float16 fields are finite."""
    _, _, size = block_size(NUMBERS[name])
    rows = rng.integers(0, 256, (num_rows, blocks, size), dtype=np.uint8)
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((num_rows, blocks)).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return np.ascontiguousarray(values.astype({"F32": np.float32, "F16": np.float16}[name])).view(np.uint8)
    fields = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82]}
    for start in fields.get(name, [0]):
        halves = rng.standard_normal((num_rows, blocks, 1)).astype(np.float16)
        rows[..., start : start + 2] = halves.view(np.uint8)
    return rows.reshape(num_rows, -1)


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_blocks_are_decoded_as_the_package_decodes_them(name):
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as by_package

    rows = random_rows(name, np.random.default_rng(NUMBERS[name]), num_rows=7, blocks=300)
    expected = by_package(rows, GGMLQuantizationType(NUMBERS[name]))
    values = dequantize(rows, NUMBERS[name])
    assert values.dtype == np.float32 and values.shape == expected.shape
    assert np.array_equal(values.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def test_block_sizes_are_those_of_the_package():
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, (name, weights, size) in BLOCK_SIZES.items():
        assert GGMLQuantizationType(number).name == name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (weights, size)
    with pytest.raises(ModelError, match="tensor type 99"):
        block_size(99)


# -- GGUF files made here

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 4, 2, 64, 256, 512, 96, 2


def hf_tensors(rng, *, bias=False, norms=False):
    """Name -> array of a small model, as Hugging Face names and orders it."""
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    if norms:
        sizes |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    tensors = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in sizes.items()}
        if bias:
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                tensors[f"model.layers.{layer}.{name}.bias"] = sizes[name][:1]
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    base, kind = name.rsplit(".", 1)
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[base]}.{kind}"


def interleave(rows, heads):
    """ggml's order of the rows of q and k for the llama family: (head, i, s) from (head, s, i), one row at a time."""
    out, half = np.empty_like(rows), len(rows) // heads // 2
    for head in range(heads):
        for i in range(half):
            for s in range(2):
                out[(head * half + i) * 2 + s] = rows[(head * 2 + s) * half + i]
    return out


def write_gguf(
    path, tensors, architecture="llama", types=None, metadata=None, tokens=("a", "b", "<|im_end|>"), layers=LAYERS
):
    """Writes with the `gguf` package. types: end of a tensor's name -> type to quantize it to."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([1, 1, 3][: len(tokens)])
    writer.add_eos_token_id(1)
    for name, value in (metadata or {}).items():
        getattr(writer, f"add_{name}")(*value if isinstance(value, tuple) else (value,))
    for name, array in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, HEADS if "q_proj" in name else KV_HEADS)
        kind = next((kind for end, kind in (types or {}).items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(gguf_name(name) if "." in name and name.startswith(("model", "lm_head")) else name, array)
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("gguf", path, "test")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_tensors_are_those_that_went_in(tmp_path, architecture):
    bias, norms = architecture == "qwen2", architecture == "qwen3"
    tensors = hf_tensors(np.random.default_rng(1), bias=bias or architecture == "llama", norms=norms)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    files = write_gguf(tmp_path / "m.gguf", tensors, architecture)
    checkpoint = open_checkpoint(files)
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, array in tensors.items():
        assert checkpoint.shape(name) == array.shape
        loaded = checkpoint.stored(name).decode()
        assert loaded.dtype == np.float32 and loaded.flags.writeable and loaded.flags.c_contiguous
        assert np.array_equal(loaded, array), name
    with pytest.raises(KeyError):
        checkpoint.stored("model.nothing.weight").decode()
    config = read_model_config(files)
    assert config.tie_word_embeddings is False
    assert config.attention_bias is (bias or architecture == "llama")


def test_packed_rows_are_put_in_order_too(tmp_path):
    from gguf import GGMLQuantizationType, quants

    tensors = hf_tensors(np.random.default_rng(2))
    types = {"q_proj.weight": "Q4_0", "k_proj.weight": "Q8_0", "embed_tokens.weight": "BF16", "up_proj.weight": "F16"}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, types=types))
    for end, kind in types.items():
        name = "model.embed_tokens.weight" if "embed" in end else next(n for n in tensors if n.endswith(end))
        number = GGMLQuantizationType[kind]
        expected = quants.dequantize(quants.quantize(tensors[name], number), number)
        assert np.array_equal(checkpoint.stored(name).decode(), expected), name


def test_tensors_load_in_parallel(tmp_path):
    tensors = hf_tensors(np.random.default_rng(3))
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda name: checkpoint.stored(name).decode(), [*tensors] * 5))
    assert all(np.array_equal(a, b) for a, b in zip(loaded, [*tensors.values()] * 5, strict=True))


def test_gguf_configuration(tmp_path):
    tensors = hf_tensors(np.random.default_rng(4))
    files = write_gguf(tmp_path / "m.gguf", tensors, metadata={"bos_token_id": 0, "chat_template": "<|im_end|>"})
    assert read_model_config(files) == ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,  # float32 in the file; the number people wrote, not its nearest float32
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(1, 2),
        weights_dtype="float32",
    )


def test_what_most_weights_are_stored_in(tmp_path):
    tensors = hf_tensors(np.random.default_rng(4))
    for kind, dtype in (("BF16", "bfloat16"), ("F16", "float16"), ("Q8_0", "float32")):
        files = write_gguf(tmp_path / f"{kind}.gguf", tensors, types={"proj.weight": kind})
        assert read_model_config(files).weights_dtype == dtype


def test_rope_of_gguf_files(tmp_path):
    tensors = hf_tensors(np.random.default_rng(5))
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    files = write_gguf(tmp_path / "a.gguf", tensors | {"rope_freqs.weight": factors})
    assert read_model_config(files).rope_scaling == {"rope_type": "factors", "factors": factors.tolist()}
    assert "rope_freqs.weight" not in open_checkpoint(files).names()
    from gguf import RopeScalingType

    linear = {"rope_scaling_type": RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    files = write_gguf(tmp_path / "b.gguf", tensors, metadata=linear)
    assert read_model_config(files).rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_gemma3_gguf(tmp_path):
    """Norms under other names, with the 1 that they add taken off; a window in five of six layers."""
    names = {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm"}
    names |= {"post_ffw_norm": "post_feedforward_layernorm", "attn_norm": "input_layernorm"}
    names |= {"attn_q_norm": "self_attn.q_norm", "attn_q": "self_attn.q_proj"}
    stored = {f"blk.0.{name}.weight": np.full((4, 8)[: 1 + (name == "attn_q")], 3, np.float32) for name in names}
    stored |= {"token_embd.weight": np.ones((9, HIDDEN), np.float32), "output_norm.weight": np.ones(8, np.float32)}
    files = write_gguf(tmp_path / "m.gguf", stored, "gemma3", metadata={"sliding_window": 16})
    checkpoint = open_checkpoint(files)
    for name, canonical in names.items():
        mean = checkpoint.stored(f"model.layers.0.{canonical}.weight").decode().mean()
        assert mean == (3.0 if name == "attn_q" else 2.0)
    assert checkpoint.stored("model.norm.weight").decode().mean() == 0.0
    assert checkpoint.stored("model.embed_tokens.weight").decode().mean() == 1.0
    config = read_model_config(files)
    assert config.windows == tuple(16 if (i + 1) % 6 else None for i in range(LAYERS))
    assert (config.rope_theta, config.local_rope_theta, config.query_pre_attn_scalar) == (500000.0, 10000.0, None)
    files = write_gguf(tmp_path / "27b.gguf", stored, "gemma3", metadata={"sliding_window": 16}, layers=62)
    config = read_model_config(files)
    assert config.layer_windows[4:7] == (16, None, 16)
    assert config.query_pre_attn_scalar == HIDDEN / HEADS


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma2", {}, "architecture gemma2 is not supported; supported architectures: gemma3, llama, mistral, qwen2"),
        ("llama", {"expert_count": 8}, "a mixture of experts is not supported"),
        ("llama", {"rope_dimension_count": 32}, "RoPE over a part"),
        ("llama", {"uint16": ("split.count", 3)}, "one part of a split model"),
    ],
)
def test_gguf_models_that_are_refused(tmp_path, architecture, metadata, message):
    files = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(6)), architecture, metadata=metadata)
    with pytest.raises(InvalidConfig, match=message):
        read_model_config(files)


def test_numbers_per_layer_must_be_equal(tmp_path):
    tensors = hf_tensors(np.random.default_rng(6))
    same = write_gguf(tmp_path / "a.gguf", tensors, metadata={"array": ("llama.feed_forward_length", [FFN, FFN])})
    assert read_model_config(same).intermediate_size == FFN
    other = write_gguf(tmp_path / "b.gguf", tensors, metadata={"array": ("llama.feed_forward_length", [FFN, 7])})
    with pytest.raises(ModelError, match="feed_forward_length that differs between layers"):
        read_model_config(other)


def test_gguf_files_that_are_damaged(tmp_path):
    tensors = hf_tensors(np.random.default_rng(7))
    path = write_gguf(tmp_path / "m.gguf", tensors).location
    whole = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in [0, 3, 10, 24, 40, 100, 500, 1000]:
        broken.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            GGUFFile(broken)
    broken.write_bytes(whole[:-1000])
    last = max(GGUFFile(broken).tensors.values(), key=lambda entry: entry.offset)
    checkpoint = open_checkpoint(ModelFiles("gguf", broken, "x"))
    name = next(name for name in checkpoint.names() if gguf_name(name) == last.name)
    with pytest.raises(ModelError, match="cut off"):
        checkpoint.stored(name).decode()
    broken.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ModelError, match="version 1 is not supported"):
        GGUFFile(broken)
    rng = np.random.default_rng(8)
    header = whole[: min(entry.offset for entry in GGUFFile(path).tensors.values())]
    for _ in range(300):  # nothing but ModelError, whatever byte of the header is wrong
        bad = bytearray(header)
        bad[rng.integers(4, len(bad))] = rng.integers(256)
        broken.write_bytes(bad)
        with suppress(ModelError):
            GGUFFile(broken)


def test_metadata_equals_that_of_the_package(tmp_path):
    from gguf import GGUFReader

    metadata = {
        "bool": ("x.bool", True),
        "uint8": ("x.u8", 200),
        "int8": ("x.i8", -5),
        "int64": ("x.i64", -(2**40)),
        "float64": ("x.f64", 0.1),
        "array": ("x.strings", ["", "é", "long " * 50]),
        "string": ("x.string", "日本"),
    }
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(9)), metadata=metadata).location
    mine, theirs = GGUFFile(path), GGUFReader(path)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value, expected = mine.metadata[key], field.contents()
        value = value.tolist() if hasattr(value, "tolist") else value
        assert value == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected), key
    assert {t.name: (tuple(reversed(t.shape.tolist())), t.data_offset) for t in theirs.tensors} == {
        entry.name: (entry.shape, entry.offset) for entry in mine.tensors.values()
    }
    assert mine.strings("x.strings") == metadata["array"][1] and mine.strings("nothing") == []


# -- safetensors


def test_safetensors_folder(tmp_path):
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    first = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16)}
    second = {"c": torch.randn(2, 2, 2).to(torch.float16), "d": torch.tensor(1.5, dtype=torch.float64)}
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "i": torch.arange(3)}
    save_file(first, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file(second | computed, tmp_path / "model-2.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "other.safetensors")
    weight_map = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(second, "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(ModelFiles("hf", tmp_path, "x"))
    assert sorted(checkpoint.names()) == ["a", "b", "c", "d", "i"]
    for name, tensor in (first | second).items():
        loaded = checkpoint.stored(name).decode()
        assert checkpoint.shape(name) == loaded.shape == tuple(tensor.shape)
        assert loaded.dtype == np.float32 and loaded.flags.writeable
        assert np.array_equal(loaded, tensor.float().numpy())
    with pytest.raises(ModelError, match="i is stored as I64"):
        checkpoint.stored("i").decode()

    index.write_text(json.dumps({"weight_map": {"a": "model-7.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks model-7\.safetensors"):
        open_checkpoint(ModelFiles("hf", tmp_path, "x"))


def test_safetensors_that_are_damaged(tmp_path):
    import torch
    from safetensors.torch import save_file

    with pytest.raises(ModelError, match="no \\*\\.safetensors"):
        open_checkpoint(ModelFiles("hf", tmp_path, "x"))
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(100)}, path)
    whole = path.read_bytes()
    for size in (0, 4, 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            open_checkpoint(ModelFiles("hf", tmp_path, "x"))


# -- config.json


def hf_config(folder, name, **changes):
    """ModelConfig of what transformers writes for a model class; `changes` go to its configuration."""
    import transformers

    values = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    config = getattr(transformers, f"{name}Config")(**values | changes)
    config.architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(folder)
    return read_model_config(ModelFiles("hf", folder, "x"))


def test_hf_configurations(tmp_path):
    llama = hf_config(
        tmp_path, "Llama", rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=0, eos_token_id=[5, 6]
    )
    assert (llama.architecture, llama.head_dim, llama.num_kv_heads, llama.num_layers) == ("llama", 16, 2, 3)
    assert (llama.rms_norm_eps, llama.rope_theta, llama.rope_scaling) == (1e-6, 10000.0, None)
    assert (llama.tie_word_embeddings, llama.attention_bias, llama.sliding_window) == (True, False, None)
    assert (llama.bos_token_id, llama.eos_token_ids) == (0, (5, 6))
    qwen2 = hf_config(tmp_path, "Qwen2", dtype="bfloat16")
    assert (qwen2.architecture, qwen2.attention_bias, qwen2.sliding_window) == ("qwen2", True, None)
    assert qwen2.weights_dtype == "bfloat16"
    qwen3 = hf_config(tmp_path, "Qwen3", head_dim=32)
    assert (qwen3.architecture, qwen3.head_dim, qwen3.attention_bias) == ("qwen3", 32, False)
    mistral = hf_config(tmp_path, "Mistral", sliding_window=128)
    assert (mistral.architecture, mistral.sliding_window) == ("mistral", 128)
    assert hf_config(tmp_path, "Mistral", sliding_window=None).sliding_window is None


def test_hf_llama3_rope(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    new = hf_config(tmp_path, "Llama", rope_parameters=scaling | {"rope_theta": 500000.0})
    assert (new.rope_theta, new.rope_scaling) == (500000.0, scaling)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    old = {"rope_theta": 500000.0, "rope_scaling": scaling}
    path.write_text(json.dumps(config | old))
    assert read_model_config(ModelFiles("hf", tmp_path, "x")) == new
    path.write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    oldest = read_model_config(ModelFiles("hf", tmp_path, "x"))
    assert (oldest.rope_theta, oldest.rope_scaling) == (10000.0, {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported; supported"),
        ({"architectures": None}, "architecture . is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization method 'gptq'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "RoPE that differs between layers"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_hf_models_that_are_refused(tmp_path, changes, message):
    hf_config(tmp_path, "Llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ModelError, match=message):
        read_model_config(ModelFiles("hf", tmp_path, "x"))


def test_qwen2_sliding_window(tmp_path):
    common = {"sliding_window": 32, "use_sliding_window": True}
    assert hf_config(tmp_path, "Qwen2", max_window_layers=3, **common).sliding_window is None
    assert hf_config(tmp_path, "Qwen2", max_window_layers=0, **common).sliding_window == 32
    some = hf_config(tmp_path, "Qwen2", max_window_layers=1, **common)
    assert (some.sliding_window, some.layer_windows) == (None, (None, 32, 32))


GEMMA = {"num_hidden_layers": 7, "sliding_window": 20, "query_pre_attn_scalar": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def test_hf_gemma3(tmp_path):
    ropes = {"full_attention": {"rope_theta": 1e5, **LINEAR}, "sliding_attention": {"rope_theta": 1e3}}
    new = hf_config(tmp_path, "Gemma3Text", rope_parameters=ropes, **GEMMA)
    assert new.layer_windows == new.windows == (20, 20, 20, 20, 20, None, 20)
    assert (new.architecture, new.query_pre_attn_scalar, new.tie_word_embeddings) == ("gemma3", 32, True)
    assert (new.rope_theta, new.rope_scaling, new.local_rope_theta) == (1e5, LINEAR, 1e3)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings"):
        del config[key]
    older = {"sliding_window_pattern": 6, "rope_theta": 1e5, "rope_local_base_freq": 1e3, "rope_scaling": LINEAR}
    path.write_text(json.dumps(config | older))
    assert read_model_config(ModelFiles("hf", tmp_path, "x")) == new
    path.write_text(json.dumps(config))
    plain = read_model_config(ModelFiles("hf", tmp_path, "x"))
    assert (plain.rope_theta, plain.rope_scaling, plain.local_rope_theta) == (1e6, None, 1e4)
    path.write_text(json.dumps(config | {"sliding_window": 20, "layer_types": ["sliding_attention"] * 7}))
    alike = read_model_config(ModelFiles("hf", tmp_path, "x"))
    assert (alike.sliding_window, alike.layer_windows) == (20, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "RoPE scaling of layers with a window"),
    ],
)
def test_hf_gemma3_models_that_are_refused(tmp_path, changes, message):
    hf_config(tmp_path, "Gemma3Text")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        read_model_config(ModelFiles("hf", tmp_path, "x"))


# -- the real model


@pytest.mark.model
def test_smollm2_configuration():
    config = read_model_config(ModelFiles("gguf", fetch("smollm2"), "smollm2"))
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_tensors_equal_those_of_transformers():
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    path = fetch("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    theirs = model.state_dict()
    checkpoint = open_checkpoint(ModelFiles("gguf", path, "smollm2"))
    assert {*checkpoint.names(), "lm_head.weight"} == set(theirs)
    for name in checkpoint.names():
        assert np.array_equal(checkpoint.stored(name).decode(), theirs[name].numpy()), name
