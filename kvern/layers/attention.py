"""Causal self-attention over a paged cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvern.kernels.ops import Float32, KVCache, Plan, RotaryFactors, Tensor
from kvern.layers.linear import Linear
from kvern.layers.norm import RMSNorm


class KeyBalance(NamedTuple):
    """What rotated queries and keys are multiplied by so that no dimension of the keys is far above the others, where a
    cache rounds them with one scale per token. Their products stay the same, as one is the other's inverse; they are
    powers of two, so that no bit changes where a cache keeps floats. keys: float32 [kv_heads, head_dim / 2]; queries
    [heads, head_dim / 2]."""

    queries: Float32
    keys: Float32

    @classmethod
    def of_bias(cls, bias: Float32, num_heads: int, num_kv_heads: int) -> KeyBalance:
        """From the keys' bias [kv_heads * head_dim], which dominates them where it is large (Qwen2: up to 150, others
        at 2). Half of a dimension's excess goes to the queries, whose rounding counts as well (SmoothQuant, Xiao et al.
        2022)."""
        largest = np.abs(bias.reshape(num_kv_heads, 2, -1)).max(axis=1)  # of each pair that is rotated
        usual = np.median(largest, axis=1, keepdims=True)
        excess = np.maximum(largest / np.where(usual > 0, usual, np.inf), 1)
        factors = np.exp2(np.round(np.log2(excess) / 2)).astype(np.float32)
        return cls(np.repeat(factors, num_heads // num_kv_heads, axis=0), 1 / factors)


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions.

    qkv: one layer that gives queries, keys and values side by side. q_norm, k_norm: normalise each head before it is
    rotated, where a model has them. scale: of the products of queries and keys. window: how many tokens a token sees,
    itself included; None: all. balance: see KeyBalance.
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
        balance: KeyBalance | None = None,
    ) -> None:
        self.ops = qkv.ops
        self.qkv = qkv
        self.out = out
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.scale = scale
        self.window = window
        self.query_scale = balance.queries if balance else None
        self.key_scale = balance.keys if balance else None

    def __call__(self, x: Tensor, rope: RotaryFactors, plan: Plan, cache: KVCache) -> Tensor:
        ops = self.ops
        q, k, v = ops.split(self.qkv(x), self.sizes)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        # All of the step's keys and values are written first: two segments may share blocks that it fills.
        ops.write_kv(ops.rotary(k, rope, self.key_scale), v, cache, plan)
        q = ops.rotary(q, rope, self.query_scale)
        return self.out(ops.paged_attention(q, cache, plan, scale=self.scale, window=self.window))
