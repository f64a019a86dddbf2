"""Root mean square normalisation."""

from __future__ import annotations

from kvern.kernels.ops import Ops, Tensor
from kvern.layers.weights import Weights


class RMSNorm:
    """Normalises groups of len(weight) columns: the hidden state, or each head. See Ops.rms_norm."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self.ops = ops
        self.weight = weight
        self.eps = eps
        self.offset = offset

    @classmethod
    def load(cls, weights: Weights, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        return cls(weights.ops, weights.load({f"{name}.weight": (size,)}), eps, offset)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, self.offset)
