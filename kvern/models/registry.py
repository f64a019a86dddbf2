"""Which class computes which architecture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from kvern.config import InvalidConfig, ModelConfig
from kvern.kernels.ops import Int32, KVCache, Ops, Plan, Tensor
from kvern.layers.weights import Progress, Weights
from kvern.weights.checkpoint import Checkpoint

_CLASSES = {"gemma3": "Gemma3", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class Model(Protocol):
    """What the runner needs of a model."""

    config: ModelConfig
    ops: Ops

    def __call__(self, token_ids: Int32, plans: Sequence[Plan], caches: Sequence[KVCache]) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens; writes their keys and values to `caches`.
        plans, caches: one for each layer, of which several may be the same."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        ...


def model_class(architecture: str) -> type[Any]:
    """The class for an architecture. Raises InvalidConfig naming those there are."""
    if architecture not in _CLASSES:
        raise InvalidConfig(f"no model for architecture {architecture!r}; there are {', '.join(sorted(_CLASSES))}")
    module = importlib.import_module(f"kvern.models.{architecture}")
    return cast(type[Any], getattr(module, _CLASSES[architecture]))


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """The model of `config` with the weights of `checkpoint`, prepared for positions below `max_model_len`
    (default: the model's own). Raises InvalidConfig, or ModelError naming a tensor that is missing or misshapen."""
    weights = Weights(checkpoint, ops, progress)
    model: Model = model_class(config.architecture)(config, weights, max_model_len or config.max_position_embeddings)
    return model
