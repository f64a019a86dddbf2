"""The native operations on rows, and the threads, by way of NativeOps: against NumPy, on every instruction set."""

import threading
import time

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.library import ISAS, KernelsMissing, load
from kvern.kernels.cpu.ops import NativeOps
from kvern.kernels.ops import StoredTensor

WIDTHS = (16, 48, 75, 576)
ROWS = (1, 2, 5, 64)


@pytest.fixture(params=ISAS)
def ops(request):
    try:
        made = NativeOps(2, isa=request.param)
    except KernelsMissing as exc:
        pytest.skip(str(exc))
    made.reserve(64, 64)
    return made


def tensor(ops, values):
    """Rows as a tensor of `ops`: an embedding of itself."""
    values = np.asarray(values, dtype=np.float32)
    return ops.embedding(ops.weight([StoredTensor.of(values)]), np.arange(len(values), dtype=np.int32))


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_products_and_choices(ops, width, rows):
    x, y = random(0, rows, width), random(1, rows, width)
    a = tensor(ops, x)
    b = tensor(ops, y)
    assert np.array_equal(ops.to_numpy(ops.add(tensor(ops, x), b)), x + y)
    assert np.array_equal(ops.to_numpy(ops.scale(a, 1.5)), x * np.float32(1.5))
    chosen = np.array([rows - 1, 0], dtype=np.int64)
    assert np.array_equal(ops.to_numpy(ops.take_rows(a, chosen)), x[chosen])
    left, right = ops.split(a, [16, width - 16]) if width > 16 else ops.split(a, [8, 8])
    assert np.array_equal(ops.to_numpy(ops.add(right, right)), 2 * x[:, left.columns :])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(ops, width, rows):
    x, weight = random(2, rows, width) * 3, random(3, width)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 0.1)
    got = ops.to_numpy(ops.rms_norm(tensor(ops, x), weight, 0.1))
    assert np.allclose(got, want * weight, rtol=1e-5, atol=1e-6)
    got = ops.to_numpy(ops.rms_norm(tensor(ops, x), weight, 0.1, offset=1.0))
    assert np.allclose(got, want * (weight + 1), rtol=1e-5, atol=1e-6)


def test_norms_of_heads(ops):
    x, weight = random(4, 3, 4 * 32), random(5, 32)
    heads = x.reshape(3, 4, 32).astype(np.float64)
    want = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * weight
    got = ops.to_numpy(ops.rms_norm(tensor(ops, x), weight, 1e-6))
    assert np.allclose(got.reshape(3, 4, 32), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("half", (16, 75))
def test_gates(ops, half):
    x = np.concatenate([random(6, 5, half) * 20, random(7, 5, half)], axis=1)
    x[0, :4] = [0.0, 100.0, -100.0, -1e30]
    a, b = x[:, :half].astype(np.float64), x[:, half:]
    with np.errstate(over="ignore"):
        silu = a / (1 + np.exp(-a)) * b
        gelu = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))) * b
    assert np.allclose(ops.to_numpy(ops.silu_and_mul(tensor(ops, x))), silu, rtol=1e-5, atol=1e-5)
    assert np.allclose(ops.to_numpy(ops.gelu_tanh_and_mul(tensor(ops, x))), gelu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", (1, 15, 16, 49, 49152))
def test_argmax_is_the_first_of_the_largest_and_nan_is_largest(ops, width):
    x = random(8, 6, width).round(1)
    if width > 1:
        x[1, -1] = x[1, 0] = 9.0
        x[2, width // 2] = np.nan
        x[3, :] = -np.inf
        x[4, [width // 3, -1]] = np.nan, np.nan
        x[5, 0], x[5, -1] = np.inf, np.nan
    index, value = ops.argmax(tensor(ops, x))
    assert index.tolist() == x.argmax(axis=1).tolist()
    assert np.array_equal(value, x[np.arange(6), index], equal_nan=True)


@pytest.mark.parametrize("rows", (1, 2, 17, 40, 200))
@pytest.mark.parametrize("vocab", (49, 640, 1000))
def test_a_product_finds_the_largest_of_its_rows(ops, rows, vocab):
    """The same as argmax, and writes nothing; logits that somebody reads are whole."""
    ops.reserve(200, 200)
    x, head = random(12, rows, 96), random(13, vocab, 96)
    head[-1] = head[vocab // 2] = head[3] = head[5]  # the largest of many rows, below
    x[::3] += 4 * head[3]
    if vocab < 96:
        x[0] = -10 * np.linalg.pinv(head).sum(axis=1)  # all are about -10, and what fills up a panel is 0
    x[rows - 1] = np.nan if rows > 1 else x[0]
    hidden, chosen = tensor(ops, x), np.arange(rows, dtype=np.int64)
    packed = ops.pack(ops.weight([head]), head=True)
    tape = ops.capture(lambda: ops.linear(ops.take_rows(hidden, chosen), packed))
    whole = ops.to_numpy(ops.replay(tape)).copy()
    index, value = ops.argmax(tape.output)
    assert index.tolist() == whole.argmax(axis=1).tolist()
    ops.to_numpy(tape.output)[:] = 7
    ops.largest_only = True
    found = ops.argmax(ops.replay(tape))
    assert found[0].tolist() == index.tolist()
    assert np.array_equal(found[1], value, equal_nan=True)
    assert (ops.to_numpy(tape.output) == 7).all()
    ops.largest_only = False
    assert np.array_equal(ops.to_numpy(ops.replay(tape)), whole, equal_nan=True)


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_is_the_same_among_any_others(ops, rows):
    x, weight = random(9, 64, 576), random(10, 576)
    for op in (lambda t: ops.rms_norm(t, weight, 1e-5), ops.silu_and_mul, ops.gelu_tanh_and_mul):
        whole = ops.to_numpy(op(tensor(ops, x))).copy()
        assert np.array_equal(ops.to_numpy(op(tensor(ops, x[64 - rows :]))), whole[64 - rows :])


@pytest.mark.parametrize("form", [abi.INT8, abi.INT16])
def test_conversion_to_integers_keeps_its_promises(ops, form):
    """Scale, values and sums of each block."""
    x = random(11, 5, 96)
    x[0, :32] = 0.0
    x[1, :32] = 1e-38  # so small that the largest over it overflows
    t = tensor(ops, x)
    buffer, activation = ops._activation(t, form)
    most, width = (127, 1) if form == abi.INT8 else (127 * 256, 2)
    raw = np.ctypeslib.as_array((abi.ctypes.c_int8 * (5 * 96 * width)).from_address(activation.values))
    blocks = raw.reshape(5, 3, width, 32).astype(np.int32)
    whole = blocks[:, :, 0] if form == abi.INT8 else 256 * blocks[:, :, 0] + blocks[:, :, 1]
    scale = np.ctypeslib.as_array((abi.ctypes.c_float * 15).from_address(activation.scale)).reshape(5, 3, 1)
    sums = np.ctypeslib.as_array((abi.ctypes.c_int32 * 30).from_address(activation.sums)).reshape(5, 6)
    assert np.abs(whole * scale - x.reshape(5, 3, 32)).max() <= np.abs(x).max() / most / 2 * 1.001
    assert np.abs(whole).max() == most
    assert np.array_equal(whole.reshape(5, 6, 16).sum(-1), sums)
    assert not whole[:2, 0].any() and buffer.address == activation.values


def test_a_step_that_is_too_large_is_refused(ops):
    with pytest.raises(ValueError, match="65 rows, and memory is reserved for 64"):
        tensor(ops, random(0, 65, 16))


def test_sizes_that_the_kernels_do_not_know_are_refused(ops):
    for sizes in ((8, 64), (16, 40), (16, 1040)):
        with pytest.raises(ValueError, match="multiples of 16"):
            ops.allocate_kv_cache(1, 4, sizes[0], 2, sizes[1])


def test_unknown_instruction_sets_and_numbers_of_threads_are_refused():
    with pytest.raises(KernelsMissing, match="kernels for mmx"):
        NativeOps(1, isa="mmx")
    with pytest.raises(KernelsMissing, match="0 threads"):
        NativeOps(0)


def test_threads_sleep_when_nothing_is_asked_of_them():
    ops = NativeOps(3)
    x, y = random(0, 8, 64), random(1, 8, 64)
    for _ in range(3):
        assert np.array_equal(ops.to_numpy(ops.add(tensor(ops, x), tensor(ops, y))), x + y)
        time.sleep(0.1)  # they have gone to sleep and must wake
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.05


def test_engines_work_side_by_side():
    """Each has threads and memory of its own; a run of one is no business of another."""
    x = random(0, 8, 64)
    failures = []

    def work():
        ops = NativeOps(2)
        for _ in range(50):
            if not np.array_equal(ops.to_numpy(ops.add(tensor(ops, x), tensor(ops, x))), 2 * x):
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(("bits", "layer", "head"), [("int8", "Q8_0", "Q8_0"), ("int4", "Q4_1", "Q8_0")])
def test_quantize_stores_floats_in_fewer_bits_and_logits_in_eight(bits, layer, head):
    ops = NativeOps(1, quantize=bits)
    weight = ops.weight([random(3, 32, 64)])
    for packed, kind in ((ops.pack(weight), layer), (ops.pack(weight, head=True), head)):
        (segment,) = packed.segments
        assert segment.weight.type == GGMLQuantizationType[kind]


def test_activations_are_the_faster_ones_unless_set(ops):
    isa = ops.engine.isa
    assert NativeOps(1, activations="auto", isa=isa).activations == ("bf16" if isa == "amx" else "int8")


def test_a_library_that_lacks_an_operation_is_another_versions(monkeypatch):
    load()
    monkeypatch.setattr(abi, "OP_KINDS", (*abi.OP_KINDS, "of tomorrow"))
    with pytest.raises(KernelsMissing, match="another version"):
        load.__wrapped__()
