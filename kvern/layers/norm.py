"""Root mean square normalisation."""

from __future__ import annotations

from kvern.kernels.ops import Ops, Tensor
from kvern.layers.weights import Weights


class RMSNorm:
    """Normalises groups of len(weight) columns: the hidden state, or each head. See Ops.rms_norm."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self.ops = ops
        self.weight = weight
        self.eps = eps

    @classmethod
    def load(cls, weights: Weights, name: str, size: int, eps: float) -> RMSNorm:
        return cls(weights.ops, weights.load({f"{name}.weight": (size,)}), eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)
