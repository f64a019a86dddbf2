"""Qwen3 (Yang et al. 2025): Llama with the heads of queries and keys normalised before they are rotated."""

from __future__ import annotations

from kvern.layers.attention import Attention
from kvern.layers.weights import Weights
from kvern.models.llama import Llama


class Qwen3(Llama):
    def attention(self, weights: Weights, window: int | None) -> Attention:
        bias = self.config.attention_bias
        return self.make_attention(weights, window, qkv_bias=bias, out_bias=bias, qk_norm=True)
