"""Rotary position embeddings: which angle belongs to which position and dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvern.config import InvalidConfig
from kvern.kernels.ops import Ops, Plan, RotaryFactors

Float64 = NDArray[np.float64]


class RotaryEmbedding:
    """Angles for positions 0 .. num_positions - 1, computed in float64 once, at load."""

    def __init__(self, ops: Ops, inverse_frequencies: Float64, num_positions: int) -> None:
        self.ops = ops
        self.table = ops.rotary_table(np.arange(num_positions, dtype=np.float64)[:, None] * inverse_frequencies)

    def __call__(self, plan: Plan) -> RotaryFactors:
        return self.ops.rotary_factors(self.table, plan)


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> Float64:
    """Radians per position of each pair of dimensions, [head_dim / 2].

    scaling: `rope_scaling` of a Hugging Face config.json. Known types: default; linear (positions divided by
    `factor`); llama3 (low frequencies divided by `factor`, high ones kept, a ramp between); factors
    (`factors` [head_dim / 2] divides each, as GGUF files store llama3). Raises InvalidConfig on others.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind not in _SCALINGS:
        raise InvalidConfig(f"rope_scaling of type {kind!r} is not supported; {', '.join(_SCALINGS)} are")
    try:
        return _SCALINGS[kind](frequencies, scaling)
    except KeyError as exc:
        raise InvalidConfig(f"rope_scaling of type {kind!r} lacks {exc}") from None


def _default(frequencies: Float64, scaling: dict[str, Any]) -> Float64:
    return frequencies


def _linear(frequencies: Float64, scaling: dict[str, Any]) -> Float64:
    return frequencies / float(scaling["factor"])


def _factors(frequencies: Float64, scaling: dict[str, Any]) -> Float64:
    return frequencies / np.asarray(scaling["factors"], dtype=np.float64)


def _llama3(frequencies: Float64, scaling: dict[str, Any]) -> Float64:
    """Llama 3.1's rule: by how many times a dimension turns within the original context."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / float(scaling["factor"]))


_SCALINGS: dict[str, Callable[[Float64, dict[str, Any]], Float64]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "factors": _factors,
}
