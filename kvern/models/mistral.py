"""Mistral (Jiang et al. 2023): Llama whose tokens see only a window of those before them."""

from __future__ import annotations

from kvern.layers.attention import Attention
from kvern.layers.weights import Weights
from kvern.models.llama import Llama


class Mistral(Llama):
    def attention(self, weights: Weights) -> Attention:
        return self.make_attention(
            self.qkv(weights, bias=False), self.attention_out(weights, bias=False), window=self.config.sliding_window
        )
