"""Gemma 3 (Gemma Team 2025), the text model: most layers see a window, every sixth sees all.

Beside Llama's: embeddings are scaled by sqrt(hidden), norms multiply by 1 + weight and stand before and after attention
and feed-forward, the gate is GELU, the heads of queries and keys are normalised, and layers with a window turn their
heads by other frequencies than those without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvern.config import ModelConfig
from kvern.kernels.ops import Int32, KVCache, Plan, Tensor
from kvern.layers.attention import Attention
from kvern.layers.decoder import DecoderLayer
from kvern.layers.mlp import GatedMLP
from kvern.layers.rotary import RotaryEmbedding, inverse_frequencies
from kvern.layers.weights import Weights
from kvern.models.llama import Llama


class Gemma3(Llama):
    norm_offset = 1.0

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        super().__init__(config, weights, max_model_len)
        local = inverse_frequencies(config.head_dim, config.local_rope_theta or config.rope_theta)
        self.local_rope = RotaryEmbedding(self.ops, local, max_model_len)

    def __call__(self, token_ids: Int32, plans: Sequence[Plan], caches: Sequence[KVCache]) -> Tensor:
        x = self.ops.scale(self.embedding(token_ids), math.sqrt(self.config.hidden_size))
        rope, local_rope = self.rope(plans[0]), self.local_rope(plans[0])
        for layer, window, plan, cache in zip(self.layers, self.config.windows, plans, caches, strict=True):
            x = layer(x, rope if window is None else local_rope, plan, cache)
        return self.norm(x)

    def decoder_layer(self, weights: Weights, window: int | None) -> DecoderLayer:
        hidden = self.config.hidden_size
        mlp = GatedMLP.load(weights.below("mlp"), hidden, self.config.intermediate_size, gate="gelu_tanh")
        return DecoderLayer(
            self.rms_norm(weights, "input_layernorm", hidden),
            self.attention(weights.below("self_attn"), window),
            self.rms_norm(weights, "pre_feedforward_layernorm", hidden),
            mlp,
            attention_post_norm=self.rms_norm(weights, "post_attention_layernorm", hidden),
            mlp_post_norm=self.rms_norm(weights, "post_feedforward_layernorm", hidden),
        )

    def attention(self, weights: Weights, window: int | None) -> Attention:
        bias = self.config.attention_bias
        return self.make_attention(weights, window, qkv_bias=bias, out_bias=bias, qk_norm=True)
