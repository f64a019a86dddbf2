"""Recorded and replayed, in one piece or several: the bits of the eager run, for every batch by one graph."""

import numpy as np
import pytest

from kvern.kernels.cpu import abi
from kvern.kernels.cpu.library import KernelsMissing
from kvern.kernels.cpu.ops import NativeOps
from kvern.models.registry import load_model
from kvern.runner.graphs import BatchDescriptor, GraphMode, GraphRunner, TapeBackend
from kvern.runner.model_runner import ModelRunner
from tests.tiny_folder import NATIVE_SHAPE
from tests.tiny_model import Driver, RandomCheckpoint, tiny_config

WAYS = ({}, {"quantize": "int8", "activations": "int8"}, {"quantize": "int4"}, {"kv_dtype": "int8"})


def model(architecture="llama", threads=2, **options):
    config = tiny_config(architecture=architecture, **NATIVE_SHAPE)
    try:
        ops = NativeOps(threads, **options)
    except KernelsMissing as exc:
        pytest.skip(str(exc))
    return load_model(config, RandomCheckpoint(config), ops)


def outcome(made, mode):
    """Logits of three rows: chunks of prompts, then decodes, in batches of changing size."""
    driver = Driver(made, graph_mode=mode)
    rng = np.random.default_rng(0)
    for row, length in enumerate((40, 7, 90)):
        driver.add(row, rng.integers(0, 101, length).tolist())
    for amounts in ({0: 33, 1: 7}, {0: 7, 2: 64}, {2: 26, 1: 1}, {0: 1, 1: 1, 2: 1}, {1: 1}):
        driver.step(amounts)
    return driver.logits, driver.runner


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3"])
def test_every_mode_gives_the_same_bits(architecture, options):
    made = model(architecture, **options)
    want, eager = outcome(made, GraphMode.NONE)
    assert not eager._hidden_graphs.graphs
    for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
        got, runner = outcome(made, mode)
        assert got.keys() == want.keys() and all(np.array_equal(got[key], want[key]) for key in want)
        (tape,) = runner._hidden_graphs.graphs.values()  # one for all batches
        layers = made.config.num_layers
        assert len(tape.pieces) == (1 if mode is GraphMode.FULL else 4 * layers + 1)


def test_threads_change_no_bit():
    want, _ = outcome(model(threads=1), GraphMode.FULL)
    for threads in (2, 3):
        got, _ = outcome(model(threads=threads), GraphMode.FULL)
        assert all(np.array_equal(got[key], want[key]) for key in want)


def test_neighbours_are_joined_and_memory_is_shared():
    made = model()
    _, runner = outcome(made, GraphMode.FULL)
    (tape,) = runner._hidden_graphs.graphs.values()
    assert "gate" not in tape.kinds and "add" not in tape.kinds
    layers = made.config.num_layers
    assert tape.kinds.count("rms_norm") == 2 * layers + 1
    outputs = {op.linear.out.data for piece in tape.pieces for op in piece if abi.OP_KINDS[op.kind] == "linear"}
    assert len(outputs) < 4 * layers, "layers take turns with the same memory"


def test_a_result_that_somebody_else_reads_is_not_joined_away():
    """x W is gated, and also read as it is: both must be right."""
    ops = NativeOps(1)
    ops.reserve(4, 4)
    rng = np.random.default_rng(0)
    table = ops.weight([rng.standard_normal((4, 32), dtype=np.float32)])
    weight = ops.pack(ops.weight([rng.standard_normal((64, 32), dtype=np.float32)]))
    tokens = np.arange(4, dtype=np.int32)

    def both():
        y = ops.linear(ops.embedding(table, tokens), weight)
        gated = ops.silu_and_mul(y)
        first, _ = ops.split(y, [32, 32])
        return ops.add(gated, first)

    want = ops.to_numpy(both()).copy()
    tape = ops.capture(both)
    assert "gate" in tape.kinds
    ops.set_inputs(token_ids=tokens)
    assert np.array_equal(ops.to_numpy(ops.replay(tape)), want)


class CountingBackend:
    """Captures by calling: enough to see what the runner asks for."""

    def __init__(self):
        self.captured = []

    def key(self, descriptor):
        return descriptor

    def capture(self, call, *, pieces):
        self.captured.append(pieces)
        return call

    def replay(self, graph, inputs):
        return graph(), inputs.tolist()


def test_a_descriptor_is_captured_once_and_replayed_with_new_inputs():
    backend = CountingBackend()
    runner = GraphRunner(backend, GraphMode.PIECEWISE)
    small, large = BatchDescriptor(1, 1), BatchDescriptor(8, 2)
    for descriptor, value in ((small, 1), (large, 2), (small, 3)):
        result, given = runner(descriptor, lambda tokens: "hidden", np.array([value]))
        assert (result, given) == ("hidden", [value])
    assert backend.captured == [True, True] and len(runner.graphs) == 2


def test_without_a_backend_the_call_runs_as_it_stands():
    for runner in (GraphRunner(None, GraphMode.FULL), GraphRunner(CountingBackend(), GraphMode.NONE)):
        assert runner(BatchDescriptor(1, 1), lambda tokens: tokens + 1, np.array([4])).tolist() == [5]


def test_a_tape_reads_its_inputs_from_the_step():
    ops = NativeOps(1)
    ops.reserve(8, 8)
    table = ops.weight([np.arange(64, dtype=np.float32).reshape(4, 16)])
    backend = TapeBackend(ops, "token_ids")
    tape = backend.capture(lambda: ops.embedding(table, np.array([0], dtype=np.int32)), pieces=False)
    for ids in ([3], [1, 2, 0], [2, 2]):
        out = backend.replay(tape, np.array(ids, dtype=np.int32))
        assert np.array_equal(ops.to_numpy(out), np.arange(64, dtype=np.float32).reshape(4, 16)[ids])
    with pytest.raises(ValueError, match="9 rows"):
        backend.replay(tape, np.zeros(9, dtype=np.int32))


def test_runner_options_reach_the_graphs():
    made = model()
    assert isinstance(Driver(made, graph_mode=GraphMode.NONE).runner, ModelRunner)
    assert not Driver(made, graph_mode=GraphMode.NONE).runner.recorded
    assert Driver(made).runner.recorded
