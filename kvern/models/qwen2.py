"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with a bias on queries, keys and values."""

from __future__ import annotations

from kvern.layers.attention import Attention
from kvern.layers.weights import Weights
from kvern.models.llama import Llama


class Qwen2(Llama):
    def attention(self, weights: Weights, window: int | None) -> Attention:
        return self.make_attention(weights, window, qkv_bias=True, out_bias=False)
