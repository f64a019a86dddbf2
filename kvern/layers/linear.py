"""Linear layers, alone or several that read the same input as one."""

from __future__ import annotations

from kvern.kernels.ops import Ops, Tensor
from kvern.layers.weights import Weights


class Linear:
    """y = x W^T + b for x [T, in]. weight: W, packed."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self.ops = ops
        self.weight = weight
        self.bias = bias

    @classmethod
    def load(
        cls,
        weights: Weights,
        in_features: int,
        out_features: dict[str, int],
        *,
        bias: bool = False,
        precise: bool = False,
        head: bool = False,
    ) -> Linear:
        """The layers named by the keys of `out_features` as one, their outputs side by side. precise, head: see
        Ops.pack."""
        ops = weights.ops
        stored = weights.load({f"{name}.weight": (n, in_features) for name, n in out_features.items()})
        shift = weights.load({f"{name}.bias": (n,) for name, n in out_features.items()}) if bias else None
        return cls(ops, ops.pack(stored, precise=precise, head=head), shift)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)
