"""The feed-forward half of a decoder layer."""

from __future__ import annotations

from kvern.kernels.ops import Tensor
from kvern.layers.linear import Linear
from kvern.layers.weights import Weights


class GatedMLP:
    """SwiGLU: down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.ops = down.ops
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def load(cls, weights: Weights, hidden_size: int, intermediate_size: int) -> GatedMLP:
        gate_up = Linear.load(weights, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size})
        return cls(gate_up, Linear.load(weights, intermediate_size, {"down_proj": hidden_size}))

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_and_mul(self.gate_up(x)))
