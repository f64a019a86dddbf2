"""Mistral (Jiang et al. 2023): Llama without biases, whose tokens may see only a window of those before them."""

from __future__ import annotations

from kvern.layers.attention import Attention
from kvern.layers.weights import Weights
from kvern.models.llama import Llama


class Mistral(Llama):
    def attention(self, weights: Weights, window: int | None) -> Attention:
        return self.make_attention(weights, window, qkv_bias=False, out_bias=False)
