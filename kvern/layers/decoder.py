"""One decoder layer: attention and feed-forward, each normalised before and added to what came in."""

from __future__ import annotations

from kvern.kernels.ops import KVCache, Plan, RotaryFactors, Tensor
from kvern.layers.attention import Attention
from kvern.layers.mlp import GatedMLP
from kvern.layers.norm import RMSNorm


class DecoderLayer:
    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.ops = attention.ops
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: Tensor, rope: RotaryFactors, plan: Plan, cache: KVCache) -> Tensor:
        x = self.ops.add(x, self.attention(self.attention_norm(x), rope, plan, cache))
        return self.ops.add(x, self.mlp(self.mlp_norm(x)))
