"""The reference ops: right numbers, and bits that do not depend on who else is in the batch."""

import math

import numpy as np
import pytest
import torch

from kvern.kernels.ops import AttentionMetadata, load_ops

# Rows in a step, around every boundary that could matter: vectors, tiles, blocks of the matrix library.
ROWS = (1, 2, 3, 7, 8, 9, 15, 17, 33, 63, 64, 65, 129, 192, 256, 511, 1031)
WIDTHS = (8, 12, 100, 576)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def ops(request, dtype):
    before = torch.get_num_threads()
    yield load_ops("reference", dtype=dtype, threads=request.param)
    torch.set_num_threads(before)


def random(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def assert_rows_independent(ops, op, x):
    """op(x)[i] has the same bits for every number of rows and every place of the row, one thread or two."""
    torch.set_num_threads(1)
    alone = torch.cat([op(x[i : i + 1]) for i in range(40)])
    torch.set_num_threads(2)
    for n in ROWS:
        n = min(n, len(x))
        same = min(n, 40)
        assert torch.equal(op(x[:n])[:same], alone[:same]), f"{n} rows"
    for start in (1, 3, 8, 13):
        assert torch.equal(op(x[start:])[: 40 - start], alone[start:]), f"from row {start}"
    assert torch.equal(op(x[:40].flip(0)).flip(0), alone)


@pytest.mark.parametrize(("inner", "outer"), [(64, 64), (48, 96), (100, 30), (576, 960), (1536, 576), (4864, 896)])
def test_linear_is_batch_invariant(dtype, inner, outer):
    ops = load_ops("reference", dtype=dtype, threads=2)
    rng = np.random.default_rng(inner)
    weight, bias = ops.pack(ops.weight([random(rng, outer, inner)])), ops.weight([random(rng, outer)])
    x = ops.weight([random(rng, 1100, inner)])
    assert_rows_independent(ops, lambda rows: ops.linear(rows, weight, bias), x)


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "outer"), [(576, 49152), (64, 151936)])
def test_logits_are_batch_invariant(inner, outer):
    ops = load_ops("reference", dtype="float32", threads=2)
    rng = np.random.default_rng(0)
    weight, x = ops.pack(ops.weight([random(rng, outer, inner)])), ops.weight([random(rng, 256, inner)])
    alone = torch.cat([ops.linear(x[i : i + 1], weight) for i in range(12)])
    for n in (2, 8, 12, 33, 64, 256):
        assert torch.equal(ops.linear(x[:n], weight)[:12], alone[:n]), f"{n} rows"


@pytest.mark.parametrize("width", WIDTHS)
def test_row_wise_ops_are_batch_invariant(dtype, width):
    ops = load_ops("reference", dtype=dtype, threads=2)
    rng = np.random.default_rng(width)
    x = ops.weight([random(rng, 1100, width) * 4])
    norm = ops.weight([random(rng, width)])
    head_norm = ops.weight([random(rng, width // 4)])
    assert_rows_independent(ops, lambda rows: ops.rms_norm(rows, norm, 1e-5), x)
    assert_rows_independent(ops, lambda rows: ops.rms_norm(rows, head_norm, 1e-5), x)
    assert_rows_independent(ops, lambda rows: ops.rms_norm(rows, norm, 1e-5, 1.0), x)
    assert_rows_independent(ops, ops.silu_and_mul, x)
    assert_rows_independent(ops, ops.gelu_tanh_and_mul, x)
    assert_rows_independent(ops, lambda rows: ops.scale(rows, 0.3), x)
    assert_rows_independent(ops, lambda rows: ops.add(rows, rows), x)


def test_row_wise_ops_compute_their_formula(ops, dtype):
    rng = np.random.default_rng(1)
    x, w, b = random(rng, 5, 24), random(rng, 7, 24), random(rng, 7)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.03, "atol": 0.05}

    def check(got, want):
        np.testing.assert_allclose(ops.to_numpy(got), want, **tolerance)

    t = ops.weight([x])
    matrix = ops.weight([w[:3], w[3:]])
    for form in (matrix, ops.pack(matrix)):
        check(ops.linear(t, form, ops.weight([b])), x @ w.T + b)
    check(ops.embedding(t, np.array([4, 0, 4], np.int32)), x[[4, 0, 4]])
    check(ops.take_rows(t, np.array([1, 1])), x[[1, 1]])
    check(ops.add(t, t), x + x)
    a, c = x[:, :12], x[:, 12:]
    check(ops.silu_and_mul(t), a / (1 + np.exp(-a)) * c)
    check(ops.gelu_tanh_and_mul(t), a * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) * c)
    check(ops.scale(t, 1.75), 1.75 * x)
    weight = random(rng, 6)
    heads = x.reshape(5, 4, 6)
    want = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 0.1) * weight
    check(ops.rms_norm(t, ops.weight([weight]), 0.1), want.reshape(5, 24))
    check(ops.rms_norm(t, ops.weight([weight - 1]), 0.1, offset=1.0), want.reshape(5, 24))


@pytest.mark.parametrize("gate", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gates_of_large_numbers_are_finite(gate):
    x = torch.tensor([[-200.0, 200.0, -1e6, 1.0, 1.0, 1.0]])
    assert getattr(load_ops("reference"), gate)(x).tolist() == [[0.0, 200.0, 0.0]]


def test_rotary_turns_each_pair_by_its_angle():
    ops = load_ops("reference")
    rng = np.random.default_rng(2)
    angles = rng.uniform(0, 100, (50, 3))
    positions = np.array([7, 0, 49])
    x = random(rng, 3, 12)  # two heads of 6
    plan = ops.plan(metadata([(p, 1, [0] * 50) for p in positions], 1))
    factors = ops.rotary_factors(ops.rotary_table(angles), plan)
    pairs = x.reshape(3, 2, 2, 3)
    turned = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * angles[positions])[:, None]
    want = np.stack([turned.real, turned.imag], axis=2).reshape(3, 12)
    np.testing.assert_allclose(ops.rotary(torch.from_numpy(x), factors).numpy(), want, atol=1e-5)
    scale = random(rng, 2, 3)
    scaled = (want.reshape(3, 2, 2, 3) * scale[:, None]).reshape(3, 12)
    np.testing.assert_allclose(ops.rotary(torch.from_numpy(x), factors, scale).numpy(), scaled, atol=1e-5)


# ---- attention


def metadata(segments, block_size):
    """segments: (tokens computed before, tokens now, block table)."""
    computed, new = (np.array(column, dtype=np.int64) for column in list(zip(*segments, strict=True))[:2])
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, new, strict=True)])
    tables = np.zeros((len(segments), max(len(s[2]) for s in segments)), dtype=np.int32)
    for i, (_, _, table) in enumerate(segments):
        tables[i, : len(table)] = table
    rows = np.repeat(np.arange(len(segments)), new)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return AttentionMetadata(positions, slots, np.cumsum(new) - new, new, computed + new, tables, block_size)


def dense_attention(q, k, v, kv_heads, scale, window):
    """q [n, heads, d] are the last n tokens of k, v [length, kv_heads, d]; softmax in float64."""
    n, heads, _ = q.shape
    length = len(k)
    k, v = (np.repeat(a, heads // kv_heads, axis=1).astype(np.float64) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * scale
    query, key = np.arange(length - n, length)[:, None], np.arange(length)[None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)


class Sequences:
    """Random queries, keys and values of some sequences, each with a table of its own in one cache."""

    def __init__(self, lengths, *, heads=6, kv_heads=2, dim=16, block_size=16, dtype="float32", seed=0):
        rng = np.random.default_rng(seed)
        self.ops = load_ops("reference", dtype=dtype, threads=2)
        self.lengths, self.block_size = lengths, block_size
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        blocks = [-(-n // block_size) for n in lengths]
        order = np.random.default_rng(seed + 1).permutation(np.arange(1, sum(blocks) + 1))
        self.tables = [t.tolist() for t in np.split(order, np.cumsum(blocks)[:-1])]
        self.q = [self.ops.weight([random(rng, n, heads * dim)]) for n in lengths]
        self.k = [self.ops.weight([random(rng, n, kv_heads * dim)]) for n in lengths]
        self.v = [self.ops.weight([random(rng, n, kv_heads * dim)]) for n in lengths]
        self.cache = self.ops.allocate_kv_cache(1, sum(blocks) + 1, block_size, kv_heads, dim)[0]

    def step(self, parts, window=None):
        """parts: (sequence, first token, end); returns the rows of each."""
        plan = self.ops.plan(metadata([(a, b - a, self.tables[s]) for s, a, b in parts], self.block_size))
        q, k, v = (torch.cat([x[s][a:b] for s, a, b in parts]) for x in (self.q, self.k, self.v))
        self.ops.write_kv(k, v, self.cache, plan)
        out = self.ops.paged_attention(q, self.cache, plan, scale=0.3, window=window)
        return list(out.split([b - a for _, a, b in parts]))

    def chunked(self, sequence, sizes, window=None):
        """The whole sequence in chunks of these sizes, the last repeated."""
        rows, start, sizes = [], 0, list(sizes)
        while start < self.lengths[sequence]:
            end = min(start + (sizes.pop(0) if len(sizes) > 1 else sizes[0]), self.lengths[sequence])
            rows += self.step([(sequence, start, end)], window)
            start = end
        return torch.cat(rows)


SHAPES = [
    {"heads": 6, "kv_heads": 2, "dim": 16, "block_size": 16},
    {"heads": 4, "kv_heads": 4, "dim": 8, "block_size": 1},
    {"heads": 9, "kv_heads": 3, "dim": 64, "block_size": 16},
    {"heads": 14, "kv_heads": 2, "dim": 32, "block_size": 5},
    {"heads": 5, "kv_heads": 1, "dim": 20, "block_size": 300},
]


@pytest.mark.parametrize("window", [None, 1, 50, 128, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_dense_softmax(shape, window):
    seqs = Sequences([1, 17, 128, 129, 300, 2], **shape)
    rows = seqs.step([(i, 0, n) for i, n in enumerate(seqs.lengths)], window)
    for i, got in enumerate(rows):
        q, k, v = (x[i].numpy().reshape(seqs.lengths[i], -1, seqs.dim) for x in (seqs.q, seqs.k, seqs.v))
        want = dense_attention(q, k, v, seqs.kv_heads, 0.3, window)
        np.testing.assert_allclose(got.numpy(), want, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]])
def test_attention_bits_do_not_depend_on_chunks_or_neighbours(shape, window, dtype):
    """CASES B038: whole, in any chunks, alone or among others, with any threads: the same bits."""
    lengths = [300, 1, 40, 129, 256, 5] + [37] * 20
    whole = Sequences(lengths, dtype=dtype, **shape)
    want = [whole.chunked(i, [n], window) for i, n in enumerate(lengths)]
    together = whole.step([(i, 0, n) for i, n in enumerate(lengths)], window)
    assert all(torch.equal(a, b) for a, b in zip(together, want, strict=True))
    torch.set_num_threads(1)
    for sequence, sizes in ((3, [1]), (0, [7]), (0, [64]), (0, [1, 2, 128, 130, 1])):
        again = Sequences(lengths, dtype=dtype, **shape)
        assert torch.equal(again.chunked(sequence, sizes, window), want[sequence]), f"chunks of {sizes}"
    # Prompts in chunks among decodes: everybody but the first advances by one, the first in chunks.
    mixed = Sequences(lengths, dtype=dtype, **shape)
    torch.set_num_threads(2)
    mixed.step([(i, 0, n - 1) for i, n in enumerate(lengths) if i and n > 1], window)
    others = [(i, n - 1, n) for i, n in enumerate(lengths) if i]
    first = mixed.step([*others, (0, 0, 100)], window)
    second = mixed.step([(0, 100, 300)], window)
    assert torch.equal(torch.cat([first[-1], *second]), want[0])
    assert all(torch.equal(got, want[i][-1:]) for got, (i, _, _) in zip(first, others, strict=False))


def test_block_size_changes_no_bits():
    outs = []
    for block_size in (1, 5, 16, 128, 300):
        seqs = Sequences([300], block_size=block_size)
        outs.append(seqs.chunked(0, [100]))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_what_others_left_in_a_block_is_never_read():
    """A request whose keys were not finite must not hurt the one that gets its blocks."""
    seqs = Sequences([150, 20])
    want = seqs.step([(0, 0, 150)])[0]
    seqs.cache.arena[:, 1:] = math.nan
    got = torch.cat([seqs.step([(0, 0, 140)])[0], *[seqs.step([(0, i, i + 1)])[0] for i in range(140, 150)]])
    assert torch.equal(got, want)
    assert not seqs.cache.arena[:, 0].any(), "nothing may be written to the null block"


def test_two_segments_share_blocks_that_this_step_fills():
    seqs = Sequences([64, 64])
    want = seqs.step([(0, 0, 64)])[0]
    fresh = Sequences([64, 64])
    for x in (fresh.q, fresh.k, fresh.v):
        x[1] = x[0]
    fresh.tables[1] = [*fresh.tables[0][:3], fresh.tables[1][3]]
    first, second = fresh.step([(1, 48, 64), (0, 0, 64)])
    assert torch.equal(second, want)
    assert torch.equal(first, want[48:])


def test_blocks_are_copied_and_zeroed_in_all_layers():
    ops = load_ops("reference")
    caches = ops.allocate_kv_cache(3, 6, 4, 2, 8)
    for i, cache in enumerate(caches):
        cache.arena.copy_(torch.arange(6.0).view(1, 6, 1, 1, 1) + 10 * i)
    # 2 is a destination and a source: sources are read first.
    ops.copy_blocks(caches, caches, np.array([1, 2]), np.array([2, 3]))
    ops.zero_blocks(caches, np.array([5]))
    for i, cache in enumerate(caches):
        for block, value in enumerate([0, 1, 1, 2, 4, None]):
            want = 0.0 if value is None else value + 10.0 * i
            assert (cache.arena[:, block] == want).all()


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="reference"):
        load_ops("cuda")
