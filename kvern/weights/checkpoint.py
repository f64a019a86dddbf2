"""One interface to a model's tensors, whatever file they lie in.

Names are those of Hugging Face's `transformers` ("model.layers.0.self_attn.q_proj.weight"), arrays are float32, and a
weight matrix is [out features, in features], also for GGUF.

Rows of q_proj and k_proj: rotary embedding pairs element i of a head with element i + d/2 (Hugging Face), or 2i with
2i + 1 (ggml, for the llama family only). So a llama GGUF stores HF row (head, s, i) as row (head, i, s), with s 0 or 1
and i < d/2. It is undone here, on the packed rows, before they are decoded.

Gemma's norms multiply by 1 + weight. A GGUF stores the sum; the 1 is taken off here.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvern.kernels.ops import StoredTensor
from kvern.weights.dequantize import block_size, dequantize
from kvern.weights.files import ModelError, ModelFiles
from kvern.weights.gguf import GGUFFile, TensorEntry
from kvern.weights.safetensors import SafetensorsFile


class Checkpoint(Protocol):
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """KeyError if there is no such tensor."""
        ...

    def num_bytes(self, name: str) -> int:
        """Its size in the file. KeyError if there is no such tensor."""
        ...

    def stored(self, name: str) -> StoredTensor:
        """The tensor as it lies in the file. Safe to call, and to decode, from several threads at once.
        KeyError if there is no such tensor, ModelError if it cannot be read."""
        ...


_COMPUTED = ".rotary_emb.inv_freq"  # older checkpoints store it


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """The tensors of a model. Cheap: reads directories, no data. Raises ModelError."""
    if files.kind == "gguf":
        return GGUFCheckpoint(GGUFFile(files.location))
    return SafetensorsCheckpoint(files.location)


class SafetensorsCheckpoint:
    """All *.safetensors of a folder; with an index, the files that it names."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        for path in _shards(folder):
            shard = SafetensorsFile(path)
            self._files |= {name: shard for name in shard.tensors if not name.endswith(_COMPUTED)}

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name][1]

    def num_bytes(self, name: str) -> int:
        return self._files[name].num_bytes(name)

    def stored(self, name: str) -> StoredTensor:
        return self._files[name].stored(name)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            found = [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError) as exc:
            raise ModelError(f"{index} cannot be read: {exc!r}") from None
        missing = [path.name for path in found if not path.exists()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names")
        return found
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1 and (folder / "model.safetensors") in found:
        found = [folder / "model.safetensors"]
    if not found:
        raise ModelError(f"{folder} has no *.safetensors file; other formats (.bin, .pth) are not read")
    return found


_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NOT_WEIGHTS = {"rope_freqs.weight"}  # part of the configuration, see kvern.weights.config
_PERMUTED_ARCHITECTURES = ("llama", "mistral")


def canonical_name(name: str, architecture: str = "llama") -> str | None:
    """Hugging Face's name of a tensor in a GGUF of this architecture; None if it has none."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    known = _LAYER_NAMES | (_GEMMA_LAYER_NAMES if architecture == "gemma3" else {})
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in known:
        return None
    return f"model.layers.{match[1]}.{known[match[2]]}.{match[3]}"


class GGUFCheckpoint:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._entries: dict[str, TensorEntry] = {}
        architecture = str(file.metadata.get("general.architecture"))
        for entry in file.tensors.values():
            if entry.name in _NOT_WEIGHTS:
                continue
            name = canonical_name(entry.name, architecture)
            if name is None:
                raise ModelError(f"{file.path} has a tensor {entry.name} that no supported architecture has")
            self._entries[name] = entry
        heads: Any = file.metadata.get(f"{architecture}.attention.head_count", 0)
        kv_heads: Any = file.metadata.get(f"{architecture}.attention.head_count_kv", heads)
        permuted = architecture in _PERMUTED_ARCHITECTURES
        self._heads = {"q_proj": int(heads), "k_proj": int(kv_heads)} if permuted else {}
        self._norm_offset = np.float32(architecture == "gemma3")

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def num_bytes(self, name: str) -> int:
        entry = self._entries[name]
        _, weights, size = block_size(entry.type)
        return math.prod(entry.shape) // weights * size

    def stored(self, name: str) -> StoredTensor:
        entry = self._entries[name]
        label, weights, size = block_size(entry.type)
        width = entry.shape[-1]
        if width % weights:
            raise ModelError(f"{self._file.path}: rows of {name} are not whole blocks of {label}")
        num_rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
        row_bytes = width // weights * size
        rows = self._file.raw(entry, num_rows * row_bytes).reshape(num_rows, row_bytes)
        heads = self._heads.get(name.split(".")[-2], 0)
        if len(entry.shape) == 1:
            values = dequantize(rows, entry.type).reshape(entry.shape)
            if name.endswith("norm.weight"):
                values -= self._norm_offset
            return StoredTensor.of(_unpermute(values, heads) if heads else values)
        if heads:
            rows = _unpermute(rows, heads)
        return StoredTensor(entry.shape, entry.type, rows, lambda: dequantize(rows, entry.type).reshape(entry.shape))


def _unpermute(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows (head, i, s) -> (head, s, i); see the top of this file."""
    half = len(rows) // heads // 2
    rest = rows.shape[1:]
    return np.ascontiguousarray(rows.reshape(heads, half, 2, *rest).swapaxes(1, 2)).reshape(rows.shape)
