"""One decoder layer: attention and feed-forward, each normalised before, maybe after, and added to what came in."""

from __future__ import annotations

from kvern.kernels.ops import KVCache, Plan, RotaryFactors, Tensor
from kvern.layers.attention import Attention
from kvern.layers.mlp import GatedMLP
from kvern.layers.norm import RMSNorm


class DecoderLayer:
    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        *,
        attention_post_norm: RMSNorm | None = None,
        mlp_post_norm: RMSNorm | None = None,
    ) -> None:
        self.ops = attention.ops
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_post_norm = attention_post_norm
        self.mlp_post_norm = mlp_post_norm

    def __call__(self, x: Tensor, rope: RotaryFactors, plan: Plan, cache: KVCache) -> Tensor:
        y = self.attention(self.attention_norm(x), rope, plan, cache)
        if self.attention_post_norm is not None:
            y = self.attention_post_norm(y)
        x = self.ops.add(x, y)
        y = self.mlp(self.mlp_norm(x))
        if self.mlp_post_norm is not None:
            y = self.mlp_post_norm(y)
        return self.ops.add(x, y)
