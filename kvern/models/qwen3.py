"""Qwen3 (Yang et al. 2025): Llama with the heads of queries and keys normalised before they are rotated."""

from __future__ import annotations

from kvern.layers.attention import Attention
from kvern.layers.norm import RMSNorm
from kvern.layers.weights import Weights
from kvern.models.llama import Llama


class Qwen3(Llama):
    def attention(self, weights: Weights) -> Attention:
        config = self.config
        return self.make_attention(
            weights,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            q_norm=RMSNorm.load(weights, "q_norm", config.head_dim, config.rms_norm_eps),
            k_norm=RMSNorm.load(weights, "k_norm", config.head_dim, config.rms_norm_eps),
        )
