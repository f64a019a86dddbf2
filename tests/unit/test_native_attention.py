"""The native attention, rotary embedding and cache writes: right numbers, and bits that depend on the row alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.library import op_array
from tests.native import ISA_PARAMS, engine, has_bf16

PAGE = 16
CHUNK = 256  # tokens of which attention computes a partial result
THREADS = (1, 2, 3)
KINDS = {"bf16": abi.KV_BF16, "int8": abi.KV_INT8}
# Root mean square of the error against float64 on what the cache holds, relative to the output's.
TOLERANCE = {"bf16": 6e-3, "int8": 5e-4}
BORDERS = (1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513, 769)


@pytest.fixture(params=ISA_PARAMS)
def isa(request):
    engine(request.param, 1)
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def run(isa, threads, kind, args, step, rows=abi.TOKENS):
    engine(isa, threads).run(op_array([abi.make_op(kind, args, rows)]), 1, step)


def view(x):
    return abi.View(x.ctypes.data, x.strides[0] // 4)


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def bf16_bits(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def int8_scale(x):
    return np.abs(x).max(-1, keepdims=True) / np.float32(127)


def as_stored(x, kind):
    """What the cache keeps of rows x."""
    if kind == "bf16":
        return (bf16_bits(x).astype(np.uint32) << 16).view(np.float32)
    return np.rint(x / int8_scale(x)) * int8_scale(x)


# A cache and the sequences in it


class Cache:
    """All bytes are 0xff to begin with, which is NaN in every format; blocks are handed out in random order."""

    def __init__(self, rng, kind, blocks, block_size, kv_heads, head_dim):
        self.kind, self.block_size, self.kv_heads, self.head_dim = kind, block_size, kv_heads, head_dim
        self.head_bytes = 64 * head_dim if kind == "bf16" else 32 * head_dim + 128
        size = blocks * block_size // PAGE * kv_heads * self.head_bytes
        memory = np.full(size + 64, 0xFF, np.uint8)
        start = -memory.ctypes.data % 64
        self.pages = memory[start : start + size].reshape(-1, kv_heads, self.head_bytes)
        self.free = rng.permutation(np.arange(1, blocks)).tolist()
        self.struct = abi.KVCache(self.pages.ctypes.data, kv_heads, head_dim, KINDS[kind])

    def write(self, isa, batch, k, v, threads=1):
        args = abi.WriteKVArgs(view(k), view(v), self.struct, 0)
        run(isa, threads, "write_kv", args, batch.step)


class Batch:
    """A step: segments of (query tokens, context length, block table)."""

    def __init__(self, cache, segments):
        q_len, context_len, tables = ([s[i] for s in segments] for i in range(3))
        self.positions = np.concatenate([np.arange(c - q, c) for q, c, _ in segments])
        self.tables = np.zeros((len(segments), max(map(len, tables))), np.int32)
        for row, table in zip(self.tables, tables, strict=True):
            row[: len(table)] = table
        self.q_len, self.context_len = np.array(q_len, np.int64), np.array(context_len, np.int64)
        self.q_start = np.cumsum(self.q_len) - self.q_len
        segment = np.repeat(np.arange(len(segments)), self.q_len)
        size = cache.block_size
        self.slots = self.tables[segment, self.positions // size].astype(np.int64) * size + self.positions % size
        self.step = abi.Step(num_tokens=len(self.positions), positions=self.positions.ctypes.data)
        plan = self.step.plans[0]
        for name in ("slots", "q_start", "q_len", "context_len"):
            setattr(plan, name, getattr(self, name).ctypes.data)
        plan.block_tables, plan.table_stride = self.tables.ctypes.data, self.tables.shape[1]
        plan.num_segments, plan.block_size = len(segments), size


@dataclass
class Sequence:
    k: np.ndarray
    v: np.ndarray
    table: list[int]

    def segment(self, q_len, context_len=None):
        return (q_len, context_len or len(self.k), self.table)


def new_sequence(isa, rng, cache, length, *, unseen=0, after=None, shared=0):
    """A sequence written to the cache. Blocks wholly left of position `unseen` are given up: the null block. The first
    `shared` tokens are those of sequence `after`, in its blocks."""
    k, v = (normal(rng, length, cache.kv_heads, cache.head_dim) for _ in range(2))
    table = after.table[: shared // cache.block_size] if shared else []
    table = table + [cache.free.pop() for _ in range(-(-length // cache.block_size) - len(table))]
    if shared:
        k[:shared], v[:shared] = after.k[:shared], after.v[:shared]
    cache.write(isa, Batch(cache, [(length, length, table)]), k.reshape(length, -1), v.reshape(length, -1))
    table[: unseen // cache.block_size] = [0] * (unseen // cache.block_size)
    return Sequence(k, v, table)


def attend(isa, cache, segments, q, window=0, threads=1):
    out = np.full_like(q, np.nan)
    heads = q.shape[1] // cache.head_dim
    batch = Batch(cache, segments)
    args = abi.AttentionArgs(view(q), view(out), cache.struct, 0, heads, cache.head_dim**-0.5, window)
    run(isa, threads, "attention", args, batch.step)
    return out


def oracle(cache, sequence, q, context_len, window=0):
    """In float64, for q [tokens, heads * head_dim], the last ones of a context."""
    n = len(q)
    q = q.reshape(n, cache.kv_heads, -1, cache.head_dim).astype(np.float64)
    k, v = (as_stored(x[:context_len], cache.kind).astype(np.float64) for x in (sequence.k, sequence.v))
    scores = np.einsum("nhgd,thd->nhgt", q, k) * cache.head_dim**-0.5
    position, key = np.arange(context_len - n, context_len)[:, None], np.arange(context_len)
    seen = (key <= position) & (key > position - (window or context_len))
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nhgt,thd->nhgd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)


def error(got, want):
    return np.sqrt(((got - want) ** 2).mean() / (want**2).mean())


# Numbers


def random_segments(isa, rng, cache, mode, window):
    """Sequences, and how many of their last tokens are queries."""
    lengths = [int(rng.choice(BORDERS)) if rng.random() < 0.6 else int(rng.integers(1, 900)) for _ in range(5)]
    found = []
    for i, length in enumerate(lengths):
        decode = mode == "decode" or (mode == "mixed" and i % 2)
        q_len = 1 if decode else int(rng.integers(1, min(length, 70) + 1))
        unseen = max(0, length - q_len - window + 1) if window else 0
        found.append((new_sequence(isa, rng, cache, length, unseen=unseen), q_len))
    return found


@pytest.mark.parametrize(
    ("mode", "group", "kv_heads", "head_dim", "block_size", "window"),
    [
        ("decode", 1, 3, 64, 16, 0),
        ("mixed", 2, 2, 16, 32, 0),
        ("mixed", 3, 3, 64, 16, 100),
        ("prefill", 3, 3, 64, 16, 0),
        ("mixed", 4, 2, 128, 64, 0),
        ("mixed", 7, 1, 64, 48, 16),
        ("mixed", 8, 1, 256, 16, 300),
        ("mixed", 3, 1, 80, 16, 0),
        ("decode", 2, 1, 48, 32, 1),
        ("prefill", 2, 1, 112, 32, 1),
        ("decode", 13, 1, 64, 16, 0),
        ("mixed", 16, 1, 32, 16, 17),
        ("mixed", 71, 1, 16, 16, 0),
    ],
)
def test_attention(isa, kind, mode, group, kv_heads, head_dim, block_size, window):
    rng = np.random.default_rng([group, head_dim, len(mode)])
    cache = Cache(rng, kind, 5 * 900 // block_size + 8, block_size, kv_heads, head_dim)
    found = random_segments(isa, rng, cache, mode, window)
    segments = [sequence.segment(q_len) for sequence, q_len in found]
    q = normal(rng, sum(q_len for _, q_len in found), group * kv_heads * head_dim) * 2
    together = attend(isa, cache, segments, q, window)
    for threads in THREADS[1:]:
        assert np.array_equal(attend(isa, cache, segments, q, window, threads), together), f"{threads} threads"
    start = 0
    for sequence, n in found:
        rows = q[start : start + n]
        got = together[start : start + n]
        start += n
        length = len(sequence.k)
        assert error(got, oracle(cache, sequence, rows, length, window)) < TOLERANCE[kind]
        assert np.array_equal(attend(isa, cache, [sequence.segment(n)], rows, window, 2), got), "alone"
        if n > 1:
            cut = int(rng.integers(1, n))
            parts = (rows[:cut], length - n + cut), (rows[cut:], length)
            outs = [attend(isa, cache, [sequence.segment(len(x), end)], x, window) for x, end in parts]
            assert np.array_equal(np.concatenate(outs), got), "in chunks"


def test_every_context_length(isa, kind):
    """A prefill of all tokens, and each token as a decode: page and chunk borders everywhere."""
    rng = np.random.default_rng(1)
    length = 2 * CHUNK + 21
    cache = Cache(rng, kind, length // PAGE + 2, PAGE, 1, 32)
    sequence = new_sequence(isa, rng, cache, length)
    q = normal(rng, length, 3 * 32)
    whole = attend(isa, cache, [sequence.segment(length)], q, threads=2)
    assert error(whole, oracle(cache, sequence, q, length)) < TOLERANCE[kind]
    decodes = [sequence.segment(1, n) for n in range(1, length + 1)]
    assert np.array_equal(attend(isa, cache, decodes, q, threads=2), whole)
    for window in (1, 16, 100, CHUNK, CHUNK + 1):
        seen = attend(isa, cache, [sequence.segment(length)], q, window, threads=2)
        assert error(seen, oracle(cache, sequence, q, length, window)) < TOLERANCE[kind]
        assert np.array_equal(attend(isa, cache, decodes, q, window, threads=3), seen)


@pytest.mark.parametrize("window", [0, 40])
def test_what_earlier_steps_left_in_memory_stays_out(isa, kind, window):
    """Also of rows that see nothing of the first chunk that their tile sees."""
    rng = np.random.default_rng(12)
    length, q_len = CHUNK + 60, 60
    cache = Cache(rng, kind, length // PAGE + 2, PAGE, 1, 64)
    sequence = new_sequence(isa, rng, cache, length)
    q = normal(rng, q_len, 3 * 64)
    attend(isa, cache, [sequence.segment(q_len)], np.full_like(q, np.nan), window)
    got = attend(isa, cache, [sequence.segment(q_len)], q, window)
    assert error(got, oracle(cache, sequence, q, length, window)) < TOLERANCE[kind]


@pytest.mark.parametrize("window", [0, 3000])
def test_long_contexts_are_split_over_threads(isa, kind, window):
    rng = np.random.default_rng(2)
    length, q_len = 32 * 1024 + 5, 6
    cache = Cache(rng, kind, length // 64 + 40, 64, 1, 64)
    sequence, short = (new_sequence(isa, rng, cache, n) for n in (length, 700))
    segments = [short.segment(1), sequence.segment(1), sequence.segment(q_len)]
    q = normal(rng, 2 + q_len, 4 * 64)
    alone = [attend(isa, cache, [sequence.segment(1)], q[1:2], window, threads) for threads in THREADS]
    assert all(np.array_equal(alone[0], x) for x in alone)
    assert error(alone[0], oracle(cache, sequence, q[1:2], length, window)) < TOLERANCE[kind]
    for threads in THREADS:
        got = attend(isa, cache, segments, q, window, threads)
        assert np.array_equal(got[1:2], alone[0])
        assert error(got[2:], oracle(cache, sequence, q[2:], length, window)) < TOLERANCE[kind]


@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_sequences_that_share_blocks(isa, kind, block_size):
    """Neighbours that decode from a common beginning have the same bits as alone, whatever they share."""
    rng = np.random.default_rng(block_size)
    cache = Cache(rng, kind, 40 * 2000 // block_size, block_size, 2, 64)
    first = new_sequence(isa, rng, cache, 1500)
    sequences = [first]
    for i in range(30):
        shared = int(rng.choice([0, 200, 300, 600, 1440])) // block_size * block_size
        after = sequences[-1] if i % 3 and len(sequences[-1].k) >= shared else first
        length = shared + int(rng.choice([1, 100, 700]))
        sequences.append(new_sequence(isa, rng, cache, length, after=after, shared=shared))
    segments = [s.segment(2 if i == 7 else 1) for i, s in enumerate(sequences) if len(s.k) > 1]
    kept = [s for s in sequences if len(s.k) > 1]
    q = normal(rng, sum(n for n, _, _ in segments), 2 * 3 * 64)
    outs = [attend(isa, cache, segments, q, threads=threads) for threads in THREADS]
    assert all(np.array_equal(outs[0], x) for x in outs)
    start = 0
    for sequence, segment in zip(kept, segments, strict=True):
        rows = q[start : start + segment[0]]
        got = outs[0][start : start + segment[0]]
        start += segment[0]
        assert np.array_equal(attend(isa, cache, [segment], rows), got)
        assert error(got, oracle(cache, sequence, rows, len(sequence.k))) < TOLERANCE[kind]


@pytest.mark.parametrize("count", [2, 5, 40])
def test_a_long_shared_beginning_is_split_over_threads(isa, kind, count):
    rng = np.random.default_rng(count)
    cache = Cache(rng, kind, 400 + count * 20, 16, 1, 32)
    first = new_sequence(isa, rng, cache, 5000)
    others = [new_sequence(isa, rng, cache, 4990 + 3 * i, after=first, shared=4864) for i in range(count - 1)]
    segments = [s.segment(1) for s in (first, *others)]
    q = normal(rng, count, 3 * 32)
    alone = np.concatenate([attend(isa, cache, [s], q[i : i + 1]) for i, s in enumerate(segments)])
    for threads in THREADS:
        assert np.array_equal(attend(isa, cache, segments, q, threads=threads), alone)


@pytest.mark.parametrize("form", [abi.FLOATS, abi.INT8, abi.INT16])
def test_result_converted_for_a_product(isa, kind, form):
    """The same bits as the operation quantize has of the same result."""
    rng = np.random.default_rng(form)
    heads, head_dim = 6, 96
    cache = Cache(rng, kind, 700, 16, 2, head_dim)
    long, short, shared = (new_sequence(isa, rng, cache, n) for n in (6000, 70, 700))
    fork = new_sequence(isa, rng, cache, 650, after=shared, shared=512)
    segments = [long.segment(1), short.segment(33), shared.segment(1), fork.segment(1)]
    q = normal(rng, 36, heads * head_dim)
    plain = attend(isa, cache, segments, q)
    want = activation(isa, form, *q.shape)
    run(isa, 1, "quantize", abi.QuantizeArgs(view(plain), q.shape[1], want[0]), abi.Step(num_tokens=len(q)))
    batch = Batch(cache, segments)
    for threads in THREADS:
        out, got = np.full_like(q, 7), activation(isa, form, *q.shape)
        args = abi.AttentionArgs(view(q), view(out), cache.struct, 0, heads, head_dim**-0.5, 0, got[0])
        run(isa, threads, "attention", args, batch.step)
        assert (out == 7).all(), "not written"
        for a, b in zip(got[1:], want[1:], strict=True):
            assert np.array_equal(a, b), f"{threads} threads"


def activation(isa, form, rows, columns):
    """A product's input to be filled, and its arrays: values, scales, sums."""
    floats = np.uint16 if has_bf16(isa) else np.float32
    values = np.full((rows, columns), 99, {abi.FLOATS: floats, abi.INT8: np.int8, abi.INT16: np.int16}[form])
    scale, sums = np.full((rows, columns // 32), np.nan, np.float32), np.full((rows, columns // 16), -1, np.int32)
    pointers = [x.ctypes.data for x in (values, scale, sums)]
    if form == abi.FLOATS:
        scale[:], pointers[1:] = 0, (None, None)
    return abi.Activation(form, columns, *pointers), values, scale, sums


def test_scores_of_any_size(isa, kind):
    """Large scores do not overflow, and a chunk whose scores are far below another's counts for nothing."""
    rng = np.random.default_rng(3)
    cache = Cache(rng, kind, 80, 16, 1, 64)
    sequence = new_sequence(isa, rng, cache, 1000)
    q = normal(rng, 4, 64) * np.array([[1e-20], [1.0], [100.0], [1e4]], np.float32)
    got = attend(isa, cache, [sequence.segment(4)], q)
    assert np.isfinite(got).all()
    assert error(got[:2], oracle(cache, sequence, q, 1000)[:2]) < TOLERANCE[kind]


def test_int8_values_are_close(isa):
    """Attention with an int8 cache against what was written, not what the cache keeps of it."""
    rng = np.random.default_rng(4)
    cache = Cache(rng, "int8", 80, 16, 2, 64)
    sequence = new_sequence(isa, rng, cache, 1000)
    q = normal(rng, 20, 2 * 3 * 64)
    got = attend(isa, cache, [sequence.segment(20)], q)
    cache.kind = "bf16"
    assert error(got, oracle(cache, sequence, q, 1000)) < 0.015


# Rotary embedding


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (9, 64), (3, 80), (2, 128), (1, 48)])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_rotary(isa, heads, head_dim, tokens):
    rng = np.random.default_rng(tokens)
    x = normal(rng, tokens, heads * head_dim + 16)  # rows lie in a wider matrix
    table = normal(rng, 50, 2, head_dim // 2)
    positions = rng.integers(0, 50, tokens)
    a, b = np.moveaxis(x[:, : heads * head_dim].reshape(tokens, heads, 2, -1), 2, 0)
    cosines, sines = table[positions][:, None, 0], table[positions][:, None, 1]
    want = np.stack([a * cosines - b * sines, b * cosines + a * sines], 2).reshape(tokens, -1)
    step = abi.Step(num_tokens=tokens, positions=positions.ctypes.data)
    scale = normal(rng, heads, head_dim // 2)
    scaled = (want.reshape(tokens, heads, 2, -1) * scale[:, None]).reshape(tokens, -1)
    for threads in THREADS:
        for by, result in ((None, want), (scale.ctypes.data, scaled)):
            out = np.full((tokens, heads * head_dim), np.nan, np.float32)
            args = (table.ctypes.data, by, heads, head_dim)
            run(isa, threads, "rotary", abi.RotaryArgs(view(x), view(out), *args), step)
            assert np.array_equal(out, result)
            same = x.copy()
            run(isa, threads, "rotary", abi.RotaryArgs(view(same), view(same), *args), step)
            assert np.array_equal(same[:, : heads * head_dim], result)
            assert np.array_equal(same[:, heads * head_dim :], x[:, heads * head_dim :])


# The cache's layout


def read(cache, slot, head):
    """Key and value of a token as the layout in kernels.h says."""
    page = cache.pages[slot // PAGE, head]
    t, dim = slot % PAGE, cache.head_dim
    if cache.kind == "bf16":
        words = page.view(np.uint16)
        k = words[: 16 * dim].reshape(dim // 2, PAGE, 2)[:, t].reshape(-1)
        v = words[16 * dim :].reshape(PAGE // 2, dim, 2)[t // 2, :, t % 2]
        return k, v
    scales = page[32 * dim :].view(np.float32).reshape(2, PAGE)[:, t]
    k = page[: 16 * dim].reshape(dim // 4, PAGE, 4)[:, t].reshape(-1).astype(np.float32) - 128
    v = page[16 * dim : 32 * dim].view(np.int8).reshape(PAGE // 4, dim, 4)[t // 4, :, t % 4]
    return k * scales[0], v * scales[1]


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (3, 64), (2, 80)])
@pytest.mark.parametrize("threads", THREADS)
def test_write_kv(isa, kind, kv_heads, head_dim, threads):
    rng = np.random.default_rng(threads)
    cache = Cache(rng, kind, 20, 32, kv_heads, head_dim)
    table = [cache.free.pop() for _ in range(8)]
    # Runs that start and end anywhere; two of one token; one that fills whole blocks.
    segments = [(23, 30, table), (1, 31, table), (1, 32, table), (77, 109, table), (64, 192, table[:4] + table[6:])]
    batch = Batch(cache, segments)
    k, v = (normal(rng, len(batch.slots), kv_heads * head_dim + 16) for _ in range(2))
    k[3] = v[5] = 0
    untouched = cache.pages.copy()
    cache.write(isa, batch, k, v, threads)
    written = np.zeros(len(cache.pages) * PAGE, bool)
    written[batch.slots] = True
    for row, slot in enumerate(batch.slots):
        for head in range(kv_heads):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            for got, want in zip(read(cache, slot, head), (k[row, columns], v[row, columns]), strict=True):
                if kind == "bf16":
                    assert np.array_equal(got, bf16_bits(want))
                else:
                    # Half a step; where a number is half way, either side.
                    assert np.abs(got - want).max() <= int8_scale(want)[0] * 0.5001
    for slot in np.flatnonzero(~written):
        before = Cache.__new__(Cache)
        before.__dict__.update(cache.__dict__, pages=untouched)
        for head in range(kv_heads):
            for got, want in zip(read(cache, slot, head), read(before, slot, head), strict=True):
                assert np.array_equal(got, want, equal_nan=kind == "int8")
