"""Factors that even out the keys' dimensions, where a bias makes some of them large."""

import numpy as np

from kvern.kernels.ops import AttentionMetadata, load_ops
from kvern.layers.attention import Attention, KeyBalance
from kvern.layers.linear import Linear

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
TOKENS = 40


def large_bias(rng):
    bias = rng.standard_normal(KV_HEADS * HEAD_DIM).astype(np.float32)
    bias[3], bias[HEAD_DIM + 20] = 90.0, -140.0
    return bias


def test_factors_are_inverse_powers_of_two_and_shared_by_a_rotated_pair():
    bias = large_bias(np.random.default_rng(0))
    queries, keys = KeyBalance.of_bias(bias, HEADS, KV_HEADS)
    assert queries.shape == (HEADS, HEAD_DIM // 2) and keys.shape == (KV_HEADS, HEAD_DIM // 2)
    assert (queries * np.repeat(keys, HEADS // KV_HEADS, axis=0) == 1).all()
    assert (np.frexp(queries)[0] == 0.5).all()
    assert (queries >= 1).all() and queries[0, 3] >= 8 and queries[5, 20 - HEAD_DIM // 2] >= 8
    assert np.median(queries) == 1


def test_a_bias_of_zeros_changes_nothing():
    bias = np.zeros(KV_HEADS * HEAD_DIM, np.float32)
    bias[5] = 7.0  # without a usual size there is no excess over it
    queries, keys = KeyBalance.of_bias(bias, HEADS, KV_HEADS)
    assert (queries == 1).all() and (keys == 1).all()


def attend(kv_dtype, balance, rng):
    """Of a layer whose keys are almost their bias -> [TOKENS, HEADS * HEAD_DIM]."""
    ops = load_ops("native", dtype="bfloat16", threads=1, kv_dtype=kv_dtype)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    bias = np.zeros(width, np.float32)
    bias[HEADS * HEAD_DIM :][: KV_HEADS * HEAD_DIM] = large_bias(rng)
    matrix = rng.standard_normal((width, 64), dtype=np.float32) / 8
    qkv = Linear(ops, ops.pack(ops.weight([matrix])), bias)
    out = Linear(ops, ops.pack(ops.weight([np.eye(HEADS * HEAD_DIM, dtype=np.float32)])))
    layer = Attention(
        qkv, out, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, balance=balance
    )
    (cache,) = ops.allocate_kv_cache(1, 5, 16, KV_HEADS, HEAD_DIM)
    positions = np.arange(TOKENS)
    table = np.array([[1, 2, 3]], np.int32)
    count = np.array([TOKENS])
    plan = ops.plan(AttentionMetadata(positions, positions + 16, np.array([0]), count, count, table, 16))
    angles = positions[:, None] * (0.01 ** (np.arange(HEAD_DIM // 2) / 16))
    rope = ops.rotary_factors(ops.rotary_table(angles), plan)
    hidden = ops.embedding(ops.weight([rng.standard_normal((TOKENS, 64), dtype=np.float32)]), np.arange(TOKENS))
    return ops.to_numpy(layer(hidden, rope, plan, cache)).copy()


def test_balanced_keys_change_no_bit_in_bf16_and_lose_little_in_int8():
    balance = KeyBalance.of_bias(large_bias(np.random.default_rng(1)), HEADS, KV_HEADS)
    exact = attend("bfloat16", None, np.random.default_rng(1))
    assert np.array_equal(attend("bfloat16", balance, np.random.default_rng(1)), exact)
    plain, balanced = (
        np.abs(attend("int8", b, np.random.default_rng(1)) - exact).mean() / np.abs(exact).mean()
        for b in (None, balance)
    )
    assert balanced < plain / 2, (plain, balanced)
