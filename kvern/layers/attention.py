"""Causal self-attention over a paged cache."""

from __future__ import annotations

from kvern.kernels.ops import KVCache, Plan, RotaryFactors, Tensor
from kvern.layers.linear import Linear
from kvern.layers.norm import RMSNorm


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions.

    qkv: one layer that gives queries, keys and values side by side. q_norm, k_norm: normalise each head before it is
    rotated, where a model has them. scale: of the products of queries and keys. window: how many tokens a token sees,
    itself included; None: all.
    """

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        scale: float,
        window: int | None = None,
    ) -> None:
        self.ops = qkv.ops
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.scale = scale
        self.window = window

    def __call__(self, x: Tensor, rope: RotaryFactors, plan: Plan, cache: KVCache) -> Tensor:
        ops = self.ops
        q, k, v = ops.split(self.qkv(x), self.sizes)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        # All of the step's keys and values are written first: two segments may share blocks that it fills.
        ops.write_kv(ops.rotary(k, rope), v, cache, plan)
        q = ops.rotary(q, rope)
        return self.out(ops.paged_attention(q, cache, plan, scale=self.scale, window=self.window))
