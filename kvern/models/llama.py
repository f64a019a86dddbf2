"""Llama (Touvron et al. 2023), and the decoder that its descendants share."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvern.config import ModelConfig
from kvern.kernels.ops import Int32, KVCache, Plan, Tensor
from kvern.layers.attention import Attention
from kvern.layers.decoder import DecoderLayer
from kvern.layers.embedding import Embedding
from kvern.layers.linear import Linear
from kvern.layers.mlp import GatedMLP
from kvern.layers.norm import RMSNorm
from kvern.layers.rotary import RotaryEmbedding, inverse_frequencies
from kvern.layers.weights import Weights

_LOADING_THREADS = 4


class Llama:
    """A decoder-only transformer. Descendants override `attention`.

    max_model_len: the positions it is prepared for.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        self.config = config
        self.ops = weights.ops
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.rope = RotaryEmbedding(self.ops, frequencies, max_model_len)
        with ThreadPoolExecutor(_LOADING_THREADS, "load") as pool:
            embedding = pool.submit(
                Embedding.load, weights, "model.embed_tokens", config.vocab_size, config.hidden_size
            )
            layers = [
                pool.submit(self.decoder_layer, weights.below(f"model.layers.{i}")) for i in range(config.num_layers)
            ]
            self.norm = RMSNorm.load(weights, "model.norm", config.hidden_size, config.rms_norm_eps)
            self.embedding = embedding.result()
            self.head = self.lm_head(weights)
            self.layers = [layer.result() for layer in layers]

    def __call__(self, token_ids: Int32, plans: Sequence[Plan], caches: Sequence[KVCache]) -> Tensor:
        """Normalised hidden states [T, hidden] of the step's tokens; writes their keys and values to `caches`."""
        x = self.embedding(token_ids)
        rope = self.rope(plans[0])
        for layer, plan, cache in zip(self.layers, plans, caches, strict=True):
            x = layer(x, rope, plan, cache)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        return self.head(hidden)

    def decoder_layer(self, weights: Weights) -> DecoderLayer:
        config = self.config
        return DecoderLayer(
            RMSNorm.load(weights, "input_layernorm", config.hidden_size, config.rms_norm_eps),
            self.attention(weights.below("self_attn")),
            RMSNorm.load(weights, "post_attention_layernorm", config.hidden_size, config.rms_norm_eps),
            GatedMLP.load(weights.below("mlp"), config.hidden_size, config.intermediate_size),
        )

    def attention(self, weights: Weights) -> Attention:
        bias = self.config.attention_bias
        return self.make_attention(weights, qkv_bias=bias, out_bias=bias)

    def lm_head(self, weights: Weights) -> Linear:
        if self.config.tie_word_embeddings:
            return self.embedding.as_head()
        return Linear.load(weights, self.config.hidden_size, {"lm_head": self.config.vocab_size})

    def make_attention(
        self,
        weights: Weights,
        *,
        qkv_bias: bool,
        out_bias: bool,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> Attention:
        """Attention as the configuration describes it, with what the architecture adds."""
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return Attention(
            Linear.load(weights, config.hidden_size, qkv_sizes, bias=qkv_bias),
            Linear.load(weights, q_size, {"o_proj": config.hidden_size}, bias=out_bias),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            window=config.sliding_window,
        )
