"""The feed-forward half of a decoder layer."""

from __future__ import annotations

from typing import Literal

from kvern.kernels.ops import Tensor
from kvern.layers.linear import Linear
from kvern.layers.weights import Weights

Gate = Literal["silu", "gelu_tanh"]


class GatedMLP:
    """SwiGLU and GeGLU (Shazeer 2020): down(f(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear, gate: Gate = "silu") -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate = down.ops.silu_and_mul if gate == "silu" else down.ops.gelu_tanh_and_mul

    @classmethod
    def load(cls, weights: Weights, hidden_size: int, intermediate_size: int, gate: Gate = "silu") -> GatedMLP:
        gate_up = Linear.load(weights, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size})
        return cls(gate_up, Linear.load(weights, intermediate_size, {"down_proj": hidden_size}), gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x)))
