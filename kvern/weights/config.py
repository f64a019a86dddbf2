"""What a checkpoint says of itself, from config.json or from GGUF metadata, as a ModelConfig.

RoPE scaling comes in two shapes, `ModelConfig.rope_scaling` holds either:
- from config.json: as it stands there, with "rope_type" ("llama3", "linear", "yarn", ...), see `transformers`;
- from a GGUF that carries its scaling as a tensor (rope_freqs.weight; Llama 3.1 and later):
  {"rope_type": "factors", "factors": [head_dim / 2 floats]}, frequency i is theta ** (-2i / head_dim) / factors[i].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvern.config import ModelConfig
from kvern.weights.dequantize import block_size
from kvern.weights.files import ModelError, ModelFiles
from kvern.weights.gguf import GGUFFile
from kvern.weights.special_tokens import gguf_eos_token_ids, hf_eos_token_ids, read_json

ARCHITECTURES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")
_HF_ARCHITECTURES = {
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What is computed in one way only: key of config.json -> the value it must have, if it is there.
_PLAIN = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0}
_PLAIN_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
_GEMMA_THETA, _GEMMA_LOCAL_THETA = 1e6, 1e4
_GEMMA_PERIOD = 6  # every so manieth layer has no window
_GEMMA_27B_LAYERS = 62  # the size that scales its queries by hidden / heads, which a GGUF does not say
# The toy models of kvern.testing have bytes for tokens; see kvern.tokenizer.byte_tokenizer.
_TOY = ModelConfig(
    architecture="toy",
    vocab_size=259,
    hidden_size=1,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=8192,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Fast: reads no weights, and of a GGUF vocabulary no more than the names of end-of-turn tokens need.

    Raises ModelError if the architecture, or something about it, is not supported.
    """
    if files.kind == "toy":
        return _TOY
    if files.kind == "gguf":
        return _from_gguf(GGUFFile(files.location))
    return _from_hf(files.location)


def _unsupported(where: Path, what: str) -> ModelError:
    return ModelError(f"{where}: {what} is not supported; supported architectures: {', '.join(ARCHITECTURES)}")


def _from_hf(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    config = read_json(path)
    if not config:
        raise ModelError(f"{folder} has no config.json; a model folder needs one beside its *.safetensors")
    named = (config.get("architectures") or ["?"])[0]
    if named not in _HF_ARCHITECTURES:
        raise _unsupported(path, f"architecture {named}")
    architecture = _HF_ARCHITECTURES[named]
    gemma = architecture == "gemma3"
    for key, plain in (_PLAIN_GEMMA if gemma else _PLAIN).items():
        if config.get(key, plain) != plain:
            raise _unsupported(path, f"{key} {config[key]!r}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise _unsupported(path, f"quantization method {method!r} (GGUF files may be quantized)")
    try:
        heads = int(config["num_attention_heads"])
        rope_theta, rope_scaling, local_theta = (_hf_gemma_rope if gemma else _hf_rope)(path, config)
        window, layer_windows = _one_or_each(_hf_windows(config, architecture))
        return ModelConfig(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            local_rope_theta=local_theta,
            query_pre_attn_scalar=config.get("query_pre_attn_scalar"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", gemma)),
            attention_bias=bool(config.get("attention_bias", architecture == "qwen2")),
            sliding_window=window,
            layer_windows=layer_windows,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=hf_eos_token_ids(folder),
            weights_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )
    except KeyError as exc:
        raise ModelError(f"{path} lacks {exc}") from None


_Rope = tuple[float, dict[str, Any] | None, float | None]  # base, scaling, base of layers with a window


def _hf_rope(path: Path, config: dict[str, Any]) -> _Rope:
    # transformers 5 writes rope_parameters, which holds the base too; older versions rope_theta and rope_scaling.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise _unsupported(path, "RoPE that differs between layers")
    return (*_rope_of(parameters, config.get("rope_theta", 10000.0)), None)


def _hf_gemma_rope(path: Path, config: dict[str, Any]) -> _Rope:
    parameters = config.get("rope_parameters")
    if parameters:  # one entry for each kind of layer; older versions rope_theta and rope_local_base_freq
        theta, scaling = _rope_of(parameters.get("full_attention") or {}, _GEMMA_THETA)
        local, local_scaling = _rope_of(parameters.get("sliding_attention") or {}, _GEMMA_LOCAL_THETA)
        if local_scaling is not None:
            raise _unsupported(path, "RoPE scaling of layers with a window")
        return theta, scaling, local
    theta, scaling = _rope_of(config.get("rope_scaling") or {}, config.get("rope_theta", _GEMMA_THETA))
    return theta, scaling, float(config.get("rope_local_base_freq", _GEMMA_LOCAL_THETA))


def _rope_of(parameters: dict[str, Any], default_theta: float) -> tuple[float, dict[str, Any] | None]:
    parameters = dict(parameters)
    theta = float(parameters.pop("rope_theta", default_theta))
    parameters["rope_type"] = parameters.pop("type", parameters.get("rope_type", "default"))
    return theta, None if parameters["rope_type"] == "default" else parameters


def _hf_windows(config: dict[str, Any], architecture: str) -> list[int | None]:
    """How many tokens each layer sees; None: all."""
    layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return [None] * layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return [int(window) if kind == "sliding_attention" else None for kind in kinds]
    if architecture == "gemma3":
        return _every_nth_sees_all(layers, int(window), int(config.get("sliding_window_pattern", _GEMMA_PERIOD)))
    full = int(config.get("max_window_layers") or 0) if "use_sliding_window" in config else 0
    return [None if layer < full else int(window) for layer in range(layers)]


def _every_nth_sees_all(layers: int, window: int, period: int) -> list[int | None]:
    return [window if (layer + 1) % period else None for layer in range(layers)]


def _one_or_each(windows: list[int | None]) -> tuple[int | None, tuple[int | None, ...] | None]:
    """ModelConfig's sliding_window and layer_windows."""
    return (windows[0], None) if len(set(windows)) == 1 else (None, tuple(windows))


def _from_gguf(file: GGUFFile) -> ModelConfig:
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise _unsupported(file.path, f"architecture {architecture}")
    if file.metadata.get("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge")

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{file.path} lacks {architecture}.{key}")
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise _unsupported(file.path, f"{key} that differs between layers")
            return value[0].item()
        return value

    if get("expert_count", 0):
        raise _unsupported(file.path, "a mixture of experts")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it holds a vocabulary only, or is damaged")
    hidden, heads = int(get("embedding_length")), int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if int(get("rope.dimension_count", head_dim)) != head_dim:
        raise _unsupported(file.path, "RoPE over a part of each head")
    layers, window = int(get("block_count")), int(get("attention.sliding_window", 0)) or None
    layer_windows = local_theta = query_scalar = None
    if architecture == "gemma3" and window:
        period = int(get("attention.sliding_window_pattern", _GEMMA_PERIOD))
        window, layer_windows = _one_or_each(_every_nth_sees_all(layers, window, period))
        local_theta = get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
        query_scalar = hidden / heads if layers == _GEMMA_27B_LAYERS else None
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position_embeddings=int(get("context_length")),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(file, architecture),
        local_rope_theta=local_theta,
        query_pre_attn_scalar=query_scalar,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        sliding_window=window,
        layer_windows=layer_windows,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=gguf_eos_token_ids(file),
        weights_dtype=_gguf_dtype(file),
    )


def _gguf_rope_scaling(file: GGUFFile, architecture: str) -> dict[str, Any] | None:
    entry = file.tensors.get("rope_freqs.weight")
    if entry is not None:
        count = int(np.prod(entry.shape))
        return {"rope_type": "factors", "factors": file.raw(entry, 4 * count).view(np.float32).tolist()}
    prefix = f"{architecture}.rope.scaling."
    kind = file.metadata.get(prefix + "type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    for key, name in names.items():
        if prefix + key in file.metadata:
            scaling[name] = file.metadata[prefix + key]
    return scaling


def _gguf_dtype(file: GGUFFile) -> str:
    """What most weights are stored in; "float32" for block formats, which are decoded to it."""
    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        name = block_size(entry.type)[0]
        sizes[name] = sizes.get(name, 0) + int(np.prod(entry.shape, dtype=np.int64))
    most = max(sizes, key=lambda name: sizes[name], default="F32")
    return {"BF16": "bfloat16", "F16": "float16"}.get(most, "float32")
