"""Llama (Touvron et al. 2023), and the decoder that its descendants share."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvern.config import ModelConfig
from kvern.kernels.ops import Int32, KVCache, Plan, Tensor
from kvern.layers.attention import Attention, KeyBalance
from kvern.layers.decoder import DecoderLayer
from kvern.layers.embedding import Embedding
from kvern.layers.linear import Linear
from kvern.layers.mlp import GatedMLP
from kvern.layers.norm import RMSNorm
from kvern.layers.rotary import RotaryEmbedding, inverse_frequencies
from kvern.layers.weights import Weights

_LOADING_THREADS = 4


class Llama:
    """A decoder-only transformer. Descendants override what they do differently, `attention` most of all.

    max_model_len: the positions it is prepared for.
    """

    norm_offset = 0.0  # see Ops.rms_norm

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
                pool.submit(self.decoder_layer, weights.below(f"model.layers.{i}"), window)
                for i, window in enumerate(config.windows)
            ]
            self.norm = self.rms_norm(weights, "model.norm", config.hidden_size)
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

    def decoder_layer(self, weights: Weights, window: int | None) -> DecoderLayer:
        """window: how many tokens this layer sees, the present one included; None: all."""
        config = self.config
        return DecoderLayer(
            self.rms_norm(weights, "input_layernorm", config.hidden_size),
            self.attention(weights.below("self_attn"), window),
            self.rms_norm(weights, "post_attention_layernorm", config.hidden_size),
            GatedMLP.load(weights.below("mlp"), config.hidden_size, config.intermediate_size),
        )

    def attention(self, weights: Weights, window: int | None) -> Attention:
        bias = self.config.attention_bias
        return self.make_attention(weights, window, qkv_bias=bias, out_bias=bias)

    def lm_head(self, weights: Weights) -> Linear:
        if self.config.tie_word_embeddings:
            return self.embedding.as_head()
        return Linear.load(weights, self.config.hidden_size, {"lm_head": self.config.vocab_size}, head=True)

    def rms_norm(self, weights: Weights, name: str, size: int) -> RMSNorm:
        return RMSNorm.load(weights, name, size, self.config.rms_norm_eps, self.norm_offset)

    def make_attention(
        self,
        weights: Weights,
        window: int | None,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: bool = False,
    ) -> Attention:
        """Attention as the configuration describes it, with what the architecture adds: biases, and norms of each
        head of queries and keys."""
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        balance = None
        if qkv_bias:
            bias = weights.numbers("k_proj.bias", (kv_size,))
            balance = KeyBalance.of_bias(bias, config.num_heads, config.num_kv_heads)
        return Attention(
            # What is rounded here goes through an exponential, or stands for whole contexts: in int8 these two
            # small products alone would make a third of the error.
            Linear.load(weights, config.hidden_size, qkv_sizes, bias=qkv_bias, precise=True),
            Linear.load(weights, q_size, {"o_proj": config.hidden_size}, bias=out_bias, precise=True),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=self.rms_norm(weights, "q_norm", config.head_dim) if qk_norm else None,
            k_norm=self.rms_norm(weights, "k_norm", config.head_dim) if qk_norm else None,
            scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            window=window,
            balance=balance,
        )
