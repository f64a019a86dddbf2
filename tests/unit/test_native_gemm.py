"""The native matrix product, packing and embedding: right numbers, and bits that depend on nothing but the row."""

import ctypes

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.library import op_array
from tests.native import ISA_PARAMS, engine, has_bf16

FLOATS = ("F32", "F16", "BF16")
NUMBERS = {"floats": abi.FLOATS, "int8": abi.INT8, "int16": abi.INT16}
BLOCKS = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q8_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
TYPES = (*FLOATS, *BLOCKS)
ROWS = (*range(1, 14), 64, 257)
THREADS = (1, 2, 3)
# [out, in]: whole panels and not, an odd number of panels, of blocks, of columns.
SHAPES = {**dict.fromkeys(FLOATS, ((48, 96), (75, 100))), **dict.fromkeys(BLOCKS, ((64, 512), (75, 256)))}
ODD_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0")


@pytest.fixture(params=ISA_PARAMS)
def isa(request):
    engine(request.param, 1)
    return request.param


# Weights


def halves(rng, *shape):
    return rng.uniform(0.001, 0.02, shape).astype(np.float16).view(np.uint8)


def make_weight(rng, name, out, columns):
    """Rows as a file holds them, uint8 [out, row bytes]."""
    values = rng.standard_normal((out, columns)).astype(np.float32)
    if name == "F32":
        return values.view(np.uint8)
    if name == "F16":
        return values.astype(np.float16).view(np.uint8)
    if name == "BF16":
        return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    if BLOCKS[name] == 32:
        return quantize(values, GGMLQuantizationType[name])
    # There is no quantiser for these: any bytes are a block, as long as the fp16 factors are reasonable.
    blocks = out * columns // 256
    content = rng.integers(0, 256, (blocks, {"Q4_K": 140, "Q5_K": 172, "Q6_K": 208}[name]), dtype=np.uint8)
    factors = halves(rng, blocks, 1 if name == "Q6_K" else 2)
    parts = (content, factors) if name == "Q6_K" else (factors, content)
    return np.concatenate(parts, axis=1).reshape(out, -1)


def to_float(rows, name):
    if name == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return dequantize(rows, GGMLQuantizationType[name])


def round_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


class Weight:
    """A weight packed for an instruction set; value: what the product with activations of this form should see."""

    def __init__(self, isa, name, rows, columns, form):
        kind = int(GGMLQuantizationType[name])
        size = engine(isa, 1).packed_bytes(kind, len(rows), columns)
        assert size
        memory = np.full(size + 64, 0xAA, np.uint8)
        self.panels = memory[-memory.ctypes.data % 64 :][:size]
        panels = -(-len(rows) // 16)
        for first, last in ((0, panels // 2), (panels // 2, panels)):
            engine(isa, 1).pack(kind, rows, columns, self.panels.ctypes.data, first, last)
        self.kind = int(GGMLQuantizationType.BF16) if name in FLOATS else kind
        self.out, self.columns = len(rows), -(-columns // 32) * 32
        self.value = to_float(rows, name)
        if form == "floats":
            self.value = round_bf16(self.value) if name in FLOATS else self.unpacked(isa)

    def unpacked(self, isa):
        """The weights in bf16 as the kernels see them: the product with the identity."""
        identity = Activations(isa, np.eye(self.columns, dtype=np.float32), "floats")
        found = product(isa, identity, self, rows=self.columns).T[:, : self.value.shape[1]]
        assert not (found.view(np.uint32) & 0xFFFF).any()
        # They were enlarged a little, then cut off; what is left of a zero is below a thousandth of its neighbours.
        error = found - self.value * np.float32(1 + 3 / 1024)
        assert (np.abs(error) <= 2.0**-7 * np.abs(self.value) + 1e-3 * np.abs(self.value).max()).all()
        larger = (np.abs(found) - np.abs(self.value)).mean() / np.abs(self.value).mean()
        assert abs(larger) < 3e-4  # so the factor does make up for what was cut off
        return found

    @property
    def args(self):
        return abi.PackedWeight(self.kind, self.columns, self.out, self.panels.ctypes.data)


# Activations


class Activations:
    """float32 [rows, columns] in one of the three forms; value: what the form holds of them."""

    def __init__(self, isa, x, form):
        rows, real = x.shape
        columns = -(-real // 32) * 32
        padded = np.zeros((rows, columns), np.float32)
        padded[:, :real] = x
        self.form, self.columns = form, columns
        if form == "floats":
            kept = round_bf16(padded) if has_bf16(isa) else padded
            self.values = np.ascontiguousarray(kept.view(np.uint16)[:, 1::2]) if has_bf16(isa) else padded
            self.scale = self.sums = None
            self.value = kept[:, :real]
            return
        blocks = padded.reshape(rows, -1, 32)
        most = 127 if form == "int8" else 127 * 256
        self.scale = (np.abs(blocks).max(-1) / most).astype(np.float32)
        divisor = np.where(self.scale == 0, 1, self.scale)[..., None]
        whole = np.clip(np.rint(blocks / divisor), -most, most).astype(np.int32)
        high = (whole + 128) >> 8
        self.values = (whole if form == "int8" else np.concatenate([high, whole - 256 * high], axis=2)).astype(np.int8)
        self.values = self.values.reshape(rows, -1)
        self.sums = whole.reshape(rows, -1, 16).sum(-1, dtype=np.int32)
        self.value = (whole * self.scale[..., None].astype(np.float64)).reshape(rows, -1)[:, :real]

    def args(self, first=0):
        address = [None if a is None else a[first:].ctypes.data for a in (self.values, self.scale, self.sums)]
        return abi.Activation(NUMBERS[self.form], self.columns, *address)


def data(x, first=0):
    return None if x is None else x.ctypes.data + first * x.strides[0]


def product(isa, x, weight, *, rows, first=0, threads=1, bias=None, residual=None, gate=abi.NO_GATE):
    """Rows [first, first + rows) of x times the weight -> [rows, out]. What lies around the output stays as it is."""
    columns = weight.out if gate == abi.NO_GATE else weight.out // 2
    frame = np.full((rows + 2, columns + 24), np.nan, np.float32)
    out = frame[1 : rows + 1, 3 : 3 + columns]
    added = abi.View(data(residual, first), residual.strides[0] // 4) if residual is not None else abi.View()
    view = abi.View(out.ctypes.data, frame.shape[1])
    args = abi.LinearArgs(x.args(first), weight.args, data(bias), added, view, gate)
    step = abi.Step(num_tokens=rows)
    engine(isa, threads).run(op_array([abi.make_op("linear", args)]), 1, step)
    result = out.copy()
    out[:] = np.nan
    assert np.isnan(frame).all(), "the product wrote beside its output"
    assert not np.isnan(result).any()
    return result


def same_bits(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def assert_near(got, expected, scale):
    """scale: the sum of the products' absolute values, which float32 sums err in proportion to."""
    assert (np.abs(got - expected) <= 1e-5 * scale + 1e-6).all()


FORMS = [(name, "floats") for name in TYPES] + [(name, form) for name in BLOCKS for form in ("int8", "int16")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_product(isa, name, form):
    rng = np.random.default_rng(0)
    shapes = SHAPES[name] + (((40, 96),) if name in ODD_BLOCKS else ())
    for out, columns in shapes:
        weight = Weight(isa, name, make_weight(rng, name, out, columns), columns, form)
        x = Activations(isa, rng.standard_normal((max(ROWS), columns), dtype=np.float32), form)
        values = weight.value.astype(np.float64)
        expected = x.value @ values.T
        scale = np.abs(x.value) @ np.abs(values.T)
        alone = None
        for rows in ROWS:
            for threads in THREADS:
                got = product(isa, x, weight, rows=rows, threads=threads)
                assert_near(got, expected[:rows], scale[:rows])
                alone = got if alone is None else alone
                if rows == max(ROWS) and threads == 1:
                    whole = got
                elif rows == max(ROWS):
                    assert same_bits(got, whole), "bits depend on the number of threads"
        check_rows_independent(isa, x, weight, whole)


def check_rows_independent(isa, x, weight, whole):
    """Any run of rows has the bits it has among all."""
    for rows in (*ROWS[:-1], 16, 17, 31, 33, 100):
        for first in (0, 1, 5, len(whole) - rows):
            got = product(isa, x, weight, rows=rows, first=first)
            assert same_bits(got, whole[first : first + rows]), f"{rows} rows from {first}"


@pytest.mark.parametrize(("name", "columns"), [("BF16", 1450), ("Q4_0", 1408)])
def test_long_rows(isa, name, columns):
    """More than the nearest cache holds of two panels, with more rows than are multiplied in one go."""
    rng = np.random.default_rng(10)
    weight = Weight(isa, name, make_weight(rng, name, 75, columns), columns, "floats")
    x = Activations(isa, rng.standard_normal((800, columns), dtype=np.float32), "floats")
    values = weight.value.astype(np.float64)
    whole = product(isa, x, weight, rows=800)
    assert_near(whole, x.value @ values.T, np.abs(x.value) @ np.abs(values.T))
    assert same_bits(product(isa, x, weight, rows=800, threads=3), whole)
    check_rows_independent(isa, x, weight, whole)


@pytest.mark.parametrize("name", ["BF16", "Q4_1"])
def test_rows_too_long_for_the_cache(isa, name):
    """With tiles, sums are kept for a band of columns at a time; here there are more than one band of them."""
    rng = np.random.default_rng(11)
    columns, rows = 2112, 300
    weight = Weight(isa, name, make_weight(rng, name, 1100, columns), columns, "floats")
    x = Activations(isa, rng.standard_normal((rows, columns), dtype=np.float32), "floats")
    values = weight.value.astype(np.float64)
    whole = product(isa, x, weight, rows=rows)
    assert_near(whole, x.value @ values.T, np.abs(x.value) @ np.abs(values.T))
    for some, first in ((1, 0), (20, 270), (60, 100)):
        assert same_bits(product(isa, x, weight, rows=some, first=first), whole[first : first + some])


@pytest.mark.parametrize("name", ["BF16", "Q4_0", "Q6_K"])
def test_numbers_too_small_to_be_normal(isa, name):
    """Some instructions take them for 0, others do not: one row must be treated like many."""
    rng = np.random.default_rng(9)
    weight = Weight(isa, name, make_weight(rng, name, 64, 512), 512, "floats")
    x = Activations(isa, rng.standard_normal((40, 512), dtype=np.float32) * np.float32(2.0**-126), "floats")
    whole = product(isa, x, weight, rows=40)
    assert (np.abs(whole) < 2.0**-110).all()
    for rows in (1, 2, 17):
        assert same_bits(product(isa, x, weight, rows=rows, first=3), whole[3 : 3 + rows])


@pytest.mark.parametrize("form", ["int8", "int16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_integers_have_the_same_bits_with_all_dot_products(isa, name, form):
    """Integer sums are exact, and with fused multiply-add the rest is one sequence of operations."""
    if isa == "portable":
        pytest.skip("rounds products and sums apart")
    rng = np.random.default_rng(1)
    rows = make_weight(rng, name, 96, 1024)
    x = Activations(isa, rng.standard_normal((50, 1024), dtype=np.float32), form)
    results = []
    for other in (isa, "avx2"):
        results.append(product(other, x, Weight(other, name, rows, 1024, form), rows=50))
    assert same_bits(*results)


def reference_gate(gate, a, b):
    u = a if gate == abi.SILU else 2 * np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)
    return a / (1 + np.exp(-u)) * b


@pytest.mark.parametrize("gate", [abi.SILU, abi.GELU_TANH])
@pytest.mark.parametrize(
    ("name", "form"), [("BF16", "floats"), ("Q4_K", "floats"), ("Q8_0", "int8"), ("Q6_K", "int16")]
)
def test_gate_bias_and_residual(isa, name, form, gate):
    rng = np.random.default_rng(2)
    columns = 256
    for out in (64, 96, 1600, 40, 1110):  # halves of whole panels, and not
        rows = make_weight(rng, name, out, columns)
        weight = Weight(isa, name, rows, columns, form)
        # Large enough that the gate is everything from closed to open, and beyond where its exponential ends.
        x = Activations(isa, rng.standard_normal((257, columns), dtype=np.float32) * 0.3, form)
        bias = rng.standard_normal(out).astype(np.float32)
        residual = rng.standard_normal((257, out // 2)).astype(np.float32)
        sums = x.value @ weight.value.astype(np.float64).T + bias
        with np.errstate(over="ignore"):
            expected = reference_gate(gate, sums[:, : out // 2], sums[:, out // 2 :]) + residual
        results = {}
        for count in (1, 2, 7, 64, 257):
            for threads in (1, 3):
                keywords = {"bias": bias, "residual": residual, "gate": gate, "threads": threads}
                got = product(isa, x, weight, rows=count, **keywords)
                np.testing.assert_allclose(got, expected[:count], rtol=2e-4, atol=2e-2)
                results[count, threads] = got
                assert same_bits(got[:1], results[1, 1])
        assert same_bits(results[257, 1], results[257, 3])
        alone = product(isa, x, weight, rows=1, first=200, **keywords)
        assert same_bits(alone, results[257, 1][200:201])


@pytest.mark.parametrize(("name", "form"), [("BF16", "floats"), ("Q4_1", "floats"), ("Q4_1", "int8"), ("Q6_K", "int8")])
def test_gate_converts_for_the_next_product(isa, name, form):
    """The bits of the gate's result, then of the operation `quantize`, in all forms."""
    rng = np.random.default_rng(8)
    for out in (64, 96, 1600, 40, 1110):
        half = out // 2
        weight = Weight(isa, name, make_weight(rng, name, out, 256), 256, form)
        x = Activations(isa, rng.standard_normal((257, 256), dtype=np.float32), form)
        for next_form in NUMBERS:
            for rows, threads in ((1, 1), (1, 2), (1, 3), (2, 3), (17, 1), (40, 2), (257, 1), (257, 2), (257, 3)):
                plain = product(isa, x, weight, rows=rows, gate=abi.SILU)
                expected = Activations(isa, np.zeros((rows, half), np.float32), next_form)
                got = Activations(isa, np.ones((rows, half), np.float32), next_form)
                args = abi.QuantizeArgs(abi.View(plain.ctypes.data, half), half, expected.args())
                engine(isa, 1).run(op_array([abi.make_op("quantize", args)]), 1, abi.Step(num_tokens=rows))
                result = np.zeros((rows, half), np.float32)
                view = abi.View(result.ctypes.data, half)
                args = abi.LinearArgs(x.args(), weight.args, None, abi.View(), view, abi.SILU, 0, got.args())
                engine(isa, threads).run(op_array([abi.make_op("linear", args)]), 1, abi.Step(num_tokens=rows))
                # Blocks are made from the float32 result, which lies in `out`; floats need no detour.
                assert next_form == "floats" or same_bits(result, plain)
                for part in ("values", "scale", "sums"):
                    assert np.array_equal(getattr(got, part), getattr(expected, part)), (out, rows, threads, part)


def test_bias_and_residual_in_place(isa):
    rng = np.random.default_rng(3)
    for name, form in (("BF16", "floats"), ("Q4_1", "int8")):
        weight = Weight(isa, name, make_weight(rng, name, 75, 256), 256, form)
        x = Activations(isa, rng.standard_normal((100, 256), dtype=np.float32), form)
        bias = rng.standard_normal(75).astype(np.float32)
        residual = rng.standard_normal((100, 75)).astype(np.float32)
        for rows in (1, 5, 17, 33, 100):
            plain = product(isa, x, weight, rows=rows)
            out = residual.copy()
            view = abi.View(out.ctypes.data, 75)
            args = abi.LinearArgs(x.args(), weight.args, bias.ctypes.data, view, view, abi.NO_GATE)
            engine(isa, 2).run(op_array([abi.make_op("linear", args)]), 1, abi.Step(num_tokens=rows))
            assert same_bits(out[:rows], plain + bias + residual[:rows])
            assert same_bits(out[rows:], residual[rows:])


def test_rows_of_logits(isa):
    rng = np.random.default_rng(4)
    weight = Weight(isa, "BF16", make_weight(rng, "BF16", 48, 64), 64, "floats")
    x = Activations(isa, rng.standard_normal((9, 64), dtype=np.float32), "floats")
    out = np.zeros((9, 48), np.float32)
    args = abi.LinearArgs(x.args(), weight.args, None, abi.View(), abi.View(out.ctypes.data, 48), abi.NO_GATE)
    op = op_array([abi.make_op("linear", args, abi.LOGIT_ROWS)])
    engine(isa, 1).run(op, 1, abi.Step(num_tokens=9, num_rows=3))
    assert same_bits(out[:3], product(isa, x, weight, rows=3))
    assert not out[3:].any()
    engine(isa, 1).run(op, 1, abi.Step(num_tokens=9, num_rows=0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_wide_product(isa, name, form):
    """Long sums, more rows than one chunk."""
    rng = np.random.default_rng(5)
    out, columns, rows = 96, 8192, 600
    weight = Weight(isa, name, make_weight(rng, name, out, columns), columns, form)
    x = Activations(isa, rng.standard_normal((rows, columns), dtype=np.float32), form)
    values = weight.value.astype(np.float64)
    whole = product(isa, x, weight, rows=rows, threads=2)
    assert_near(whole, x.value @ values.T, np.abs(x.value) @ np.abs(values.T))
    for count in (1, 2, 15, 16, 40):
        for first in (0, 137, rows - count):
            assert same_bits(product(isa, x, weight, rows=count, first=first), whole[first : first + count])


def test_what_cannot_be_packed(isa):
    size = engine(isa, 1).packed_bytes
    assert size(int(GGMLQuantizationType.Q4_0), 16, 48) == 0
    assert size(int(GGMLQuantizationType.Q4_K), 16, 128) == 0
    assert size(int(GGMLQuantizationType.IQ4_NL), 16, 256) == 0
    assert size(int(GGMLQuantizationType.BF16), 17, 33) == 2 * 64 * 16 * 2


def test_packed_weights_are_as_small_as_the_file(isa):
    for name, block in BLOCKS.items():
        rows = make_weight(np.random.default_rng(6), name, 16, 2 * block)
        packed = engine(isa, 1).packed_bytes(int(GGMLQuantizationType[name]), 16, 2 * block)
        assert rows.nbytes <= packed <= 1.03 * rows.nbytes


@pytest.mark.parametrize("name", TYPES)
def test_embedding(isa, name):
    rng = np.random.default_rng(7)
    rows = make_weight(rng, name, 50, 512)
    table = to_float(rows, name)
    for count in (1, 2, 40):
        ids = rng.integers(0, 50, count).astype(np.int32)
        out = np.full((count, 520), np.nan, np.float32)
        view = abi.View(out.ctypes.data, 520)
        kind = int(GGMLQuantizationType[name])
        args = abi.EmbeddingArgs(rows.ctypes.data, rows.strides[0], 512, kind, 0, view)
        op = op_array([abi.make_op("embedding", args)])
        engine(isa, 3).run(op, 1, abi.Step(num_tokens=count, token_ids=ids.ctypes.data_as(ctypes.c_void_p)))
        assert same_bits(np.ascontiguousarray(out[:, :512]), table[ids])
        assert np.isnan(out[:, 512:]).all()
